"""Work beside an event: what it says comes in its order, and its failure is the event's."""

from __future__ import annotations

import threading

import pytest

from app.widgets.watching import watched


def test_what_is_said_comes_as_it_is_said():
    heard = threading.Event()

    def work(say):
        say("one", None)
        assert heard.wait(10)
        say("two", 0.5)
        say("three", 1.0)

    said = []
    for news in watched(work):
        said.append(news)
        heard.set()
    assert said[0] == ("one", None) and said[-1] == ("three", 1.0)


def test_its_failure_is_raised_after_what_it_said():
    def work(say):
        say("one", None)
        raise RuntimeError("no")

    news = watched(work)
    assert next(news) == ("one", None)
    with pytest.raises(RuntimeError, match="no"):
        next(news)


def test_silent_work_ends():
    assert list(watched(lambda say: None)) == []
