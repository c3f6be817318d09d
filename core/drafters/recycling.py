"""Token recycling: the target's own likely successors, seen in earlier passes, are proposed again.

A table holds for every id that a pass scored the ids the target then found most likely; every pass refreshes
it, rejected drafts' rows included. Nothing is trained and no model is run (Luo et al. 2024, *Turning Trash
into Treasure*, arXiv:2408.08696). Each proposal is certain (q is 1).

A table begins with a reply, from its prompt, and ends with it: rows of an earlier one were shaped by that
one's draws, and where a seed is used again the same draws would judge what they had a hand in
(docs/ENGINE.md, rule 7). Within a reply the rows follow from what was committed: a refused certain draft is
never written in its own place, so that the committed ids say where each round began and what it had proposed.
Knows ids and rows of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from core.drafters.ngram import certain
from core.models.base import Cache, Stop
from core.records import Settings
from core.verify.sampling import Proposal

SUCCESSORS = 8  # kept for an id, as in the paper
_BYTES_PER_ENTRY = 400


class Table:
    """Most likely successors by id, of one reply: cropping forgets nothing within it, and the next reply's
    ``prefill`` everything."""

    def __init__(self, successors: dict[int, list[int]] | None = None):
        self.successors = successors or {}
        self.length = 0

    @property
    def nbytes(self) -> int:
        return _BYTES_PER_ENTRY * len(self.successors)

    def crop(self, length: int) -> None:
        """Nothing: what the target thought after a refused draft is a guess at another place."""

    def fork(self, length: int) -> Table:
        return Table(dict(self.successors))


class RecyclingDrafter:
    """A chain follows the likeliest successors. A tree of ``tree_width`` has as many candidates at each place
    along that chain: K * tree_width nodes at most. ``context_length`` is the target's.

    What it knows follows from the prompt and from what this reply committed, whatever was asked before."""

    name = "recycling"

    def __init__(self, context_length: int):
        self.context_length = context_length

    def new_state(self) -> Table:
        return Table()

    def proposer(self, state: Table) -> str:
        return self.name

    def short(self, state: Table) -> str:
        return "no_match"

    def prefill(self, ids: Sequence[int], state: Table, cache: Cache, stop: Stop | None = None) -> None:
        """Begins anew: what followed in the prompt itself is a first guess."""
        state.successors = {}
        for id, following in zip(ids, ids[1:], strict=False):
            known = state.successors.get(id, [])
            state.successors[id] = [following, *(x for x in known if x != following)][:SUCCESSORS]

    def draft(
        self,
        ids: Sequence[int],
        count: int,
        settings: Settings,
        uniform: Callable[[], float],
        state: Table,
        cache: Cache,
    ) -> list[Proposal]:
        proposals: list[Proposal] = []
        parent = None
        for candidates in self.tree(ids, count, settings.tree_width, state):
            first = len(proposals)
            for id in candidates:
                q = certain(id)
                proposals.append(Proposal(id, q, q, parent))
            parent = first
        return proposals

    def tree(self, ids: Sequence[int], count: int, width: int, state: Table) -> list[list[int]]:
        """The ids that ``draft`` proposes at each position, each certain: known before anything runs. Those
        of the next one follow the first."""
        found: list[list[int]] = []
        at = ids[-1]
        while len(found) < count and (candidates := state.successors.get(at, [])[:width]):
            found.append(candidates)
            at = candidates[0]
        return found

    def chain(self, ids: Sequence[int], count: int, state: Table) -> list[int]:
        """``tree`` of one candidate a position."""
        return [id for (id,) in self.tree(ids, count, 1, state)]

    def observe(self, ids: Sequence[int], logits: torch.Tensor, state: Table) -> None:
        self.learn(ids, likeliest(logits).tolist(), state)

    def learn(self, ids: Sequence[int], likeliest: Sequence[Sequence[int]], state: Table) -> None:
        """``observe`` by what ``likeliest`` gives after each of ``ids``."""
        state.successors.update(zip(ids, map(list, likeliest), strict=True))


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """The ids that a table keeps of rows of logits (n, vocabulary): (n, ``SUCCESSORS``), or fewer."""
    return logits.topk(min(SUCCESSORS, logits.shape[-1])).indices
