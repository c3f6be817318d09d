"""What is chosen: what is right here and fastest, whatever a kernel says of itself, and again later."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from core.models.linear import __main__ as command
from core.models.linear import evidence, forms, int8
from core.models.linear.evidence import ROWS, Evidence, Found, Sizes

SMALL = Sizes(((96, 64), (64, 64), (128, 64), (64, 128)), 2, (256, 64))
REFERENCE = "int8x2-reference"


class Reference:
    """A kernel in plain torch, as slow and as right as it is made."""

    name, half, rounds = "reference", 127, True

    def __init__(self, levels, scale):
        self.levels, self.scale = levels.float(), scale

    def __call__(self, x):
        return x.round() @ self.levels.T * self.scale


class Slow(Reference):
    now = 0.0  # of a clock by which only its products take time

    def __call__(self, x):
        Slow.now += 1.045
        return super().__call__(x)


class Saturated(Reference):
    """Sums of two products in 16 bits, as x86 without VNNI makes them."""

    def __call__(self, x):
        pairs = ((x.round() + 128)[:, None, :] * self.levels).unflatten(2, (-1, 2)).sum(3)
        return (pairs.clamp(-32768, 32767).sum(2) - 128 * self.levels.sum(1)) * self.scale


class Missing(Reference):
    def __init__(self, levels, scale):
        raise AttributeError("'_OpNamespace' 'onednn' object has no attribute 'qlinear_prepack'")


class Neighbours(Reference):
    """One scale for all rows: right for each alone."""

    def __call__(self, x):
        return super().__call__(x) * (1 + 1e-7 * len(x))


@pytest.fixture
def kernel(monkeypatch):
    def use(kind):
        monkeypatch.setitem(int8.KERNELS, "reference", kind)
        monkeypatch.setattr(evidence.time, "perf_counter", lambda: Slow.now)
        return evidence.check(REFERENCE, SMALL, evidence.HOPELESS * 0.0007)[0]

    return use


def test_a_right_kernel_is_right(kernel):
    found = kernel(Reference)
    assert found.right and found.error < 1e-6 and found.alone < 1e-6


def test_a_kernel_that_was_made_wrong_is_not_chosen(kernel):
    found = kernel(Saturated)
    assert not found.right and found.error > 0.05 and found.verdict.startswith("wrong by")


def test_a_kernel_that_was_made_slow_is_not_chosen(kernel):
    """After one call, with what that took in its report."""
    found = kernel(Slow)
    assert not found.right and found.error < 1e-6
    assert found.verdict == "too slow: 1045 ms where the quickest takes 0.7"


def test_a_kernel_that_is_not_there_says_so(kernel):
    found = kernel(Missing)
    assert found.error is None and "does not run here ('_OpNamespace' 'onednn'" in found.verdict


def test_a_kernel_whose_rows_depend_on_each_other_is_not_chosen(kernel):
    found = kernel(Neighbours)
    assert 1e-7 < found.alone < 1e-5 and found.error < 1e-5
    assert found.verdict.startswith("a row depends on the rows beside it, by ")


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
    monkeypatch.setattr(evidence, "attends_alike", lambda name: name in steady)
    assert evidence._attention({"float32": (1e-3, 1e-2), "bfloat16": (few, 10 * few)}) == chosen


def test_attention_whose_rows_depend_on_each_other_is_not_chosen(monkeypatch):
    attend = evidence.F.scaled_dot_product_attention

    def by_rows(query, keys, values, attn_mask):
        return attend(query, keys, values, attn_mask) * query.shape[2]

    monkeypatch.setattr(evidence.F, "scaled_dot_product_attention", by_rows)
    assert not evidence.attends_alike("float32")
    monkeypatch.undo()
    assert evidence.attends_alike("float32")


def test_numbers_that_are_none_are_wrong(monkeypatch, kernel):
    monkeypatch.setattr(
        Reference, "__call__", lambda self, x: torch.full((len(x), len(self.scale)), torch.nan)
    )
    assert kernel(Reference).error == float("inf")


def test_what_is_looked_for_is_right_and_in_turn_fastest():
    found = evidence.look(SMALL)
    by_form = {entry.form: entry for entry in found.table}
    assert set(by_form) >= set(forms.NAMES)
    assert all(by_form[form].right for form in (found.layers, found.head, found.draft))
    assert found.attention in forms.DENSE and set(found.attended) == set(forms.DENSE)
    assert forms.is_close(found.layers) and not found.head.startswith((forms.ONE, "int4"))
    for entry in found.table:
        assert (len(entry.layers) == len(ROWS)) == entry.right and bool(entry.verdict) != entry.right


def entry(form: str, *milliseconds: float, head: float = 1, **more) -> Evidence:
    return Evidence(form, 0.0, layers=tuple(m / 1e3 for m in milliseconds), head=(head / 1e3,) * 4, **more)


def found(*table: Evidence, **chosen) -> Found:
    chosen = {"layers": "float32", "head": "float32", "draft": "float32", "attention": "float32"} | chosen
    return Found(**chosen, table=table, attended={"float32": (1e-3, 1e-2), "bfloat16": (2e-3, 2e-2)})


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
    monkeypatch.setattr(evidence, "_timed", lambda table, *_: list(table))
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


def test_one_disturbed_call_rules_nothing_out(monkeypatch):
    """Of three the least counts."""
    monkeypatch.setitem(int8.KERNELS, "reference", Reference)
    ticks = iter([0.0, 0.09, 1.0, 1.001, 2.0, 2.0005] * 2)
    monkeypatch.setattr(evidence.time, "perf_counter", lambda: next(ticks))
    found, taken = evidence.check(REFERENCE, SMALL, 0.002)
    assert found.right and taken == pytest.approx(0.0005)


def test_dense_products_are_there_whatever_they_take(monkeypatch):
    """Where nothing else is right they have to do."""
    monkeypatch.setattr(evidence.time, "perf_counter", iter(range(1000)).__next__)
    assert evidence.check("float32", SMALL, 1e-6)[0].right
    assert evidence.check("bfloat16", SMALL, 1e-6)[0].right
    assert evidence.check("int4", SMALL, 1e-6)[0].verdict.startswith("too slow")
    monkeypatch.setattr(evidence, "_error", lambda *_: 0.5)
    assert evidence.check("float32", SMALL)[0].right and not evidence.check("bfloat16", SMALL)[0].right


def test_the_sizes_are_those_of_the_embedded_target(embedded_folder):
    config = json.loads((embedded_folder / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_size = hidden // config["num_attention_heads"]
    qkv = hidden + 2 * config["num_key_value_heads"] * head_size
    layers = ((qkv, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner))
    assert evidence.EMBEDDED == Sizes(layers, config["num_hidden_layers"], (config["vocab_size"], hidden))


def test_a_family_is_run_by_its_fastest_kernel_or_dense():
    some = found(
        entry("int8-fbgemm", 1, 1, 1, 1),  # only for what is rotated
        entry("int8x2-fbgemm", 5, 5, 5, 5),
        entry("int8x2-onednn", 4, 4, 4, 4),
        entry("int4", 200, 200, 200, 200),
        entry("int4+bfloat16", 3, 3, 3, 3),  # more memory than who asks for int4 expects
        entry("bfloat16", 40, 40, 40, 40),
        entry("float32", 50, 50, 50, 50),
    )
    assert (some.best("int8"), some.best("int4"), some.reads_bfloat16) == ("int8x2-onednn", "bfloat16", True)


def test_on_a_slow_machine_there_is_one_turn_and_no_prompt(monkeypatch):
    """By a clock that each look at takes on by a second."""
    seconds = iter(range(10**6))
    monkeypatch.setattr(evidence.time, "perf_counter", lambda: float(next(seconds)))
    said = []
    (timed,) = evidence._timed([Evidence("float32", 0.0)], SMALL, lambda *what: said.append(what))
    assert timed.layers[3] == 32 * timed.layers[2] and timed.head[3] == timed.head[0]
    assert len(said) == 1 and said[0][0] == evidence.LOOKING


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


def test_the_time_of_others_is_what_is_not_this_processs(monkeypatch):
    times = iter([dict(user=10, system=5, idle=100, guest=9), dict(user=15, system=6, idle=104, guest=9)])
    made = lambda: SimpleNamespace(_asdict=next(times).copy)  # noqa: E731
    monkeypatch.setattr("psutil.cpu_times", made)
    monkeypatch.setattr(evidence.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(evidence.time, "monotonic", iter([0.0, 5.0]).__next__)
    monkeypatch.setattr(evidence.time, "process_time", iter([1.0, 3.0]).__next__)
    assert evidence._Others().percent() == 40  # of ten core-seconds six were busy, two of them ours


@pytest.mark.parametrize("change", ["threads", "version", "flags", "narrowed", "sizes"])
def test_another_machine_is_looked_at_anew(looks, tmp_path, monkeypatch, change):
    def cpuinfo(flags):
        read = Path.read_text
        told = f"model name : One\nflags : {flags}\n\nmodel name : Two"
        return lambda path, **how: told if path.name == "cpuinfo" else read(path, **how)

    evidence._processor.cache_clear()
    monkeypatch.setattr(Path, "read_text", cpuinfo("avx2"))
    evidence.find(SMALL, tmp_path)
    sizes = SMALL
    if change == "threads":
        monkeypatch.setattr(evidence, "_THREADS", 77)
    elif change == "version":
        monkeypatch.setattr(torch, "__version__", "9.9")
    elif change == "flags":
        evidence._processor.cache_clear()
        monkeypatch.setattr(Path, "read_text", cpuinfo("avx2 avx_vnni"))
    elif change == "narrowed":
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    else:
        sizes = dataclasses.replace(SMALL, count=3)
    evidence.find(sizes, tmp_path)
    evidence._processor.cache_clear()
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
