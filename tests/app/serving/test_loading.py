from __future__ import annotations

import gc
import threading
import weakref

import pytest

from app.serving.loading import Loader, LoadingRefused
from core.models.errors import LoadError


class Engine:
    """Stands for an engine: something that can be told from others and watched."""


def finished(loader: Loader) -> Loader:
    """The loader when its thread has ended."""
    for thread in threading.enumerate():
        if thread.name == "loader":
            thread.join(10)
    return loader


def test_progress_then_engine():
    seen, engine = [], object()

    def load(spec, progress):
        progress("Unpacking.", 0.5)
        seen.append((spec, loader.state))
        return engine

    loader = Loader(load)
    assert loader.state.engine is None
    loader.start("a pair")
    assert finished(loader).state.engine is engine and not loader.state.loading
    ((spec, state),) = seen
    assert (spec, state.sentence, state.fraction, state.loading) == ("a pair", "Unpacking.", 0.5, True)
    assert loader.state.number > state.number


def test_a_failure_is_its_sentence_also_in_the_log_and_can_be_tried_again(caplog):
    attempts = []

    def load(spec, progress):
        attempts.append(spec)
        if len(attempts) == 1:
            raise LoadError("There is no network: connect once, then start again.")
        return "engine"

    loader = Loader(load)
    loader.start("a pair", wait=True)
    state = loader.state
    assert state.failed and state.sentence == "There is no network: connect once, then start again."
    assert state.sentence in caplog.text
    loader.start(state.spec, wait=True)
    assert loader.state.engine == "engine" and not loader.state.failed
    assert attempts == ["a pair", "a pair"]


def test_a_fault_of_ours_is_told_too():
    def load(spec, progress):
        raise KeyError("weights")

    loader = Loader(load)
    loader.start(wait=True)
    assert loader.state.failed and "KeyError" in loader.state.sentence


def test_nx_09_memory_that_is_out_before_there_is_a_pair_is_told_as_that():
    """On Windows a library of torch's own may find no room while torch is imported."""

    def load(spec, progress):
        raise OSError("[WinError 1455] The paging file is too small for this operation to complete.")

    loader = Loader(load)
    loader.start(wait=True)
    assert loader.state.failed and "too little memory to load the models" in loader.state.sentence


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_loaded_answers_until_the_next_is_ready_and_after_a_failure(fails):
    during = []

    def load(spec, progress):
        progress("Reading the weights.", 0.5)
        during.append(loader.state.engine)
        if fails and spec == "big":
            raise LoadError("The memory does not suffice.")
        return f"engine of {spec}"

    loader = Loader(load)
    loader.start("small", wait=True)
    loader.start("big", wait=True)
    assert during == [None, "engine of small"]
    assert loader.state.engine == ("engine of small" if fails else "engine of big")
    assert loader.state.failed is fails and loader.state.spec == "big"


def test_a_second_choice_while_loading_is_refused_in_words():
    gate, attempts = threading.Event(), []

    def load(spec, progress):
        attempts.append(spec)
        gate.wait(10)
        return "engine"

    loader = Loader(load)
    loader.start("one")
    for attempt in (lambda: loader.start("two"), loader.unload):
        with pytest.raises(LoadingRefused, match="Another pair is being loaded"):
            attempt()
    gate.set()
    finished(loader)
    assert attempts == ["one"] and loader.state.engine == "engine"


def test_a_change_of_what_is_loaded_is_a_new_state_but_never_the_end_of_a_load():
    loader = Loader(lambda spec, progress: loader.renew() or "engine")
    loader.start(wait=True)
    before = loader.state
    loader.renew()
    assert loader.state == before and loader.state.number > before.number
    assert loader.state.engine == "engine" and not loader.state.loading


def test_an_engine_that_was_given_up_is_gone():
    released = []
    loader = Loader(lambda spec, progress: Engine(), lambda: released.append(gc.collect()))
    loader.start(wait=True)
    first = weakref.ref(loader.state.engine)
    loader.start(wait=True)
    assert first() is None and loader.state.engine is not None
    second = weakref.ref(loader.state.engine)
    count = len(released)
    loader.unload()
    assert second() is None and len(released) > count
    assert loader.state.engine is None and not loader.state.failed and "Models" in loader.state.sentence
