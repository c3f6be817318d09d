"""The self-test of rule 13 (docs/ENGINE.md): does a row of a pass depend on the rows beside it here?

Works on any ``Scorer`` through its interface, so on attention and head as well as on products. Knows no
kernel and does not say why rows differ, only by how much.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from core.models.base import Scorer
from core.settings import MAX_DRAFT_TOKENS

MOST_ROWS = MAX_DRAFT_TOKENS + 1
# Where a pass takes long: the row counts of small drafts and the largest, and how many rows are scored alone.
FEW_COUNTS = (2, 3, 4, 5, 9, MOST_ROWS)
FEW_ALONE = 5
_PROMPT = 8  # ids read before


@dataclass(frozen=True)
class RowDependence:
    """How far a row of a pass depends on its neighbours: largest differences in probability.

    ``later`` is between a row and the same row before another last id (0 where bit-equal: causality);
    ``alone`` between a row of a pass and the same id scored in a pass of its own.
    """

    later: float
    alone: float

    @property
    def sentence(self) -> str | None:
        """What the page says; None where rows are bit-equal."""
        if self.later:
            return (
                "On this machine the score of a token depends on the tokens behind it"
                f" (by up to {self.later:.1e} in probability), so replies are exact up to that difference."
            )
        if self.alone:
            return (
                "On this machine a token scored beside others differs slightly from the same token scored"
                f" alone (by up to {self.alone:.1e} in probability), so replies are exact up to rounding."
            )
        return None


@torch.inference_mode()
def row_dependence(scorer: Scorer, thorough: bool = True) -> RowDependence:
    """Scores rows behind a short prompt: at every row count of a round, or where not ``thorough`` at a few.

    Counts that the scorer's context does not hold are left out.
    """
    prompt, ids = some_ids(scorer, _PROMPT, 3), some_ids(scorer, MOST_ROWS, 4)
    counts = range(2, MOST_ROWS + 1) if thorough else FEW_COUNTS
    counts = [rows for rows in counts if len(prompt) + rows <= scorer.context_length]
    cache = scorer.new_cache()
    scorer.prefill(prompt, cache)
    alone = ids[: max(counts, default=0) if thorough else FEW_ALONE]
    single = torch.stack([scorer.next_logits([token], cache) for token in alone])

    def scored(rows: list[int]) -> torch.Tensor:
        cache.crop(len(prompt))
        return scorer.logits(rows, cache)

    found = RowDependence(0.0, 0.0)
    for rows in counts:
        calm = scored(ids[:rows])
        other_last = scored([*ids[: rows - 1], (ids[rows - 1] + 1) % scorer.readable_ids])
        found = RowDependence(
            max(found.later, _difference(calm[:-1], other_last[:-1])),
            max(found.alone, _difference(calm[: len(single)], single[:rows])),
        )
    return found


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """0 where bit-equal, else the difference in probability, which is never shown as 0."""
    return 0.0 if torch.equal(one, other) else max(difference(one, other), torch.finfo(torch.float64).tiny)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference in probability between two sets of logits (rows, n); NaN where any is."""
    return (one.double().softmax(-1) - other.double().softmax(-1)).abs().max().item()


def some_ids(scorer: Scorer, count: int, seed: int) -> list[int]:
    """The same ``count`` ids at each call, of those that ``scorer`` reads and scores."""
    return ids_below(min(scorer.readable_ids, scorer.vocabulary), count, seed)


def ids_below(size: int, count: int, seed: int) -> list[int]:
    """The same ``count`` ids below ``size`` at each call."""
    return random.Random(seed).choices(range(size), k=count)
