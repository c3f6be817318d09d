"""The prepared run for a card, in small on a CPU: the same program from end to end."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from core.bench import random_pair as synthetic
from core.bench import synthetic as bench_synthetic
from core.bench import synthetic_checks, synthetic_report
from core.bench.cards import CARDS
from core.bench.roofline import HOST, Asked, Work
from core.bench.synthetic_memory import Full
from core.bench.synthetic_report import LAUNCHES_K, ROWS, TINY, Report
from core.bench.synthetic_traffic import Traffic
from core.engine.loop import Engine
from core.pairs.catalogue import CATALOGUE
from core.records import Settings

ROOT = Path(__file__).resolve().parents[3]
# What a machine without network may lack; torch, transformers and bitsandbytes bring none of it.
ABSENT = (
    "psutil",
    "gguf",
    "gradio",
    "plotly",
    "pandas",
    "accelerate",
    "llama_cpp",
    "sentencepiece",
    "kernels",
)
CPU = torch.device("cpu")
SHAPES = ((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944))  # of a 7B's products in a layer


WORK = Work(Asked(100, 50, 9), Asked(20, 10, 5), Asked(10, 5), Asked(12, 5))


def test_it_begins_with_the_three_packages_alone():
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({ABSENT}))\n"
        "from core.bench.synthetic import main\n"
        "sys.exit(main(['--device', 'cpu']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2 and "--small" in done.stderr


def test_the_whole_run_in_small_with_the_three_packages_alone(tmp_path, monkeypatch, capsys):
    """What the fake card counts is ``tests/core/bench/test_roofline.py``'s: it takes seconds."""
    synthetic.random_decoder(synthetic.SMALL[0], "nf4", CPU)  # libraries look once for what is installed
    for name in ABSENT:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(synthetic_report.roofline, "count", lambda *how: WORK)
    file = tmp_path / "figures.json"
    assert bench_synthetic.main(["--device", "cpu", "--small", "--json", str(file)]) == 0
    said, told = capsys.readouterr()
    sections = (
        "Agreement with the CPU",
        "waits",
        "rows: ms",
        "draft step",
        "Expected acceptance",
        "memory is full",
    )
    at = [said.index(section) for section in sections]
    assert at == sorted(at), "what would settle most comes first"
    assert "Traceback" not in told, "memory that is out is a sentence, no traceback"
    figures = json.loads(file.read_text())
    assert figures["problems"] == []
    assert figures["agreement"]["filters"] < 1e-6 and figures["agreement"]["verdicts"] == 0
    for kind in ("lean", "transformers"):
        assert figures["agreement"][kind]["probability"] < 1e-5
        assert figures["agreement"][kind]["different_replies"] == 0
    assert set(figures["ways"]) == {"ngram", "recycling", "auto"}
    for way in figures["ways"].values():
        assert (way["waits"], way["drafted"]) == (1, LAUNCHES_K)
    assert "too little memory" in figures["memory"]["sentence"]
    assert figures["memory"]["usable"] and figures["memory"]["played"]
    pairs = figures["pairs"]
    assert list(pairs) == ["nf4, bfloat16", "nf4, float16", "none, bfloat16"]
    for pair in pairs.values():
        assert pair["rows"] == list(ROWS) and len(pair["verify_seconds"]) == len(ROWS)
    whole, *brief = pairs.values()
    assert all(flow["waits"] == 1 for flow in whole["traffic"].values())
    assert [flow["fake_launches"] for flow in whole["traffic"].values()] == [110, 192]
    assert whole["traffic"]["4"]["launches"] > whole["traffic"]["0"]["launches"]
    assert list(whole["speed"]) == ["0.6", "0.8"] and [list(pair["speed"]) for pair in brief] == [["0.8"]] * 2
    for acceptance, rows in whole["speed"].items():
        assert [row["k"] for row in rows] == list(TINY.ks)
        for row in rows[1:]:
            deviation = (float(acceptance) * (1 - float(acceptance)) / row["tested"]) ** 0.5
            assert row["acceptance"] == pytest.approx(float(acceptance), abs=4 * deviation)
            assert row["alpha"] == pytest.approx(float(acceptance), abs=1e-6) and row["roofline"] > 0
    nf4, dense = (pairs[name]["weight_bytes"]["target"] for name in ("nf4, bfloat16", "none, bfloat16"))
    assert nf4 < 0.4 * dense  # the head is in bfloat16 either way


def test_what_is_not_as_it_must_be_is_said_again_at_the_end(monkeypatch, capsys):
    """A second wait a round, and verdicts that differ, end with status 1."""
    monkeypatch.setattr(synthetic_report, "filters_differ", lambda device: 0.5)
    monkeypatch.setattr(synthetic_report, "verdicts_differ", lambda device, cases: 2)
    monkeypatch.setattr(synthetic_report, "tiny_differs", lambda *how: (0.0, 1, 4))
    twice = Traffic(100.0, 2.0, 1.0, 4.0)
    monkeypatch.setattr(synthetic_report, "traffic", lambda *how: twice)

    def measure(report, form, dtype, place, sizes, here, brief):
        pair = types.SimpleNamespace(info=types.SimpleNamespace(device="cuda"))
        if not brief:
            work = Work(Asked(100, 0), Asked(10, 0), Asked(5, 0), Asked(6, 0))
            report.figures["found"] = synthetic_report.rounds_asked(report, pair, [1], work)
        return {}

    monkeypatch.setattr(bench_synthetic, "measure", measure)
    monkeypatch.setattr(bench_synthetic, "measured", lambda device, copied: (CARDS["t4"], HOST))
    assert bench_synthetic.run("cpu", small=True) == 1
    said = capsys.readouterr().out
    assert "2.00 waits, 100 launches, 1.0 copies to the host; the fake card counts 146 that launch" in said
    end = said[said.index("s in all") :]
    assert end.count("NOT AS IT MUST BE") == 6  # filters, verdicts, two kinds of model, K = 0 and 4


