"""Kept caches: what was read of earlier prompts and replies, so that a follow-up reads only what is new.

A ``Kept`` is one sequence as it was read: the target's cache, the states of the drafters that were used, and
the ids they stand for. For a new prompt the one that shares the longest prefix of *ids* with it (text is
never compared) goes on from there; regenerating profits as well. Where the prefix is less than
half of what is kept, as when two conversations have a system prompt in common, it is copied, and the
longer one stays as it is. The last one used is always kept, since memory had to hold it anyway; of the others
the least recently used go when together they hold more than ``limit`` bytes, and all go where memory ends.

Knows no text, no conversation and no lock: the engine uses it while it holds its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from core.drafters.base import Drafter
from core.models.base import Cache, Scorer

MAX_KEPT = 8


@dataclass
class Kept:
    """One sequence. ``ids``: the leading ids of which ``cache`` and ``states`` hold at most all.

    ``states`` are the drafters', by name.
    """

    cache: Cache
    states: dict[str, Cache] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes + sum(state.nbytes for state in self.states.values())

    def state(self, drafter: Drafter) -> Cache:
        """The drafter's state, an empty one at first."""
        if drafter.name not in self.states:
            self.states[drafter.name] = drafter.new_state()
        return self.states[drafter.name]

    def crop(self, length: int) -> None:
        """Forgets what lies beyond the first ``length`` ids, everywhere."""
        del self.ids[length:]
        self.cache.crop(length)
        for state in self.states.values():
            state.crop(length)

    def fork(self, length: int) -> Kept:
        """A copy of the first ``length`` ids."""
        states = {name: state.fork(length) for name, state in self.states.items()}
        return Kept(self.cache.fork(length), states, self.ids[:length])


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading ids two sequences share."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


class KeptCaches:
    """The kept sequences of one target, the most recently used last; a ``limit`` of 0 keeps nothing."""

    def __init__(self, target: Scorer, limit: int):
        self.limit = limit
        self._target = target
        self._kept: list[Kept] = []

    @property
    def nbytes(self) -> int:
        """Memory held by kept caches, in bytes; the one in use is not among them."""
        return sum(kept.nbytes for kept in self._kept)

    def take(self, ids: Sequence[int]) -> Kept:
        """A sequence that holds a beginning of ``ids`` (perhaps nothing), for the caller alone.

        At most all but the last of ``ids``, which the first round reads (``core.engine.loop``).
        """
        shared = [min(common_prefix(kept.ids, ids), len(ids) - 1) for kept in self._kept]
        best = max(range(len(shared)), key=lambda i: (shared[i], i), default=None)
        if best is None or not shared[best]:
            return Kept(self._target.new_cache())
        if 2 * shared[best] < len(self._kept[best].ids):
            return self._kept[best].fork(shared[best])
        kept = self._kept.pop(best)
        kept.crop(shared[best])
        return kept

    def drop(self) -> None:
        """Gives up all that is kept."""
        self._kept.clear()

    def give_back(self, kept: Kept, ids: Sequence[int]) -> None:
        """Keeps a sequence of which was read a beginning of ``ids``, and nothing else."""
        if not self.limit:
            return
        kept.ids = list(ids[: kept.cache.length])
        while self._kept and (len(self._kept) >= MAX_KEPT or self.nbytes > self.limit):
            self._kept.pop(0)
        self._kept.append(kept)
