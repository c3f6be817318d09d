"""Threads: within what the process may use, the fastest number, and never against the user's own."""

from __future__ import annotations

import math

import pytest
import torch

from core.machine import threads


@pytest.fixture
def tried(monkeypatch):
    """Eight cores and a clock that knows how long the work takes with each number; gives those tried."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(threads, "usable_cores", lambda: 8)
    monkeypatch.setattr(threads, "busy_percent", lambda: 3.0)
    seen = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: seen[-1] if seen else 3)
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    return seen


@pytest.mark.parametrize(
    "seconds, chosen, last",
    [
        ({8: 1.0, 4: 2.0}, 8, 4),  # half of them is hopeless: no fewer are tried
        ({8: 1.0, 4: 0.6, 2: 0.7, 1: 1.2}, 4, 1),
        ({8: 9.0, 4: 3.0, 2: 1.01, 1: 1.0}, 1, 1),
        ({8: 1.0, 4: 1.02, 2: 1.1, 1: 1.2}, 4, 1),  # hardly slower, and leaves cores to others
    ],
)
def test_the_fastest_number_is_used(tried, monkeypatch, seconds, chosen, last):
    monkeypatch.setattr(threads, "_seconds", lambda work: seconds[tried[-1]])
    assert threads.choose(lambda: None) == chosen == tried[-1]
    assert min(tried) == min(last, chosen)


@pytest.mark.parametrize("seconds, runs", [(threads.LONG / 2, 1 + threads.REPEATS), (threads.LONG, 1)])
def test_work_that_takes_long_is_timed_once(tried, monkeypatch, seconds, runs):
    timed, said = [], []
    monkeypatch.setattr(threads, "_seconds", lambda work: timed.append(tried[-1]) or seconds)
    assert threads.choose(lambda: None, lambda *what: said.append(what)) == 1
    assert timed == [8] * runs + [4] * runs + [2] * runs + [1] * runs
    assert [fraction for _, fraction in said] == [0, 0.25, 0.5, 0.75]


def test_work_that_fails_changes_nothing(tried):
    with pytest.raises(ZeroDivisionError):
        threads.choose(lambda: 1 / 0)
    assert tried == [8, 3]


def test_a_busy_machine_decides_nothing(tried, monkeypatch):
    monkeypatch.setattr(threads, "busy_percent", lambda: 60.0)
    assert threads.choose(lambda: 1 / 0) == 3 and not tried


def test_what_the_user_chose_stays(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads.choose(lambda: 1 / 0) == torch.get_num_threads()


@pytest.mark.parametrize(
    "files, cores",
    [
        ({}, math.inf),
        ({"cpu.max": "max 100000"}, math.inf),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "nonsense"}, math.inf),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
    ],
)
def test_a_containers_limit_counts(files, cores, tmp_path, monkeypatch):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(threads, "CGROUP", tmp_path)
    assert threads._cgroup_cores() == cores
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: range(8), raising=False)
    assert threads.usable_cores() == min(8, math.ceil(min(cores, 8)))
