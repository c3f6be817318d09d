"""The self-test of rule 13 (docs/ENGINE.md): does a row of a pass depend on the rows beside it here?

Asked of chains of every length and of trees of every shape that settings allow. Works on any ``Scorer``
through its interface, so on attention and head as well as on products. Where passes take long it stops early
and says how much it tested. Knows no kernel and does not say why rows differ, only by how much.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Protocol, runtime_checkable

import torch

from core.machine.progress import Progress, silent
from core.models.base import Scorer
from core.models.tree_walk import along_a_branch
from core.settings import MAX_DRAFT_TOKENS, MAX_TREE_WIDTH

MOST_ROWS = MAX_DRAFT_TOKENS + 1
# Row counts in the order in which they are tested. Those that tell most come first: the smallest, that of the
# K a conversation begins with, the first beyond a block of four and of eight rows, and the largest.
TELLING = (2, 4, 5, 9, MOST_ROWS)
COUNTS = (*TELLING, *sorted({*range(2, MOST_ROWS)} - {*TELLING}))
# Trees, (K, width): first the usual K at a width of 3, the largest, and a deep and a wide one.
TELLING_TREES = ((3, 3), (MAX_DRAFT_TOKENS, MAX_TREE_WIDTH), (MAX_DRAFT_TOKENS, 2), (2, MAX_TREE_WIDTH))
TREES = TELLING_TREES + tuple(
    shape
    for shape in product(range(1, MAX_DRAFT_TOKENS + 1), range(2, MAX_TREE_WIDTH + 1))
    if shape not in TELLING_TREES
)
BUDGET = 10.0  # seconds after which no other row count is begun
CHECKING = "Checking that rows are scored independently"
_PROMPT = 8  # ids read before


@runtime_checkable
class Layered(Protocol):
    """A model that can be had with its first layers alone, and all that stands behind the last."""

    def beginning(self, layers: int) -> Scorer: ...


@dataclass(frozen=True)
class RowDependence:
    """How far a row of a pass depends on its neighbours: largest differences in probability.

    ``later`` is between a row and the same row before another last id (0 where bit-equal: causality);
    ``alone`` between a row of a pass and the same id scored in a pass of its own, and ``trees`` that of a
    tree's rows, 0 also where no trees are scored. ``tested`` is how many row counts were tested and of how
    many, and ``trees_tested`` how many shapes of trees; None where all were.
    """

    later: float
    alone: float
    tested: tuple[int, int] | None = None
    trees: float = 0.0
    trees_tested: tuple[int, int] | None = None

    @property
    def whole(self) -> bool:
        """Whether all was tested."""
        return self.tested is None and self.trees_tested is None

    @property
    def sentence(self) -> str | None:
        """What the page says; None where rows are bit-equal at every row count and in every tree."""
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
        elif self.whole and not self.trees:
            return None
        else:
            said = "A token scored beside others came out as the same token scored alone, bit for bit."
        if self.trees:
            said += (
                f" A token of a tree differs from the same token scored alone by up to {self.trees:.1e} in"
                " probability, so replies with trees are exact up to that difference."
            )
        short = [
            f"{counts[0]} of {counts[1]} {what}"
            for counts, what in ((self.tested, "row counts"), (self.trees_tested, "shapes of trees"))
            if counts
        ]
        if short:
            said += f" Passes take long here, so {' and '.join(short)} were tested."
        return said


@torch.inference_mode()
def row_dependence(
    scorer: Scorer,
    say: Progress = silent,
    budget: float = BUDGET,
    clock: Callable[[], float] = time.monotonic,
    behind: int = _PROMPT,
) -> RowDependence:
    """Scores rows behind a prompt of ``behind`` ids, at every row count of a round and in trees of every
    shape, or in those for which there is time.

    After ``budget`` seconds no other is begun; one of each kind is tested in any case. Counts and shapes that
    the scorer's context does not hold are left out, and trees where it scores none.
    """
    prompt, ids = some_ids(scorer, behind, 3), some_ids(scorer, MOST_ROWS, 4)
    counts = [rows for rows in COUNTS if len(prompt) + rows <= scorer.context_length]
    shapes = _shapes(scorer, len(prompt))
    nodes = {(depth, other) for k, width in shapes for depth in range(k) for other in range(1, width)}
    passes = max(counts, default=0) + 2 * len(counts) + len(nodes) + len(shapes)
    done, start = 0, clock()

    def tell() -> float:
        spent = (clock() - start) / budget if budget else 1.0
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

    def read_alone(rows: int) -> None:
        nonlocal done
        while len(single) < rows:
            single.append(scorer.next_logits([ids[len(single)]], growing))
            done += 1
            tell()

    for tested, rows in enumerate(counts):
        if tell() >= 1 and tested:
            found = replace(found, tested=(tested, len(counts)))
            break
        read_alone(rows)
        calm = scored(ids[:rows])
        done += 1
        tell()
        other_last = scored([*ids[: rows - 1], (ids[rows - 1] + 1) % scorer.readable_ids])
        done += 1
        found = RowDependence(
            max(found.later, _difference(calm[:-1], other_last[:-1])),
            max(found.alone, _difference(calm, torch.stack(single[:rows]))),
        )
    others: dict[tuple[int, int], torch.Tensor] = {}  # by depth and place among siblings, the first left out
    sizes = min(scorer.readable_ids, scorer.vocabulary)
    for tested, (k, width) in enumerate(shapes):
        if tell() >= 1 and tested:
            return replace(found, trees_tested=(tested, len(shapes)))
        read_alone(k + 1)
        block, rows = ids[:1], single[:1]
        for depth, place in product(range(k), range(width)):
            block.append((ids[depth + 1] + place) % sizes)
            if place and (depth, place) not in others:
                aside = growing.fork(len(prompt) + depth + 1)  # the branch that goes on stays
                others[depth, place] = scorer.next_logits(block[-1:], aside)
                done += 1
                tell()
            rows.append(others[depth, place] if place else single[depth + 1])
        cache.crop(len(prompt))
        together = scorer.tree_logits(block, along_a_branch(k, width), cache)
        done += 1
        # One by one: in float64 all rows of a large vocabulary take hundreds of megabytes.
        found = replace(found, trees=max(found.trees, *map(_difference, together, rows)))
    return found


def self_test(scorer: Scorer, say: Progress = silent, behind: int = _PROMPT) -> RowDependence:
    """``row_dependence`` of a model, by its first layer where that tells enough.

    One layer has all kernels, attention and head included, in a fraction of the time. Where its rows differ,
    the whole model says by how much, in what time is left.
    """
    start = time.monotonic()
    if isinstance(scorer, Layered):
        found = row_dependence(scorer.beginning(1), say, behind=behind)
        if not (found.later or found.alone or found.trees):
            return found
    return row_dependence(scorer, say, max(0.0, BUDGET - (time.monotonic() - start)), behind=behind)


def _shapes(scorer: Scorer, behind: int) -> list[tuple[int, int]]:
    """The trees that ``scorer`` can score behind so many ids."""
    if getattr(scorer, "tree_logits", None) is None:
        return []
    return [(k, width) for k, width in TREES if behind + 1 + k * width <= scorer.context_length]


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
