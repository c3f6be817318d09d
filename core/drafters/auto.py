"""Auto: repeats of the text where they are long, a drafter of another kind elsewhere (as SAM-Decoding does).

Before each round the longest earlier match of the text's ending decides (Hu et al. 2024, arXiv:2411.10666).
It is a function of the committed ids alone, and each of the two is exact, so the mixture is: the choice does
not look at what is to be judged (docs/ENGINE.md, rule 7).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from core.drafters.base import Drafter
from core.drafters.ngram import Lookup, NgramDrafter
from core.models.base import Cache, Stop
from core.records import Settings
from core.verify.sampling import Proposal

LONG_MATCH = 5  # ids from which a repeat is trusted more than a model, the paper's threshold


@dataclass
class Both:
    """The text's repeats, and the other drafter's ``state``; ``by`` proposed last."""

    lookup: Lookup
    state: Cache
    by: str

    @property
    def length(self) -> int:
        return min(self.lookup.length, self.state.length)

    @property
    def nbytes(self) -> int:
        return self.lookup.nbytes + self.state.nbytes

    def crop(self, length: int) -> None:
        self.lookup.crop(length)
        self.state.crop(length)

    def fork(self, length: int) -> Both:
        return Both(self.lookup.fork(length), self.state.fork(length), self.by)


class AutoDrafter:
    """``other`` drafts where no repeat is long enough; beyond its context any repeat serves.

    ``context_length`` is the target's. What it knows is what the two know, which is a function of the
    committed ids; ``Both.by`` is set anew before anybody asks for it.
    """

    name = "auto"

    def __init__(self, other: Drafter, context_length: int):
        self.other = other
        self.repeats = NgramDrafter(context_length)
        self.context_length = context_length

    def new_state(self) -> Both:
        return Both(Lookup(), self.other.new_state(), self.other.name)

    def proposer(self, state: Both) -> str:
        """Who proposed in the round before this question."""
        return state.by

    def short(self, state: Both) -> str:
        return "no_match" if state.by == NgramDrafter.name else self.other.short(state.state)

    def prefill(self, ids: Sequence[int], state: Both, cache: Cache, stop: Stop | None = None) -> None:
        state.lookup.read(ids)
        self.other.prefill(ids, state.state, cache, stop)

    def draft(
        self,
        ids: Sequence[int],
        count: int,
        settings: Settings,
        uniform: Callable[[], float],
        state: Both,
        cache: Cache,
    ) -> list[Proposal]:
        drafter, its, count = self.turn(ids, count, state)
        return drafter.draft(ids, count, settings, uniform, its, cache)

    def turn(self, ids: Sequence[int], count: int, state: Both) -> tuple[Drafter, Cache, int]:
        """Who drafts after ``ids``, with its state, and how many: as many as its context has room for."""
        state.lookup.read(ids)
        matched, _ = state.lookup.automaton.match
        room = self.other.context_length - len(ids) + 1
        if matched >= LONG_MATCH or room < 1:
            state.by = NgramDrafter.name
            return self.repeats, state.lookup, count
        state.by = self.other.name
        return self.other, state.state, min(count, room)

    def observe(self, ids: Sequence[int], logits: torch.Tensor, state: Both) -> None:
        self.other.observe(ids, logits, state.state)
