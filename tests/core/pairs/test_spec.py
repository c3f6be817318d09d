"""Which pair is asked for: every combination of flags and variables gives a pair or one sentence."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from core.models.asked import automatic_form
from core.models.sources import SpecError, hub_id, source_kind
from core.pairs.catalogue import CATALOGUE
from core.pairs.flags import add_pair_arguments, pair_spec
from core.pairs.spec import PairSpec, embedded_spec

ROOT = Path(__file__).resolve().parents[3]
QWEN = CATALOGUE["qwen2.5-7b"]


def asked(*flags: str, **variables: str) -> PairSpec | None:
    parser = argparse.ArgumentParser()
    add_pair_arguments(parser)
    environment = {f"REDLINE_{name.upper()}": value for name, value in variables.items()}
    return pair_spec(parser.parse_args(flags), environment)


def test_nothing_asked_for_is_none():
    assert asked() is None
    assert asked(pair="", target=" ", device="") is None


@pytest.mark.parametrize("name", ["qwen2.5-7b", "Qwen2.5-7B", " qwen2.5-7b "])
def test_a_pair_by_name(name):
    assert asked("--pair", name) == asked(pair=name)
    assert asked("--pair", name) == PairSpec("qwen2.5-7b", QWEN.target, QWEN.draft)
    assert asked("--pair", "embedded") == embedded_spec()


def test_a_pair_of_ones_own():
    assert asked("--target", "a/big", "--draft", "a/small@v1") == PairSpec("custom", "a/big", "a/small@v1")


def test_a_target_without_a_draft_gets_the_one_the_catalogue_knows_or_none():
    assert asked("--target", "a/big") == PairSpec("custom", "a/big", None)
    assert asked("--target", QWEN.target) == asked("--pair", "qwen2.5-7b")
    assert asked("--target", "embedded") == embedded_spec()
    assert asked("--target", QWEN.target + "@main").draft is None  # may be other weights
    assert asked("--target", QWEN.target, "--draft", "none") == PairSpec("custom", QWEN.target, None)


def test_a_known_pair_named_by_its_halves_has_its_name():
    assert asked("--target", QWEN.target, "--draft", QWEN.draft).name == "qwen2.5-7b"
    assert asked("--target", "embedded", "--draft", "embedded") == embedded_spec()
    assert asked("--target", QWEN.target, "--draft", "embedded").name == "custom"


def test_how_it_runs_goes_with_any_pair():
    spec = asked("--pair", "qwen3-8b", "--quantize", "nf4", "--draft-quantize", "none", "--device", "cuda")
    assert (spec.name, spec.quantize, spec.draft_quantize, spec.device) == ("qwen3-8b", "nf4", "none", "cuda")
    spec = asked("--target", "embedded", "--quantize", "nf4")
    assert (spec.name, spec.draft, spec.quantize) == ("embedded", "embedded", "nf4")
    assert asked("--dtype", "float32") == PairSpec("embedded", "embedded", "embedded", dtype="float32")


def test_flags_go_before_the_environment():
    assert asked("--device", "cpu", device="cuda", pair="qwen3-4b").device == "cpu"
    # A pair by flags sets aside the whole pair of the environment, not one half of it.
    assert asked("--target", "a/big", pair="qwen3-4b") == PairSpec("custom", "a/big", None)
    assert asked("--pair", "qwen3-4b", target="a/big", draft="a/small").target == "Qwen/Qwen3-4B"
    assert asked(target="a/big", draft="a/small", draft_quantize="int8").draft_quantize == "int8"


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--pair", "nope"], "There is no pair 'nope': choose one of embedded, .*qwen3-8b"),
        (["--pair", "qwen3-8b", "--target", "a/b"], "--pair names both models: leave --target away"),
        (["--pair", "qwen3-8b", "--draft", "a/b"], "--pair names both models: leave --draft away"),
        (["--draft", "a/b"], "--draft needs a target: name one with --target"),
        (["--target", "gpt2"], "'gpt2' is no model: name a hub id"),
        (["--target", "a/b", "--draft", "a/b/c"], "'a/b/c' is no model"),
        (["--target", "https://huggingface.co/a/b"], "is no model: name a hub id"),
        (["--target", ""], "--target is empty"),
        (["--quantize", "nf5"], "--quantize must be one of auto, none, .*, not 'nf5'"),
        (["--draft-quantize", "NF4"], "--draft-quantize must be one of"),
        (["--device", "tpu"], "--device must be one of auto, cpu, cuda, not 'tpu'"),
        (["--dtype", "int8"], "--dtype must be one of"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(flags, sentence):
    with pytest.raises(SpecError, match=sentence) as caught:
        asked(*flags)
    assert str(caught.value).count(". ") == 0 and str(caught.value).endswith(".")


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"pair": "nope"}, "There is no pair 'nope'"),
        ({"draft": "a/b"}, "REDLINE_DRAFT needs a target"),
        ({"quantize": "4bit"}, "REDLINE_QUANTIZE must be one of"),
        ({"pair": "qwen3-8b", "target": "a/b"}, "REDLINE_PAIR names both models: leave REDLINE_TARGET away"),
    ],
)
def test_a_variable_is_named_as_what_it_is(variables, sentence):
    with pytest.raises(SpecError, match=sentence):
        asked(**variables)


def test_how_a_source_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "model").mkdir(parents=True)
    assert source_kind("embedded") == "embedded"
    assert source_kind("Qwen/Qwen2.5-0.5B-Instruct@refs/pr/3") == "hub"
    assert source_kind("owner/model") == "folder"  # one that is there goes first
    assert [source_kind(name) for name in ("./x", "../x", "~/x", str(tmp_path), r"C:\x")] == ["folder"] * 5
    assert source_kind("model.Q4_K_M.GGUF") == source_kind("~/a/b.gguf") == "gguf"
    for senseless in ("", "x", "a/b/c", "a/b@", "a/b@../c", "a/b@/etc", "-a/b", "a/b c"):
        with pytest.raises(SpecError):
            source_kind(senseless)


def test_a_hub_id_and_its_revision():
    assert hub_id("a/b") == ("a/b", None)
    assert hub_id("a/b.c@v1.0") == ("a/b.c", "v1.0")
    with pytest.raises(SpecError, match="no hub id"):
        hub_id("./a")


def test_what_auto_means():
    assert automatic_form("cuda", draft=False) == "nf4" and automatic_form("cuda", draft=True) == "none"
    assert (
        automatic_form("cuda", False, 2_999_999_999) == "none"
        and automatic_form("cuda", False, 3 * 10**9) == "nf4"
    )
    assert automatic_form("cpu", draft=False) == automatic_form("cpu", draft=True) == "int8"


def test_reading_flags_imports_nothing_heavy():
    """The page's port is settled before anything heavy is imported, and this with it."""
    code = (
        "import sys, core.pairs.spec, core.pairs.catalogue, app.launch;"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub', 'gradio') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
