"""What runs long is said again, with the time it has taken, and nothing is said after its end."""

from __future__ import annotations

import threading

import pytest

from core.machine.heartbeat import Heartbeat, heard
from core.machine.progress import silent


class Watched:
    """A heartbeat over a clock that is set by hand, and what came out of it."""

    def __init__(self):
        self.now, self.said = 100.0, []
        self.heartbeat = Heartbeat(lambda *said: self.said.append(said), lambda: self.now)

    def after(self, seconds: float) -> list:
        """What a beat so much later says."""
        self.now += seconds
        self.said.clear()
        self.heartbeat.beat()
        return self.said


@pytest.fixture
def watched():
    return Watched()


def test_what_is_said_comes_through_at_once_and_once(watched):
    for fraction in (None, None, 0.5, 0.5):
        watched.heartbeat("Reading", fraction)
    assert watched.said == [("Reading", None), ("Reading", 0.5)]


def test_a_sentence_that_stands_is_said_again_with_its_age(watched):
    watched.heartbeat("Starting PyTorch.", None)
    assert watched.after(4.9) == []
    assert watched.after(0.2) == [("Starting PyTorch, 5 s so far", None)]
    assert watched.after(4.0) == []
    assert watched.after(1.0) == [("Starting PyTorch, 10 s so far", None)]
    assert watched.after(58.0) == [("Starting PyTorch, 1 min 5 s so far", None)]


def test_the_age_is_the_sentences_and_not_the_fractions(watched):
    watched.heartbeat("Fetching", 0.1)
    watched.now += 7
    watched.heartbeat("Fetching", 0.2)
    assert watched.said[-1] == ("Fetching, 5 s so far", 0.2)
    watched.heartbeat("Reading", None)
    assert watched.said[-1] == ("Reading", None)
    assert watched.after(5.5) == [("Reading, 5 s so far", None)]


def test_nothing_was_said_and_a_cleared_line_stay_silent(watched):
    assert watched.after(60) == []
    watched.heartbeat("Reading", None)
    watched.heartbeat("", None)
    assert watched.said[-1] == ("", None) and watched.after(60) == []


def test_the_outermost_block_speaks():
    said = []
    with heard(lambda *what: said.append(what)) as outer, heard(outer) as inner:
        assert inner is outer
        inner("Reading", 0.5)
    assert said == [("Reading", 0.5)]
    with heard(silent) as nobody:
        assert nobody is silent


@pytest.mark.parametrize("fails", [False, True])
def test_the_thread_ends_with_the_block(fails):
    def beating() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name == "heartbeat"]

    with pytest.raises(ZeroDivisionError) if fails else heard(silent):
        with heard(lambda *said: None):
            assert beating() == ["heartbeat"]
            assert not fails or 1 / 0
    assert beating() == []


def test_a_listener_that_fails_ends_the_beats_and_not_the_work(monkeypatch):
    beaten = threading.Event()

    def beat(self):
        beaten.set()
        raise RuntimeError("nobody listens")

    monkeypatch.setattr(Heartbeat, "beat", beat)
    with heard(lambda *said: None):
        assert beaten.wait(60)


def test_what_is_to_stay_is_printed_while_nothing_else_is_said(watched):
    """A beat in the middle of it would tear the line; after it the sentence is said again."""
    watched.heartbeat("Training", 0.5)
    watched.said.clear()
    beats = threading.Thread(target=watched.after, args=(60,))

    def printing() -> None:
        beats.start()
        beats.join(0.2)
        assert beats.is_alive() and watched.said in ([("", None)], [])
        watched.said.append("printed")

    watched.heartbeat.aside(printing)
    beats.join()
    assert watched.said[-1] == ("Training, 1 min 0 s so far", 0.5)
