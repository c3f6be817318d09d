"""Replies on a ZeroGPU Space, where a GPU is lent for one function call at a time, in a process of its own.

ZeroGPU is there when its package ``spaces`` is, and ``SPACES_ZERO_GPU`` says so; elsewhere this module
does nothing and ``engine`` gives back what it was given. It knows the interface of ``core.engine.loop``, no
page and no model. What ZeroGPU asks of the rest of the app:

- The pair is loaded in the main thread and before the page is launched: ``spaces`` imitates CUDA there, and
  there alone, and at launch it packs what is "on cuda" to send it to each GPU process. A pair that is loaded
  later never reaches a GPU. This module is imported before anything touches torch.
- The GPU function gets and yields plain data, because it runs in a forked process. No event, lock or
  cache of this process exists there. A reply is stopped by closing the generator; the process hears it
  after the round in flight.
- The time asked for is part of a visitor's daily quota, so it is as short as the reply may need.
- A GPU process that runs over that time may be killed. What had arrived by then is the reply.

Run: ``SPACES_ZERO_GPU=true python app.py`` on a Space (docs/SPACE.md); tests stand in for ``spaces``.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from core.engine.generation import Underway
from core.models.errors import is_out_of_memory
from core.records import Reply, Round, Settings

log = logging.getLogger(__name__)

# The declared time in seconds (see ``gpu_seconds``). A worker starts and gets the weights in a few seconds;
# the paces are those of a slow pair on such a GPU, so that most replies end well before.
STARTING_SECONDS = 5
PROMPT_TOKENS_PER_SECOND = 1000
NEW_TOKENS_PER_SECOND = 25
MOST_SECONDS = 120  # what a visitor without an account has in a day; longer declarations may be refused

ABORTED = "The GPU's time for this reply ran out: what was written is kept; allow fewer new tokens."
NO_MEMORY = "The reply ended early, because the GPU had too little memory: begin a new conversation."

# What crosses from the GPU process with each item: prefill seconds, reused tokens, a round, the reply.
Item = tuple[float | None, int | None, Round | None, Reply | None]


def _spaces() -> ModuleType | None:
    """The package ``spaces`` where the environment says that this is a ZeroGPU Space."""
    if os.environ.get("SPACES_ZERO_GPU", "").strip().lower() not in ("1", "t", "true"):
        return None
    try:
        spaces = importlib.import_module("spaces")
    except ImportError:
        log.warning("SPACES_ZERO_GPU is set but the package spaces is missing: replies run in this process.")
        return None
    # Else transformers reads weights in threads of its own, where CUDA is not imitated, and fails there.
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    return spaces


def gpu_seconds(
    prompt_ids: Sequence[int], settings: Settings, domain: str, drafter: str | None = None
) -> int:
    """The time to declare for a reply: 5 + prompt / 1000 + new tokens / 25 seconds, at most 120.

    The arguments are those of ``gpu_reply``, as ``spaces.GPU(duration=...)`` wants it.
    """
    needed = (
        STARTING_SECONDS
        + len(prompt_ids) / PROMPT_TOKENS_PER_SECOND
        + settings.max_new_tokens / NEW_TOKENS_PER_SECOND
    )
    return min(MOST_SECONDS, math.ceil(needed))


_inner: Any = None  # the engine; the GPU process gets it as it was when the process was forked


def gpu_reply(
    prompt_ids: list[int], settings: Settings, domain: str, drafter: str | None = None
) -> Iterator[Item]:
    """A reply, written in the GPU process. The last item holds the ``Reply``, maybe with no round."""
    if multiprocessing.parent_process() is not None:
        import torch

        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork, and waiting for them never ends
    generation = _inner.generate(prompt_ids, settings, domain=domain, drafter=drafter)
    with contextlib.closing(generation):
        for round_ in generation:
            yield generation.prefill_seconds, generation.reused_tokens, round_, generation.reply
            if generation.reply is not None:
                return
    yield generation.prefill_seconds, generation.reused_tokens, None, generation.reply


def _on_gpu(spaces: ModuleType | None) -> Callable[..., Iterator[Item]] | None:
    """``gpu_reply`` behind ``spaces.GPU``. ZeroGPU looks for such a function when the page is launched."""
    return None if spaces is None else spaces.GPU(duration=gpu_seconds)(gpu_reply)


_reply_on_gpu = _on_gpu(_spaces())


def active() -> bool:
    """Whether this is a ZeroGPU Space: the pair is then loaded before the page is launched, and stays."""
    return _reply_on_gpu is not None


def engine(inner: Any) -> Any:
    """``inner``, or an engine with its interface that writes replies on ZeroGPU's GPUs.

    A pair that runs on the CPU needs no GPU and stays as it is.
    """
    global _inner
    if not active() or not inner.pair.info.device.startswith("cuda"):
        return inner
    _inner = inner
    return ZeroGpuEngine(inner, _reply_on_gpu)


class ZeroGpuEngine:
    """``core.engine.loop.Engine``'s interface over ``reply_on_gpu`` (``gpu_reply``, decorated).

    Replies may run at once: each has a GPU process of its own, and ZeroGPU makes them wait where it must.
    So it is never ``busy``. Nothing that a reply could use is kept here: ``cache_bytes`` is 0.
    """

    busy = False
    cache_bytes = cache_limit = 0

    def __init__(self, inner: Any, reply_on_gpu: Callable[..., Iterator[Item]]):
        self.pair = inner.pair
        self._inner = inner
        self._reply_on_gpu = reply_on_gpu

    def generate(
        self,
        prompt_ids: Sequence[int],
        settings: Settings,
        *,
        cancel: threading.Event | None = None,
        domain: str = "auto",
        drafter: str | None = None,
    ) -> ZeroGpuGeneration:
        """A reply as an iterator of rounds; no GPU is asked for before the first ``next``.

        ``cancel`` is looked at between rounds. Raises PromptError as ``Engine.generate`` does.
        """
        self._inner.generate(prompt_ids, settings, domain=domain, drafter=drafter)  # refuses; runs nothing
        items = self._reply_on_gpu(list(prompt_ids), settings, domain, drafter)
        pair, cancel = self.pair.drafting(drafter), cancel or threading.Event()
        return ZeroGpuGeneration(pair, items, len(prompt_ids), settings, cancel)


class ZeroGpuGeneration(Underway):
    """One reply under way on ZeroGPU. ``prefill_seconds`` and ``reused_tokens`` come with the first round.

    Where a GPU process ends early no stop string was completed, or the reply would have come with it: all of
    the text is shown.
    """

    def __init__(
        self,
        pair: Any,
        items: Iterator[Item],
        prompt_tokens: int,
        settings: Settings,
        cancel: threading.Event,
    ):
        super().__init__(pair, settings, prompt_tokens)
        self._items, self._cancel = items, cancel

    def _run(self) -> Iterator[Round]:
        finish, error = "cancelled", None
        try:
            while not self._cancel.is_set():
                self.prefill_seconds, self.reused_tokens, round_, self.reply = next(self._items)
                if round_ is not None:
                    self._done.append(round_)
                    yield round_
                if self.reply is not None:
                    return
        except Exception as exception:
            finish, error = "error", _sentence(exception)
            log.warning("A reply was aborted on the GPU after %d rounds: %s", len(self._done), error)
        finally:
            if self.reply is None:
                self._finish(finish, error)
            self._items.close()


def _sentence(exception: Exception) -> str:
    """What ``spaces`` raised, as one sentence.

    It raises ``gr.Error`` with a ``title`` and a ``message``: "GPU task aborted" when the GPU process died
    (``spaces/zero/wrappers.py``), a sentence about quota or queue when there was none
    (``spaces/zero/client.py``), or the name of an exception that was raised in the process.
    """
    message = str(getattr(exception, "message", exception)).strip() or type(exception).__name__
    if message == "GPU task aborted":
        return ABORTED
    if is_out_of_memory(exception):
        return NO_MEMORY
    return f"The reply ended early because of the GPU: {message.rstrip('.')}."
