"""Loads pairs in a thread, one after another, so that the page is up at once and can say how far it is.

What was loaded stays, and answers, until the next pair is ready: a load that fails changes nothing but the
sentence. Knows one loading function and an engine class; nothing of what is loaded or of the page.
"""

from __future__ import annotations

import gc
import itertools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from core.models.errors import LoadError, is_out_of_memory, too_little_memory

if TYPE_CHECKING:
    from core.pairs.spec import PairSpec

log = logging.getLogger(__name__)

Progress = Callable[[str, float | None], None]

STARTING = "Loading the models."
BUSY = "Another pair is being loaded: wait for it to end, then choose again."
UNLOADED = "No models are loaded: choose a pair under Models."

_numbers = itertools.count(1)


class LoadingRefused(Exception):
    """Nothing can be loaded or unloaded now; the message is one sentence for the page."""


@dataclass(frozen=True)
class LoadingState:
    """How far loading is: ``fraction`` is 0 to 1, or None where it cannot be told.

    ``engine`` is what answers now, None where nothing does. It stays the one from before while another pair
    is ``loading``, and after one has ``failed``; then ``sentence`` says what to do. ``spec`` is what was
    asked for last, None for whatever the machine decides. ``number`` grows from one state to the next.
    """

    sentence: str
    fraction: float | None = None
    failed: bool = False
    engine: Any = None
    spec: PairSpec | None = None
    loading: bool = False
    number: int = field(default_factory=_numbers.__next__, compare=False)


class Loader:
    """Runs ``load(spec, progress) -> engine``; ``state`` is always the newest whole state.

    ``release()`` gives memory back that an engine leaves behind; it is called before each load and after an
    engine was given up.
    """

    def __init__(
        self,
        load: Callable[[PairSpec | None, Progress], Any],
        release: Callable[[], object] = gc.collect,
    ):
        self._load, self._release = load, release
        self._lock = threading.Lock()
        self.state = LoadingState(STARTING)

    def start(self, spec: PairSpec | None = None, *, wait: bool = False) -> None:
        """Begin to load ``spec``, which takes the place of what is loaded once it is ready.

        Returns at once, or at the end if told to ``wait``. Raises LoadingRefused while a pair is loading.
        """
        with self._lock:
            if self.state.loading:
                raise LoadingRefused(BUSY)
            self.state = LoadingState(STARTING, engine=self.state.engine, spec=spec, loading=True)
        if wait:
            self._run(spec)
        else:
            threading.Thread(target=self._run, args=(spec,), name="loader", daemon=True).start()

    def unload(self) -> None:
        """Give the engine up. A reply that it is writing goes on to its end, and then the memory is free.

        Raises LoadingRefused while a pair is loading.
        """
        with self._lock:
            if self.state.loading:
                raise LoadingRefused(BUSY)
            self.state = LoadingState(UNLOADED)
        self._release()

    def renew(self) -> None:
        """Have every page look anew at what is loaded: something of it has changed."""
        with self._lock:
            if not self.state.loading:  # else the end of the load is a new state anyway
                self.state = replace(self.state, number=next(_numbers))

    def dismiss(self) -> None:
        """Say no more of a load that failed, where the engine from before answers."""
        with self._lock:
            if self.state.failed and self.state.engine is not None:
                self.state = LoadingState("Ready.", 1.0, engine=self.state.engine)

    def _run(self, spec: PairSpec | None) -> None:
        before = self.state.engine
        try:
            self._release()
            engine = self._load(spec, self._progress)
            self.state = LoadingState("Ready.", 1.0, engine=engine, spec=spec)
        except LoadError as error:
            log.warning("Loading failed: %s", error)  # a page that is not its owner's alone does not say why
            self.state = LoadingState(str(error), failed=True, engine=before, spec=spec)
        except Exception as error:  # whatever it is, the page must not wait for ever
            log.exception("Loading failed")
            sentence = f"The models could not be loaded ({type(error).__name__}: {error})."
            if is_out_of_memory(error):  # on Windows there may be no room for a library of torch's own
                sentence = str(too_little_memory("load the models"))
            self.state = LoadingState(sentence, failed=True, engine=before, spec=spec)
        before = None
        self._release()

    def _progress(self, sentence: str, fraction: float | None = None) -> None:
        now = self.state
        self.state = LoadingState(sentence, fraction, engine=now.engine, spec=now.spec, loading=True)
