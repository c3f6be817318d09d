"""How busy the machine is, by counters made for it."""

from __future__ import annotations

from types import SimpleNamespace

from core.machine import busy


def test_the_time_of_others_is_what_is_not_this_processs(monkeypatch):
    times = iter([dict(user=10, system=5, idle=100, guest=9), dict(user=15, system=6, idle=104, guest=9)])
    made = lambda: SimpleNamespace(_asdict=next(times).copy)  # noqa: E731
    monkeypatch.setattr("psutil.cpu_times", made)
    monkeypatch.setattr(busy.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(busy.time, "monotonic", iter([0.0, 5.0]).__next__)
    monkeypatch.setattr(busy.time, "process_time", iter([1.0, 3.0]).__next__)
    assert busy.Others().percent() == 40  # of ten core-seconds six were busy, two of them ours
