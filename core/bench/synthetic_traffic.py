"""What a round asks of a card: launches, waits of the host and copies to it, counted while it is played.

Serves ``core.bench.synthetic``; its ``Watch`` also counts on a CPU, operations there. Knows no time.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from core.engine.loop import Engine
from core.pairs.pair import Pair
from core.records import Settings


class Watch(TorchDispatchMode):
    """Counts operations, and by name what would make the host wait for a card; on any device."""

    ASKS = ("item", "_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "_unique2", "equal")
    METHODS = ("tolist", "cpu", "numpy")  # do not pass where the mode looks

    def __init__(self):
        super().__init__()
        self.operations = 0
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        name = func.overloadpacket.__name__
        masked = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if masked or name in self.ASKS:
            self.waits[name] += 1
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watch]:
        with contextlib.ExitStack() as stack:
            for name in self.METHODS:
                counted = self._counted(name, getattr(torch.Tensor, name))
                stack.enter_context(mock.patch.object(torch.Tensor, name, counted))
            stack.enter_context(self)
            yield self

    def _counted(self, name: str, method: Callable) -> Callable:
        def counted(tensor, *args, **kwargs):
            self.waits[name] += 1
            return method(tensor, *args, **kwargs)

        return counted


@dataclass(frozen=True)
class Traffic:
    """A round's launches (operations where there is no card), waits of the host, copies to it, and drafts."""

    launches: float
    waits: float
    copies: float | None
    drafted: float


def waits(pair: Pair, ids: Sequence[int], k: int, rounds: int = 4) -> Traffic:
    """The same as ``traffic`` without launches and copies, which take a profiler on a card."""
    return traffic(pair, ids, k, rounds, profiled=False)


def traffic(pair: Pair, ids: Sequence[int], k: int, rounds: int = 6, profiled: bool = True) -> Traffic:
    """Means over a few rounds with K = ``k`` that follow a first one."""
    drafted: list[int] = []
    settings = Settings(temperature=1.0, num_draft_tokens=k, max_new_tokens=rounds * (k + 1) + k + 2)

    def play(watch: Callable[[], contextlib.AbstractContextManager]):
        generation = Engine(pair, cache_bytes=0, batched=True).generate(ids, settings)
        next(generation)
        drafted.clear()
        with watch() as watched:
            for round_ in itertools.islice(generation, rounds):
                drafted.append(round_.drafted)
            if pair.info.device == "cuda":
                torch.cuda.synchronize()
        generation.close()
        return watched

    if pair.info.device != "cuda":
        watch = play(Watch().watching)
        found = watch.operations / rounds, watch.waits.total() / rounds, None
        return Traffic(*found, sum(drafted) / rounds)
    launches, copies = 0.0, None
    if profiled:
        events = play(_profiler).key_averages()
        launches = sum(event.count for event in events if "LaunchKernel" in event.key) / rounds
        copies = sum(event.count for event in events if event.key.startswith("Memcpy DtoH")) / rounds
    return Traffic(launches, len(play(_sync_warnings)) / rounds, copies, sum(drafted) / rounds)


def _profiler() -> torch.profiler.profile:
    kinds = torch.profiler.ProfilerActivity
    return torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA])


@contextlib.contextmanager
def _sync_warnings() -> Iterator[list]:
    """A list of warnings, one for each time the host waits for the card."""
    found: list = []
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
            found += [one for one in given if "synchronizing CUDA operation" in str(one.message)]
