"""How busy the machine is, so that no time is taken for what it is not. Knows nothing of what is timed."""

from __future__ import annotations

import os
import time

BUSY = 25  # percent of the machine's time in use beside what is timed that misleads


def busy_percent() -> float:
    """The share of the machine's time that is in use just now, in percent."""
    import psutil

    return psutil.cpu_percent(interval=0.1)


class Others:
    """How much of the machine's time processes other than this one take, from now on."""

    def __init__(self) -> None:
        self._before = self._now()

    def percent(self) -> float:
        wall, busy, own = (now - before for now, before in zip(self._now(), self._before, strict=True))
        cores = os.cpu_count() or 1
        return max(0.0, 100 * (busy - own) / (wall * cores)) if wall > 0 else 0.0

    def _now(self) -> tuple[float, float, float]:
        import psutil  # which the run on a card does without

        times = psutil.cpu_times()._asdict()
        busy = sum(seconds for name, seconds in times.items() if name not in _IDLE)
        return time.monotonic(), busy, time.process_time()


_IDLE = ("idle", "iowait", "guest", "guest_nice")  # the last two are counted as user's, too
