"""What is chosen: what is right here and fastest, whatever a kernel says of itself, and again later."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from core.models import processor
from core.models.linear import __main__ as command
from core.models.linear import evidence, forms
from core.models.linear.findings import ROWS, Evidence
from tests.core.linear.some_findings import SMALL, entry, found


@pytest.mark.parametrize(
    "few, steady, chosen",
    [
        (0.7e-3, ("float32", "bfloat16"), "bfloat16"),
        (0.95e-3, ("float32", "bfloat16"), "float32"),
        (0.7e-3, ("float32",), "float32"),
        (2e-3, ("bfloat16",), "bfloat16"),
        (2e-3, (), "float32"),
    ],
)
def test_attention_is_in_16_bits_where_that_is_faster_by_far(monkeypatch, few, steady, chosen):
    monkeypatch.setattr(evidence, "attends_alike", lambda name, _: name in steady)
    assert evidence._attention({"float32": (1e-3, 1e-2), "bfloat16": (few, 10 * few)}, SMALL) == chosen


def test_what_is_looked_for_is_right_and_in_turn_fastest():
    found = evidence.look(SMALL)
    by_form = {entry.form: entry for entry in found.table}
    assert set(by_form) >= set(forms.NAMES)
    assert all(by_form[form].right for form in (found.layers, found.head, found.draft))
    assert found.attention in forms.DENSE and set(found.attended) == set(forms.DENSE)
    assert forms.is_close(found.layers) and not found.head.startswith((forms.ONE, "int4"))
    for form in found.table:
        assert (len(form.layers) == len(ROWS)) == form.right and bool(form.verdict) != form.right


@pytest.mark.parametrize(
    "table, layers, head, draft",
    [
        # A processor with VNNI and no AMX: int8 in one part, which is rotated.
        (
            [
                entry("int8-fbgemm", 4.5, 5.9, 8.7, 75, head=0.7),
                entry("int8x2-fbgemm", 4.8, 8.7, 12, 150, head=0.8),
                entry("int4", 4.3, 7.3, 13.9, 450, head=1),
                entry("float32", 40, 45, 50, 150, head=9),
            ],
            "int8-fbgemm",
            "int8x2-fbgemm",
            "int4",
        ),
        # With AMX: int4, and prompts in bfloat16.
        (
            [
                entry("int8x2-onednn", 10, 10, 10, 100, head=1),
                entry("int4", 4.9, 8.4, 16, 299, head=1),
                entry("bfloat16", 24, 24, 24, 28, head=3),
                entry("float32", 50, 60, 60, 148, head=9),
            ],
            "int4+bfloat16",
            "int8x2-onednn",
            "int4",
        ),
        # With neither: 7-bit activations for the head alone.
        (
            [
                entry("int8-fbgemm", verdict="wrong by 99%"),
                entry("int8-fbgemm7", 15, 16, 20, 350, head=2.8),
                entry("int8x2-fbgemm7", 34, 40, 54, 1043, head=2.9),
                entry("int4", 14, 22, 40, 1134, head=2.5),
                entry("float32", 53, 100, 110, 561, head=13),
            ],
            "int4",
            "int8x2-fbgemm7",
            "int4",
        ),
        # Dense a little faster, by noise perhaps: what is row by row the same is kept.
        (
            [
                entry("int8x2-fbgemm", 5, 9, 12, 150, head=1),
                entry("int4", 4, 7.5, 16, 200, head=1),
                entry("bfloat16", 4, 7, 9, 120, head=0.9),
                entry("float32", 9, 9, 9, 130, head=2),
            ],
            "int4",
            "int8x2-fbgemm",
            "bfloat16",
        ),
        # Nothing but dense.
        ([entry("int4", verdict="too slow: 37 ms"), entry("float32", 50, 60, 60, 148)], *["float32"] * 3),
    ],
)
def test_the_choice(monkeypatch, table, layers, head, draft):
    by_form = {entry.form: entry for entry in table}
    monkeypatch.setattr(evidence, "check", lambda form, *_: (by_form[form], 1e-3))
    monkeypatch.setattr(evidence, "timed", lambda table, *_: list(table))
    chosen = evidence.look(SMALL, tuple(by_form))
    assert (chosen.layers, chosen.head, chosen.draft) == (layers, head, draft)
    assert bool(chosen.sentence) == (layers == "float32")
    if not chosen.sentence:  # nor where dense products are simply faster
        assert dataclasses.replace(chosen, layers="float32").sentence is None
    if chosen.sentence:
        assert chosen.sentence.startswith("No quantised product is right and quick on this processor")


def test_a_product_that_reads_prompts_by_their_cuts_is_not_chosen(monkeypatch):
    table = [entry("int4", 4, 8, 16, 300), entry("bfloat16", 25, 25, 25, 28)]
    (found,) = evidence._beside(table, SMALL)
    assert found.right and found.form == "int4+bfloat16" and found.layers[-1] == 0.028
    monkeypatch.setattr(evidence, "reads_alike", lambda product: False)
    (found,) = evidence._beside(table, SMALL)
    assert found.verdict == "a row of a prompt depends on where it stands"
    assert evidence._beside(table[1:], SMALL) == []


def test_of_kernels_that_take_longer_none_is_timed():
    table = [entry(form) for form in ("int8-fbgemm", "int8-onednn", "int8-qnnpack", "int4")]
    listed = evidence._shortlist(
        table, {"int8-fbgemm": 1.0, "int8-onednn": 2.9, "int8-qnnpack": 9, "int4": 50}
    )
    assert [e.form for e in listed if e.right] == ["int8-fbgemm", "int8-onednn", "int4"]


@pytest.fixture
def looks(monkeypatch):
    """How often the machine was looked at, which finds one thing the first time and another later."""
    made = []

    def look(sizes, **_):
        made.append(sizes)
        return found(entry("float32", 1, 1, 1, 1), layers="int4" if len(made) == 1 else "float32")

    monkeypatch.setattr(evidence, "look", look)
    monkeypatch.setattr(evidence, "_found", {})
    return made


def test_a_machine_is_looked_at_once(looks, tmp_path, monkeypatch):
    first = evidence.find(SMALL, tmp_path)
    assert evidence.find(SMALL, tmp_path) is first
    evidence._found.clear()  # another process
    assert evidence.find(SMALL, tmp_path) == first and len(looks) == 1
    assert evidence.find(SMALL, tmp_path, again=True).layers == "float32" and len(looks) == 2
    evidence._found.clear()
    assert evidence.find(SMALL, tmp_path).layers == "float32" and len(looks) == 2


def test_what_was_found_beside_other_work_is_looked_for_anew_when_that_is_over(looks, tmp_path, monkeypatch):
    """The first start is often a busy one; a kept choice by such times would mislead for good."""
    look = evidence.look
    monkeypatch.setattr(evidence, "look", lambda sizes, **_: dataclasses.replace(look(sizes), others=80.0))
    busy = [90.0]
    monkeypatch.setattr(evidence, "busy_percent", lambda: busy[0])
    assert evidence.find(SMALL, tmp_path).disturbed
    evidence._found.clear()
    evidence.find(SMALL, tmp_path)
    assert len(looks) == 1  # still busy: the same again
    evidence._found.clear()
    monkeypatch.setattr(evidence, "look", look)
    busy[0] = 3.0
    assert not evidence.find(SMALL, tmp_path).disturbed and len(looks) == 2
    evidence._found.clear()
    evidence.find(SMALL, tmp_path)
    assert len(looks) == 2


@pytest.mark.parametrize("change", ["threads", "version", "flags", "narrowed", "sizes"])
def test_another_machine_is_looked_at_anew(looks, tmp_path, monkeypatch, change):
    def cpuinfo(flags):
        read = Path.read_text
        told = f"model name : One\nflags : {flags}\n\nmodel name : Two"
        return lambda path, **how: told if path.name == "cpuinfo" else read(path, **how)

    processor.description.cache_clear()
    monkeypatch.setattr(Path, "read_text", cpuinfo("avx2"))
    evidence.find(SMALL, tmp_path)
    sizes = SMALL
    if change == "threads":
        monkeypatch.setattr(evidence, "_THREADS", 77)
    elif change == "version":
        monkeypatch.setattr(torch, "__version__", "9.9")
    elif change == "flags":
        processor.description.cache_clear()
        monkeypatch.setattr(Path, "read_text", cpuinfo("avx2 avx_vnni"))
    elif change == "narrowed":
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    else:
        sizes = dataclasses.replace(SMALL, count=3)
    evidence.find(sizes, tmp_path)
    processor.description.cache_clear()
    assert len(looks) == 2


@pytest.mark.parametrize("kept", ["", "[]", "{", "damaged", "unknown", "later", "nothing"])
def test_what_cannot_be_read_is_looked_for_anew(looks, tmp_path, kept):
    evidence.find(SMALL, tmp_path)
    path = tmp_path / evidence.KEPT
    if kept == "damaged":
        kept = path.read_text().replace('"table"', '"tables"')
    elif kept == "unknown":
        kept = path.read_text().replace('"layers": "int4"', '"layers": "int8-of-later"')
    elif kept == "later":
        kept = path.read_text().replace('"layers": "int4"', '"layers": "int3"')
    elif kept == "nothing":
        kept = json.dumps({name: None for name in json.loads(path.read_text())})
    path.write_text(kept)
    evidence._found.clear()
    evidence.find(SMALL, tmp_path)
    assert len(looks) == 2 and len(json.loads(path.read_text())) == 1


def test_a_folder_that_cannot_be_written_is_no_obstacle(looks, tmp_path, caplog):
    (tmp_path / "file").touch()
    assert evidence.find(SMALL, tmp_path / "file").layers == "int4"
    assert "is not kept" in caplog.text


def test_the_command_shows_the_table(looks, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("REDLINE_HOME", str(tmp_path))
    wrong = Evidence("int8-fbgemm", 0.99, verdict="wrong by 99%")
    table = entry("int4", 4, 8, 16, 300), wrong, entry("float32", 9, 9, 9, 9)
    monkeypatch.setattr(evidence, "look", lambda sizes, **_: found(*table, layers="int4"))
    monkeypatch.setattr("sys.argv", ["linear"])
    command.main()
    lines = capsys.readouterr().out.splitlines()
    assert any("int4" in line and "8.00" in line and line.endswith("chosen: layers") for line in lines)
    assert any("int8-fbgemm" in line and line.endswith("wrong by 99%") for line in lines)
    assert "attention of a layer, 4 and 256 rows: float32 1.00 and 10.00" in lines[-1]
