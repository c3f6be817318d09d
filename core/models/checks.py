"""What any model shows of itself at load: that it can take ids back, and how far rows depend on each other.

A ``Scorer`` (``core.models.base``) is tested as it will run, quantised and on its device, by passes over a
few ids drawn from a fixed seed. Knows nothing of how a model works or where it came from.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from core.models.base import Scorer

# Row counts the row test tries: those of small drafts, and the most a round can have.
ROW_COUNTS = (2, 3, 4, 5, 9, 17)
_ALONE = 5  # rows that are scored alone too: as many passes, of a second each with a large model on a CPU
# The same passes after a crop and from a fresh cache: equal but for kernels that add in varying order.
_ROUNDING = 1e-3
PROBED = 4  # rows that the rollback test compares, behind the place where it crops
_KEPT = 5  # ids before that place


def _some_ids(size: int, count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(size), k=count)


def _size(scorer: Scorer) -> int:
    return min(scorer.readable_ids, scorer.vocabulary)


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference in probability between two sets of logits; NaN where any is."""
    return (one.double().softmax(-1) - other.double().softmax(-1)).abs().max().item()


def probe(size: int) -> list[int]:
    """Ids below ``size`` to score in one pass without a cache: ``agreement`` compares its last rows."""
    return _some_ids(size, 12, 1)[:_KEPT] + _some_ids(size, PROBED, 2)


@dataclass(frozen=True)
class Agreement:
    """Largest differences in probability: ``rollback`` between a cache that was cropped and a fresh one,
    ``whole`` between that and a pass without a cache, ``context`` what another beginning makes of it."""

    finite: bool
    rollback: float
    whole: float
    context: float

    def holds(self, share: float = 0.5) -> bool:
        """Whether both are the same but for rounding, which is large in 16 bits: as a pass without a cache
        counts what differs by no more than ``share`` of what another beginning would have made of it."""
        return self.rollback <= _ROUNDING and self.whole <= max(_ROUNDING, self.context * share)


@torch.inference_mode()
def agreement(scorer: Scorer, uncached: torch.Tensor) -> Agreement:
    """Reads 12 ids, crops to 5, reads others, and compares with a fresh cache and with a pass without any.

    ``uncached`` are the last rows of that pass over ``probe``'s ids, (PROBED, vocabulary) logits.
    """
    size = _size(scorer)
    first, others, strange = _some_ids(size, 12, 1), _some_ids(size, PROBED, 2), _some_ids(size, _KEPT, 5)

    def after(prefix: list[int]) -> torch.Tensor:
        cache = scorer.new_cache()
        scorer.logits(prefix, cache)
        cache.crop(_KEPT)
        return scorer.logits(others, cache)

    fresh = after(first[:_KEPT])
    return Agreement(
        bool(fresh.isfinite().all()),
        _difference(after(first), fresh),
        _difference(fresh, uncached),
        _difference(after(strange), fresh),
    )


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
def row_dependence(scorer: Scorer, counts: Sequence[int] = ROW_COUNTS) -> RowDependence:
    """Rule 13's self-test on a whole model, behind a short prompt, at each row count its context allows."""
    prompt, ids = _some_ids(_size(scorer), 8, 3), _some_ids(_size(scorer), max(counts), 4)
    counts = [rows for rows in counts if len(prompt) + rows <= scorer.context_length]
    cache = scorer.new_cache()
    scorer.prefill(prompt, cache)
    single = torch.stack([scorer.next_logits([token], cache) for token in ids[:_ALONE]])

    def scored(rows: list[int]) -> torch.Tensor:
        cache.crop(len(prompt))
        return scorer.logits(rows, cache)

    later = alone = 0.0
    for rows in counts:
        calm = scored(ids[:rows])
        other_last = scored([*ids[: rows - 1], (ids[rows - 1] + 1) % scorer.readable_ids])
        later = max(later, _bits(calm[:-1], other_last[:-1]))
        alone = max(alone, _bits(calm[:_ALONE], single[:rows]))
    return RowDependence(later, alone)


def _bits(one: torch.Tensor, other: torch.Tensor) -> float:
    """0 where bit-equal, else the difference in probability, which is never shown as 0."""
    return 0.0 if torch.equal(one, other) else max(_difference(one, other), torch.finfo(torch.float64).tiny)
