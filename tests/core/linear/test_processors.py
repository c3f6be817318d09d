"""The embedded pair on other processors than this one: narrowed by variables, and with operators taken away.

``ONEDNN_MAX_CPU_ISA`` holds oneDNN back, ``ATEN_CPU_CAPABILITY`` torch's own kernels; FBGEMM chooses by
itself, which no variable narrows. A machine cannot be widened: a variable that names more than it has changes
nothing. What runs must be right there, and chosen by what was found there; how long it takes nobody asks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from core.models.linear import forms

ROOT = Path(__file__).resolve().parents[3]
TAKEN = ("fbgemm", "fbgemm7", "onednn", "qnnpack")
LOST = 0.02  # nats that a form may cost, on the tokens of one short reply
ISAS = ("", "AVX512_CORE_VNNI", "AVX2_VNNI", "AVX2", "SSE41")
CAPABILITIES = ("", "avx2", "default")
QUICK = {("AVX512_CORE_VNNI", ""), ("AVX2", "default")}


def on(home: Path, tmp_path: Path, isa: str, capability: str, *arguments: str) -> dict:
    """What the pair found and said there, in a cache of its own beside the models of ``home``."""
    own = tmp_path / "home"
    own.mkdir()
    (own / "models").symlink_to(home / "models", target_is_directory=True)
    narrowed = {"ONEDNN_MAX_CPU_ISA": isa, "ATEN_CPU_CAPABILITY": capability}
    environment = {name: value for name, value in os.environ.items() if name not in narrowed}
    environment |= {name: value for name, value in narrowed.items() if value} | {"REDLINE_HOME": str(own)}
    command = [sys.executable, "-m", "tests.core.linear.on_processor", *arguments]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def check(found: dict) -> None:
    right = {entry["form"] for entry in found["table"] if not entry["verdict"]}
    assert {found["layers"], found["head"], found["draft"]} <= right
    assert all(entry["error"] <= 0.01 for entry in found["table"] if entry["form"] in right)
    assert found["kl"] < LOST and found["overlap"] > 0.9
    assert len(found["plain"]) == len(found["speculative"]) == 12
    if found["exactness_note"] is None:  # else the page says by how much rows differ
        assert found["plain"] == found["speculative"]
    if found["layers"] not in forms.DENSE:
        assert not any(entry["alone"] for entry in found["table"] if entry["form"] == found["layers"])


@pytest.mark.parametrize(
    "isa, capability",
    [
        pytest.param(isa, capability, marks=[] if (isa, capability) in QUICK else [pytest.mark.proof])
        for isa in ISAS
        for capability in CAPABILITIES
    ],
)
def test_what_runs_is_right_there(embedded_folder, embedded_home, tmp_path, isa, capability):
    """NX-30 is AVX2_VNNI: products with AVX-VNNI and no AVX-512, which torch's question does not know."""
    found = on(embedded_home, tmp_path, isa, capability)
    check(found)
    if capability:
        assert found["capability"] == capability.upper()


def test_a_mac_runs_without_onednn_and_fbgemm(embedded_folder, embedded_home, tmp_path):
    """NX-01: no operator of theirs is there, and asking for one ends nothing."""
    found = on(embedded_home, tmp_path, "", "", "mac")
    check(found)
    missing = {entry["form"] for entry in found["table"] if entry["error"] is None}
    assert missing == {form for form in forms.NAMES if form.split("-")[-1] in TAKEN}
    assert found["large_dtype"] == "float32"
