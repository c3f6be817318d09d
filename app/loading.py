"""Loads the pair in a thread, so that the page is up at once and can say how far it is.

Knows one loading function and an engine class; nothing of what is loaded or of the page.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from core.models.errors import LoadError

log = logging.getLogger(__name__)

Progress = Callable[[str, float | None], None]


@dataclass(frozen=True)
class LoadingState:
    """How far loading is: ``fraction`` is 0 to 1, or None where it cannot be told.

    ``failed`` means that ``sentence`` says what to do; ``engine`` is set once the pair is ready.
    """

    sentence: str
    fraction: float | None = None
    failed: bool = False
    engine: Any = None


class Loader:
    """Runs ``load(progress) -> engine`` in a thread; ``state`` is always the newest whole state."""

    def __init__(self, load: Callable[[Progress], Any]):
        self._load = load
        self._lock = threading.Lock()
        self._running = False
        self.state = LoadingState("Loading the models.")

    def start(self) -> None:
        """Begin, or try again after a failure. Does nothing while it is loading or loaded."""
        with self._lock:
            if self._running or self.state.engine is not None:
                return
            self._running = True
            self.state = LoadingState("Loading the models.")
        threading.Thread(target=self._run, name="loader", daemon=True).start()

    def _run(self) -> None:
        try:
            engine = self._load(self._progress)
            self.state = LoadingState("Ready.", 1.0, engine=engine)
        except LoadError as error:
            self.state = LoadingState(str(error), failed=True)
        except Exception as error:  # whatever it is, the page must not wait for ever
            log.exception("Loading failed")
            self.state = LoadingState(
                f"The models could not be loaded ({type(error).__name__}: {error}).", failed=True
            )
        finally:
            with self._lock:
                self._running = False

    def _progress(self, sentence: str, fraction: float | None = None) -> None:
        self.state = LoadingState(sentence, fraction)
