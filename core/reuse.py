"""Kept caches: what was read of earlier prompts and replies, so that a follow-up reads only what is new.

A ``Kept`` is one sequence as both models have read it: the target's cache, the drafter's state, and
the ids they stand for. For a new prompt the one that shares the longest prefix of *ids* with it (text is
never compared) goes on from there; regenerating profits as well. Where the prefix is less than
half of what is kept, as when two conversations have a system prompt in common, it is copied, and the
longer one stays as it is. The last one used is always kept, since memory had to hold it anyway; of the others
the least recently used go when together they hold more than ``limit`` bytes.

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
    """One sequence. ``ids``: the leading ids of which ``cache`` and ``state`` hold at most all."""

    cache: Cache
    state: Cache | None
    ids: list[int] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes + (self.state.nbytes if self.state else 0)

    def crop(self, length: int) -> None:
        """Forgets what lies beyond the first ``length`` ids, in both models."""
        del self.ids[length:]
        self.cache.crop(length)
        if self.state:
            self.state.crop(length)

    def fork(self, length: int) -> Kept:
        """A copy of the first ``length`` ids."""
        return Kept(self.cache.fork(length), self.state and self.state.fork(length), self.ids[:length])


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading ids two sequences share."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


class KeptCaches:
    """The kept sequences of one pair, the most recently used last; with a ``limit`` of 0 nothing is kept."""

    def __init__(self, target: Scorer, drafter: Drafter | None, limit: int):
        self.limit = limit
        self._target, self._drafter = target, drafter
        self._kept: list[Kept] = []

    @property
    def nbytes(self) -> int:
        """Memory held by kept caches, in bytes; the one in use is not among them."""
        return sum(kept.nbytes for kept in self._kept)

    def take(self, ids: Sequence[int]) -> Kept:
        """A sequence that holds a beginning of ``ids`` (perhaps nothing), for the caller alone.

        At most all but the last of ``ids``, which the first round reads (``core.engine``).
        """
        shared = [min(common_prefix(kept.ids, ids), len(ids) - 1) for kept in self._kept]
        best = max(range(len(shared)), key=lambda i: (shared[i], i), default=None)
        if best is None or not shared[best]:
            return Kept(self._target.new_cache(), self._drafter.new_state() if self._drafter else None)
        if 2 * shared[best] < len(self._kept[best].ids):
            return self._kept[best].fork(shared[best])
        kept = self._kept.pop(best)
        kept.crop(shared[best])
        return kept

    def give_back(self, kept: Kept, ids: Sequence[int]) -> None:
        """Keeps a sequence whose models have read a beginning of ``ids``, and nothing else."""
        if not self.limit:
            return
        kept.ids = list(ids[: kept.cache.length])
        while self._kept and (len(self._kept) >= MAX_KEPT or self.nbytes > self.limit):
            self._kept.pop(0)
        self._kept.append(kept)
