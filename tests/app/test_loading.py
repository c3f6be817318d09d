from __future__ import annotations

import threading

from app.loading import Loader
from core.models.errors import LoadError


def finished(loader: Loader) -> Loader:
    """The loader when its thread has ended."""
    for thread in threading.enumerate():
        if thread.name == "loader":
            thread.join(10)
    return loader


def test_progress_then_engine():
    seen, engine = [], object()

    def load(progress):
        progress("Unpacking.", 0.5)
        seen.append(loader.state)
        return engine

    loader = Loader(load)
    assert loader.state.engine is None
    loader.start()
    assert finished(loader).state.engine is engine
    assert (seen[0].sentence, seen[0].fraction) == ("Unpacking.", 0.5)


def test_a_failure_is_its_sentence_and_can_be_tried_again():
    attempts = []

    def load(progress):
        attempts.append(1)
        if len(attempts) == 1:
            raise LoadError("There is no network: connect once, then start again.")
        return "engine"

    loader = Loader(load)
    loader.start()
    state = finished(loader).state
    assert state.failed and state.sentence == "There is no network: connect once, then start again."
    loader.start()
    assert finished(loader).state.engine == "engine"
    loader.start()
    finished(loader)
    assert len(attempts) == 2


def test_a_fault_of_ours_is_told_too():
    def load(progress):
        raise KeyError("weights")

    loader = Loader(load)
    loader.start()
    state = finished(loader).state
    assert state.failed and "KeyError" in state.sentence


def test_starting_twice_loads_once():
    gate, attempts = threading.Event(), []

    def load(progress):
        attempts.append(1)
        gate.wait(10)
        return "engine"

    loader = Loader(load)
    loader.start()
    loader.start()
    gate.set()
    finished(loader)
    assert attempts == [1]
