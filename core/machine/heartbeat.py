"""Progress that never falls silent: what runs long is said again, with the time that it has taken so far.

Whoever loads says what begins; imports, libraries and large files then say nothing for as long as they
take. A thread beside says the last sentence again every few seconds, so that a slow machine can be told from
one that hangs. Knows nothing of what runs, nor how long it will take.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from core.machine.progress import Progress, silent

EVERY = 5  # seconds from one mention of the time to the next


@contextlib.contextmanager
def heard(progress: Progress) -> Iterator[Progress]:
    """For the block, a ``progress`` that is also called from a thread while nothing new is said.

    The calls never overlap, and none comes after the block. A ``progress`` that comes from here is given back
    as it is: of blocks within blocks the outermost speaks.
    """
    if progress is silent or isinstance(progress, Heartbeat):
        yield progress
        return
    heartbeat, over = Heartbeat(progress), threading.Event()

    def beat() -> None:
        while not over.wait(1):
            try:
                heartbeat.beat()
            except Exception:  # raised to end the work: the next step of the work meets it too
                return

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield heartbeat
    finally:
        over.set()
        thread.join()


class Heartbeat:
    """A ``Progress`` that passes on what changes, with the age of a sentence that has stood for long."""

    def __init__(self, progress: Progress, clock: Callable[[], float] = time.monotonic):
        self._progress, self._clock = progress, clock
        self._lock = threading.Lock()
        self._sentence, self._fraction, self._since = "", None, 0.0
        self._said: tuple[str, float | None] | None = None

    def __call__(self, sentence: str, fraction: float | None = None) -> None:
        with self._lock:
            if sentence != self._sentence:
                self._since = self._clock()
            self._sentence, self._fraction = sentence, fraction
            self._say()

    def aside(self, action: Callable[[], object]) -> None:
        """Clears the line and does ``action``, as printing what is to stay; nothing is said meanwhile."""
        with self._lock:
            self._progress("", None)
            self._said = None
            action()

    def beat(self) -> None:
        """Says the last sentence again where it has grown older by ``EVERY`` seconds."""
        with self._lock:
            if self._sentence:
                self._say()

    def _say(self) -> None:
        age = int((self._clock() - self._since) // EVERY) * EVERY
        aged = f"{self._sentence.rstrip('.')}, {_lasted(age)} so far" if age and self._sentence else None
        said = (aged or self._sentence, self._fraction)
        if said != self._said:
            self._said = said
            self._progress(*said)


def _lasted(seconds: int) -> str:
    return f"{seconds} s" if seconds < 60 else f"{seconds // 60} min {seconds % 60} s"
