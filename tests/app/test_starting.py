"""What is loaded at the start, and that it begins before Gradio is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from app import choosing, starting
from core.models import embedded, load
from core.models.spec import PairSpec, embedded_spec
from tests.core.toys import table, toy_pair

OTHER = PairSpec("custom", "some/target", "some/draft")


@pytest.fixture
def loaded(monkeypatch):
    """What was loaded by which way."""
    calls = []

    def way(name):
        def load(*given):
            calls.append((name, given[:-1]))
            return toy_pair(table(1, 5), table(2, 5))

        return load

    monkeypatch.setattr(embedded, "load_embedded", way("embedded"))
    monkeypatch.setattr(load, "load_pair", way("any"))
    return calls


@pytest.mark.parametrize(
    "asked, suggested, expected",
    [
        (None, embedded_spec(), ("embedded", ())),
        (None, OTHER, ("any", (OTHER,))),
        (embedded_spec(), OTHER, ("embedded", ())),
        (OTHER, embedded_spec(), ("any", (OTHER,))),
        (PairSpec("embedded", "embedded", "embedded", quantize="nf4"), OTHER, ("any", ...)),
    ],
)
def test_what_is_asked_for_is_loaded_or_what_the_machine_suggests(
    loaded, monkeypatch, asked, suggested, expected
):
    monkeypatch.setattr(choosing, "by_machine", lambda: suggested)
    said = []
    engine = starting.load_engine(asked, lambda sentence, fraction: said.append(sentence))
    assert engine.pair.info.pair == "toy" and said
    ((way, given),) = loaded
    assert (way, given) == (expected[0], (asked,) if expected[1] is ... else expected[1])


def test_loading_begins_before_anything_heavy_is_imported():
    code = "import sys, app.starting, app.launch; print([m for m in sys.modules if m in ('torch', 'gradio')])"
    run = subprocess.run([sys.executable, "-c", code], cwd=Path(starting.__file__).parents[1],
                         capture_output=True, text=True)  # fmt: skip
    assert run.stdout.strip() == "[]", run.stderr
