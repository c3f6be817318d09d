"""The prepared run for a card, in small on a CPU: the same program from end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from core import bench_synthetic, synthetic
from core.engine import Engine
from core.records import Settings

ROOT = Path(__file__).resolve().parents[2]
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


def test_the_whole_run_in_small_with_the_three_packages_alone(tmp_path):
    file = tmp_path / "figures.json"
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({ABSENT}))\n"
        "from core.bench_synthetic import main\n"
        f"sys.exit(main(['--device', 'cpu', '--small', '--json', {str(file)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    for expected in ("Expected acceptance 0.60", "Expected acceptance 0.80"):
        assert done.stdout.count(expected) == 2  # NF4 and bfloat16
    figures = json.loads(file.read_text())
    assert figures["agreement"]["filters"] < 1e-6 and figures["agreement"]["verdicts"] == 0
    for kind in ("lean", "transformers"):
        assert figures["agreement"][kind]["probability"] < 1e-5
        assert figures["agreement"][kind]["different_replies"] == 0
    assert list(figures["pairs"]) == ["nf4", "bfloat16"]
    for pair in figures["pairs"].values():
        assert len(pair["verify_seconds"]) == bench_synthetic.MOST + 1
        assert all(flow["waits"] == 1 for flow in pair["traffic"].values())
        assert pair["traffic"]["4"]["launches"] > pair["traffic"]["0"]["launches"]
        for acceptance, rows in pair["speed"].items():
            assert [row["k"] for row in rows] == list(range(bench_synthetic.MOST + 1))
            for row in rows[1:]:
                deviation = (float(acceptance) * (1 - float(acceptance)) / row["tested"]) ** 0.5
                assert row["acceptance"] == pytest.approx(float(acceptance), abs=4 * deviation)
                assert row["alpha"] == pytest.approx(float(acceptance), abs=1e-6)
    nf4, bfloat16 = (figures["pairs"][form]["weight_bytes"]["target"] for form in ("nf4", "bfloat16"))
    assert nf4 < 0.4 * bfloat16  # the head is in bfloat16 either way


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
    target, draft = (synthetic.random_decoder(sizes, "bfloat16", CPU) for sizes in synthetic.SMALL)
    target.norm[3] = float("nan")
    pair = synthetic.scripted_pair(target, draft, 0.6, "bfloat16")
    generation = Engine(pair, batched=True).generate([1, 2], Settings(max_new_tokens=4))
    list(generation)
    assert generation.reply.finish_reason == "error"


@pytest.mark.parametrize("form, bytes_a_weight", [("nf4", 0.5), ("bfloat16", 2)])
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
    from core import device_rule

    true = device_rule.distributions
    monkeypatch.setattr(
        bench_synthetic.device_rule,
        "distributions",
        lambda rows, settings, seen=None: true(rows * 1.01, settings, seen),
    )
    assert bench_synthetic.filters_differ(CPU) > 1e-3
    judge = device_rule.judge
    monkeypatch.setattr(
        bench_synthetic.device_rule,
        "judge",
        lambda p, q, ids, count, u, how: judge(p, q, ids, count, u.flip(0), how),
    )
    assert bench_synthetic.verdicts_differ(CPU, 5) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_so(capsys):
    assert bench_synthetic.main([]) == 2
    assert "--device cpu" in capsys.readouterr().err
    assert bench_synthetic.main(["--device", "cpu"]) == 2
    assert "--small" in capsys.readouterr().err
