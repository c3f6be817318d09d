"""Work that takes long, run beside an event of the page so that the event can say how far it is.

Knows threads and generators; nothing of what is done, and no component.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

from core.machine.heartbeat import heard
from core.machine.progress import Progress

END = object()


def watched(work: Callable[[Progress], None]) -> Iterator[tuple[str, float | None]]:
    """Runs ``work(progress)`` in a thread and gives what it says as it comes, of several things the newest.

    Raises what ``work`` raises. Where nobody listens any more, work goes on to its end.
    """
    said: queue.SimpleQueue = queue.SimpleQueue()
    failed: list[Exception] = []

    def run() -> None:
        try:
            with heard(lambda sentence, fraction: said.put((sentence, fraction))) as say:
                work(say)
        except Exception as error:
            failed.append(error)
        finally:
            said.put(END)

    threading.Thread(target=run, name="watched", daemon=True).start()
    news = said.get()
    while news is not END:
        while not said.empty():
            newer = said.get()
            if newer is END:
                said.put(END)  # behind the last word, which is still to be given
                break
            news = newer
        yield news
        news = said.get()
    if failed:
        raise failed[0]
