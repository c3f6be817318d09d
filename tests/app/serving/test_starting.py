"""What is loaded at the start, and that it begins before Gradio is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from app.serving import choosing, starting, zero_gpu
from core.engine import calibration
from core.figures.costs import Costs
from core.pairs.spec import PairSpec, embedded_spec
from core.records import Settings
from tests.core.toys import table, toy_pair

COSTS = Costs(draft=1.0, verify=(1.0, 1.0))
OTHER = PairSpec("custom", "some/target", "some/draft")


@pytest.mark.parametrize(
    "asked, suggested, expected",
    [
        (None, embedded_spec(), embedded_spec()),
        (None, OTHER, OTHER),
        (embedded_spec(), OTHER, embedded_spec()),
        (OTHER, embedded_spec(), OTHER),
    ],
)
def test_what_is_asked_for_is_loaded_or_what_the_machine_suggests(monkeypatch, asked, suggested, expected):
    loaded, said = [], []

    def load(spec, progress):
        loaded.append(spec)
        return toy_pair(table(1, 5), table(2, 5))

    monkeypatch.setattr(starting, "load_pair", load)
    monkeypatch.setattr(choosing, "by_machine", lambda: suggested)
    engine = starting.load_engine(asked, lambda sentence, fraction: said.append(sentence))
    assert engine.pair.info.pair == "toy" and said
    assert loaded == [expected]


@pytest.fixture
def embedded_toy(monkeypatch):
    monkeypatch.setattr(choosing, "by_machine", embedded_spec)
    monkeypatch.setattr(starting, "load_pair", lambda spec, progress: toy_pair(table(1, 5), table(2, 5)))


def test_passes_are_measured_after_loading(embedded_toy, monkeypatch):
    monkeypatch.setattr(calibration, "costs", lambda pair, say: COSTS)
    said = []
    engine = starting.load_engine(None, lambda sentence, fraction: said.append(sentence))
    assert engine.pair.costs == COSTS and said[-1] == "Measuring what passes cost"


def test_a_pair_that_cannot_be_measured_runs_all_the_same(embedded_toy, monkeypatch):
    def fail(pair, say):
        raise RuntimeError("no clock")

    monkeypatch.setattr(calibration, "costs", fail)
    engine = starting.load_engine(None, lambda sentence, fraction: None)
    assert engine.pair.costs is None and list(engine.generate([0, 1], Settings(max_new_tokens=2)))


def test_on_zerogpu_nothing_is_measured(embedded_toy, monkeypatch):
    monkeypatch.setattr(calibration, "costs", None)
    monkeypatch.setattr(zero_gpu, "active", lambda: True)
    said = []
    engine = starting.load_engine(None, lambda sentence, fraction: said.append(sentence))
    assert engine.pair.costs is None and "Measuring what passes cost" not in said


def test_loading_begins_before_anything_heavy_is_imported():
    code = "import sys, app.serving.starting, app.launch;"
    code += " print([m for m in sys.modules if m in ('torch', 'gradio')])"
    run = subprocess.run([sys.executable, "-c", code], cwd=Path(starting.__file__).parents[2],
                         capture_output=True, text=True)  # fmt: skip
    assert run.stdout.strip() == "[]", run.stderr


def test_the_page_does_not_wait_for_torch():
    """Which is imported beside it, and may fail, which the page then says in a sentence."""
    code = "import sys, app.page; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=Path(starting.__file__).parents[2],
                         capture_output=True, text=True)  # fmt: skip
    assert run.stdout.strip() == "False", run.stderr


def test_the_embedded_pair_is_loaded_without_what_only_others_need():
    """transformers' model code takes seconds to import."""
    code = (
        "import sys; from core.pairs import load; from core.pairs.spec import embedded_spec;"
        "load.load_embedded = lambda progress: 'the pair';"
        "print(load.load_pair(embedded_spec()), [m for m in sys.modules if m in ('torch', 'transformers')])"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=Path(starting.__file__).parents[2],
                         capture_output=True, text=True)  # fmt: skip
    assert run.stdout.strip() == "the pair []", run.stderr
