"""The passes and verdicts of one round, for the engine, which commits them; here one step at a time.

A ``Way`` plays a round: drafts, scores and judges. ``Stepwise`` brings every row of logits to the CPU and
looks at a position only when it is reached: the way of a CPU. ``core.batched`` does the same on a
card, where each look would cost a wait. Both give the same figures and use the same draws in the same order.

Knows caches and models by their protocols; no transcript, no tokenizer, no record of a whole reply.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from core.models.pair import Pair
from core.records import Settings
from core.reuse import Kept
from core.sampling import VERIFIERS, Distribution, Outcome, Proposal, distributions, raw_probability

Uniform = Callable[[], float]  # draws from [0, 1)


@dataclass(frozen=True, slots=True)
class Drafted:
    """What the record keeps of a draft, whatever becomes of it."""

    id: int
    q: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome at a tested position, and ``figures``: fields of ``core.records.Token`` by name."""

    outcome: Outcome
    figures: dict[str, object]


@dataclass(frozen=True, slots=True)
class Played:
    """A round before it is committed. ``verdicts`` come in the order of positions, the target's own last.

    A caller that meets a terminal token stops iterating. The iterator raises BadLogitsError where it
    reaches a row of the target from which nothing can be drawn. Seconds are of the model passes.
    """

    drafts: list[Drafted]
    verdicts: Iterator[Verdict]
    draft_seconds: float
    target_seconds: float


class Way(Protocol):
    """Plays the rounds of one reply."""

    def play(self, ids: Sequence[int], count: int, caches: Kept) -> Played:
        """A round after ``ids`` (all committed ids) with up to ``count`` drafts.

        ``caches`` hold a beginning of ``ids``, the target's all but the last; afterwards also drafts that
        may not stand.
        """


class Stepwise:
    """Asks for each figure when it is needed, on the CPU."""

    def __init__(self, pair: Pair, settings: Settings, uniform: Uniform):
        self._pair = pair
        self._settings = settings
        self._uniform = uniform

    def play(self, ids: Sequence[int], count: int, caches: Kept) -> Played:
        start = time.perf_counter()
        proposals: list[Proposal] = []
        if count:
            proposals = self._pair.drafter.draft(ids, count, self._settings, self._uniform, caches.state)
        drafted = time.perf_counter()
        rows = self._pair.target.logits([ids[-1], *(p.id for p in proposals)], caches.cache)
        scored = time.perf_counter()
        return Played(
            [Drafted(p.id, p.q.at(p.id)) for p in proposals],
            self._verdicts(list(ids), proposals, rows),
            drafted - start,
            scored - drafted,
        )

    def _verdicts(self, ids: list[int], proposals: list[Proposal], rows: torch.Tensor) -> Iterator[Verdict]:
        block = [*ids, *(proposal.id for proposal in proposals)]
        start = len(ids)
        targets: dict[int, tuple[Distribution, Distribution]] = {}

        def target(position: int) -> Distribution:
            if position not in targets:
                targets[position] = distributions(rows[position], self._settings, block[: start + position])
            return targets[position][0]

        for outcome in VERIFIERS[self._settings.verifier](target, proposals, self._uniform):
            position = outcome.position
            p, soft = targets[position]
            figures = outcome_figures(outcome) | {
                "entropy_p": p.entropy(),
                "p_raw": raw_probability(rows[position], outcome.id),
                "top_p": soft.top(),
            }
            if outcome.q is not None:
                proposal = proposals[position]
                figures |= {"entropy_q": proposal.q.entropy(), "top_q": proposal.soft.top()}
            yield Verdict(outcome, figures)


def outcome_figures(outcome: Outcome) -> dict[str, object]:
    """The figures of an outcome itself, by the names the record has for them."""
    return {name: getattr(outcome, name) for name in ("p", "q", "u", "h", "overlap")}
