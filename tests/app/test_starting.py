"""What is loaded at the start, and that it begins before Gradio is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from app import choosing, starting
from core.models.spec import PairSpec, embedded_spec
from tests.core.toys import table, toy_pair

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


def test_loading_begins_before_anything_heavy_is_imported():
    code = "import sys, app.starting, app.launch; print([m for m in sys.modules if m in ('torch', 'gradio')])"
    run = subprocess.run([sys.executable, "-c", code], cwd=Path(starting.__file__).parents[1],
                         capture_output=True, text=True)  # fmt: skip
    assert run.stdout.strip() == "[]", run.stderr


def test_the_embedded_pair_is_loaded_without_what_only_others_need():
    """transformers' model code takes seconds to import."""
    code = (
        "import sys; from core.models import load; from core.models.spec import embedded_spec;"
        "load.load_embedded = lambda progress: 'the pair';"
        "print(load.load_pair(embedded_spec()), [m for m in sys.modules if m in ('torch', 'transformers')])"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=Path(starting.__file__).parents[1],
                         capture_output=True, text=True)  # fmt: skip
    assert run.stdout.strip() == "the pair []", run.stderr
