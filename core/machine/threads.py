"""How many threads torch computes with: chosen by measurement, within what this process may use.

More threads are not always faster: they wait for each other after every product, two on one core share it,
and a container may be allowed fewer cores than it sees. ``core.engine.calibration`` chooses with a pair's
costs and keeps the choice beside them. Whoever sets ``OMP_NUM_THREADS`` has chosen: nothing is tried. Knows
no model.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from core.machine.busy import BUSY, busy_percent
from core.machine.progress import Progress, silent

CGROUP = Path("/sys/fs/cgroup")
REPEATS = 5  # timings of the work with each number of threads; the least counts
NEARLY = 1.03  # fewer threads that take this much longer leave a core to others for it
LONG = 1.0  # seconds of work that is timed once: what else its first run holds is little beside them
HOPELESS = 1.3  # with fewer threads than those that take this much longer nothing is tried


def usable_cores() -> int:
    """Cores this process may run on, counting a container's limit on their time; at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _cgroup_cores())))


def _cgroup_cores() -> float:
    """The cores' worth of time that this process's control group allows; infinite without a limit."""
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:  # the older version
            quota, period = (
                (CGROUP / "cpu" / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")
            )
        except OSError:
            return math.inf
    try:
        return int(quota) / int(period) if int(quota) > 0 and int(period) > 0 else math.inf
    except ValueError:  # "max"
        return math.inf


def chosen_by_user() -> bool:
    return bool(os.environ.get("OMP_NUM_THREADS"))


def use(threads: int) -> None:
    """Computes with so many threads from now on, where that is another number than now."""
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def choose(work: Callable[[], object], say: Progress = silent) -> int:
    """The number of threads with which ``work`` takes least time, which torch then uses.

    Tried are all cores there are, half of them, and so on. What torch uses now stays where the user chose it,
    where the machine is busy, which would speak for too few, and where ``work`` fails.
    """
    before = torch.get_num_threads()
    if chosen_by_user() or busy_percent() > BUSY:
        return before
    chosen = before
    try:
        chosen = _fastest(work, say)
    finally:
        use(chosen)
    return chosen


def _fastest(work: Callable[[], object], say: Progress) -> int:
    taken: dict[int, float] = {}
    threads = cores = usable_cores()
    while threads:
        use(threads)
        say("Choosing the number of threads", len(taken) / cores.bit_length())
        taken[threads] = _seconds(work)  # threads begin and end here
        if taken[threads] < LONG:
            taken[threads] = min(_seconds(work) for _ in range(REPEATS))
        if taken[threads] > HOPELESS * min(taken.values()):
            break
        threads //= 2
    best = min(taken.values())
    return min(threads for threads, seconds in taken.items() if seconds <= NEARLY * best)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
