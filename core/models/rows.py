"""The self-test of rule 13 (docs/ENGINE.md): does a row of a pass depend on the rows beside it here?

Works on any ``Scorer`` through its interface, so on attention and head as well as on products. Where passes
take long it stops early and says how much it tested. Knows no kernel and does not say why rows differ, only
by how much.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from core.models import Progress, silent
from core.models.base import Scorer
from core.settings import MAX_DRAFT_TOKENS

MOST_ROWS = MAX_DRAFT_TOKENS + 1
# Row counts in the order in which they are tested. Those that tell most come first: the smallest, that of the
# K a conversation begins with, the first beyond a block of four and of eight rows, and the largest.
TELLING = (2, 4, 5, 9, MOST_ROWS)
COUNTS = (*TELLING, *sorted({*range(2, MOST_ROWS)} - {*TELLING}))
BUDGET = 10.0  # seconds after which no other row count is begun
CHECKING = "Checking that rows are scored independently"
_PROMPT = 8  # ids read before


@dataclass(frozen=True)
class RowDependence:
    """How far a row of a pass depends on its neighbours: largest differences in probability.

    ``later`` is between a row and the same row before another last id (0 where bit-equal: causality);
    ``alone`` between a row of a pass and the same id scored in a pass of its own. ``tested`` is how many row
    counts were tested and of how many, None where all were.
    """

    later: float
    alone: float
    tested: tuple[int, int] | None = None

    @property
    def sentence(self) -> str | None:
        """What the page says; None where rows are bit-equal at every row count."""
        if self.later:
            said = (
                "On this machine the score of a token depends on the tokens behind it"
                f" (by up to {self.later:.1e} in probability), so replies are exact up to that difference."
            )
        elif self.alone:
            said = (
                "On this machine a token scored beside others differs slightly from the same token scored"
                f" alone (by up to {self.alone:.1e} in probability), so replies are exact up to rounding."
            )
        elif self.tested:
            said = "A token scored beside others came out as the same token scored alone, bit for bit."
        else:
            return None
        if self.tested:
            some, of = self.tested
            said += f" Passes take long here, so {some} of {of} row counts were tested."
        return said


@torch.inference_mode()
def row_dependence(
    scorer: Scorer,
    say: Progress = silent,
    budget: float = BUDGET,
    clock: Callable[[], float] = time.monotonic,
    behind: int = _PROMPT,
) -> RowDependence:
    """Scores rows behind a prompt of ``behind`` ids, at every row count of a round or at those for which
    there is time.

    After ``budget`` seconds no other is begun; one is tested in any case. Counts that the scorer's context
    does not hold are left out.
    """
    prompt, ids = some_ids(scorer, behind, 3), some_ids(scorer, MOST_ROWS, 4)
    counts = [rows for rows in COUNTS if len(prompt) + rows <= scorer.context_length]
    passes, done, start = max(counts, default=0) + 2 * len(counts), 0, clock()

    def tell() -> float:
        spent = (clock() - start) / budget
        say(CHECKING, min(max(done / max(passes, 1), spent), 1.0))
        return spent

    def scored(rows: list[int]) -> torch.Tensor:
        cache.crop(len(prompt))
        return scorer.logits(rows, cache)

    tell()
    cache = scorer.new_cache()
    scorer.prefill(prompt, cache)
    growing = cache.fork(len(prompt))  # the ids one by one, each in a pass of its own
    found, single = RowDependence(0.0, 0.0), []
    for tested, rows in enumerate(counts):
        if tell() >= 1 and tested:
            return replace(found, tested=(tested, len(counts)))
        while len(single) < rows:
            single.append(scorer.next_logits([ids[len(single)]], growing))
            done += 1
            tell()
        calm = scored(ids[:rows])
        done += 1
        tell()
        other_last = scored([*ids[: rows - 1], (ids[rows - 1] + 1) % scorer.readable_ids])
        done += 1
        found = RowDependence(
            max(found.later, _difference(calm[:-1], other_last[:-1])),
            max(found.alone, _difference(calm, torch.stack(single[:rows]))),
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
