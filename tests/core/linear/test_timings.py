"""Times of forms, by clocks made for it."""

from __future__ import annotations

from core.models.linear import timings
from core.models.linear.findings import Evidence
from tests.core.linear.some_findings import SMALL


def test_on_a_slow_machine_there_is_one_turn_and_no_prompt(monkeypatch):
    """By a clock that each look at takes on by a second."""
    seconds = iter(range(10**6))
    monkeypatch.setattr(timings.time, "perf_counter", lambda: float(next(seconds)))
    said = []
    (timed,) = timings.timed([Evidence("float32", 0.0)], SMALL, lambda *what: said.append(what))
    assert timed.layers[3] == 32 * timed.layers[2] and timed.head[3] == timed.head[0]
    assert len(said) == 1 and said[0][0] == f"{timings.LOOKING}: timing float32"