def test_what_the_fake_card_cannot_count_does_not_end_the_run(monkeypatch, capsys):
    def fail(*how):
        raise AttributeError("torch changed")

    monkeypatch.setattr(synthetic_report.roofline, "count", fail)
    assert synthetic_report.work_of(Report(), TINY, torch.bfloat16) is None
    assert "cannot count here: AttributeError: torch changed" in capsys.readouterr().out


def test_past_its_time_nothing_new_is_begun(monkeypatch, capsys):
    monkeypatch.setattr(synthetic_report, "LIMIT_SECONDS", -1)
    monkeypatch.setattr(bench_synthetic, "agreement", lambda *how: None)
    monkeypatch.setattr(bench_synthetic, "measured", lambda device, copied: (CARDS["t4"], HOST))
    assert bench_synthetic.run("cpu", small=True) == 0
    assert capsys.readouterr().out.count("left out, the time is up") == 3


def test_where_weights_are_unpacked_is_said_of_the_card():
    target = types.SimpleNamespace(
        dtype=torch.bfloat16,
        layers=[types.SimpleNamespace(products=[types.SimpleNamespace(shape=shape) for shape in SHAPES])],
    )
    assert synthetic_report._switch(target, CARDS["a100-80"]).endswith("out from 6 rows, down from 6 rows")
    assert synthetic_report._switch(target, CARDS["rtx-3060"]).endswith("never here")


@pytest.mark.parametrize("usable", [True, False])
def test_an_engine_that_is_of_no_use_afterwards_is_a_problem(monkeypatch, usable):
    found = Full("The reply ended early.", usable, False)
    monkeypatch.setattr(synthetic_report, "full_memory", lambda pair, ids: found)
    report = Report()
    pair = types.SimpleNamespace(info=types.SimpleNamespace(device="cuda"))
    synthetic_report.memory(report, pair, [1])
    assert bool(report.problems) is not usable


def test_what_the_fake_card_counts_is_the_pair_that_is_measured():
    entry = CATALOGUE["qwen2.5-7b"]
    for sizes, model in zip(synthetic.LARGE, (entry.target_model, entry.draft_model), strict=True):
        assert synthetic.config_of(sizes) == model.config | {"max_position_embeddings": synthetic.CONTEXT}


@pytest.mark.parametrize("acceptance", [0.6, 0.8])
def test_the_script_says_what_it_promises(acceptance):
    p, q = (row.softmax(0) for row in synthetic.script(acceptance, 500, 480, CPU))
    assert torch.minimum(p[:480], q).sum().item() == pytest.approx(acceptance, abs=1e-6)
    drafted = q > 0
    ratio = p[:480][drafted] / q[drafted]
    assert ratio.min() == pytest.approx(acceptance, rel=1e-4) and ratio.max() == pytest.approx(
        acceptance, rel=1e-4
    )


def test_a_pass_that_goes_wrong_is_not_hidden_by_the_script():
    target, draft = (synthetic.random_decoder(sizes, "none", CPU) for sizes in synthetic.SMALL)
    target.norm[3] = float("nan")
    pair = synthetic.scripted_pair(target, draft, 0.6, "none")
    generation = Engine(pair, batched=True).generate([1, 2], Settings(max_new_tokens=4))
    list(generation)
    assert generation.reply.finish_reason == "error"


@pytest.mark.parametrize("form, bytes_a_weight", [("nf4", 0.5), ("none", 2)])
def test_weights_are_counted_as_they_are_held(form, bytes_a_weight):
    sizes = synthetic.SMALL[0]
    decoder = synthetic.random_decoder(sizes, form, CPU)
    hidden, inner, kv = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_key_value_heads"]
    size = hidden // sizes["num_attention_heads"]
    layer = hidden * (2 * hidden + 2 * kv * size) + 3 * hidden * inner
    expected = bytes_a_weight * layer * sizes["num_hidden_layers"] + 2 * hidden * sizes["vocab_size"]
    found = synthetic.weight_bytes(decoder)
    assert expected <= found <= 1.15 * expected  # NF4 has scales, too


def test_checks_notice_other_maths(monkeypatch):
    from core.engine import device_rule

    true = device_rule.distributions
    monkeypatch.setattr(
        synthetic_checks.device_rule,
        "distributions",
        lambda rows, settings, seen=None: true(rows * 1.01, settings, seen),
    )
    assert synthetic_checks.filters_differ(CPU) > 1e-3
    judge = device_rule.judge
    monkeypatch.setattr(
        synthetic_checks.device_rule,
        "judge",
        lambda p, q, ids, count, u, how: judge(p, q, ids, count, u.flip(0), how),
    )
    assert synthetic_checks.verdicts_differ(CPU, 5) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_so(capsys):
    assert bench_synthetic.main([]) == 2
    assert "--device cpu" in capsys.readouterr().err
    assert bench_synthetic.main(["--device", "cpu"]) == 2
    assert "--small" in capsys.readouterr().err
