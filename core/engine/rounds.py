"""The passes and verdicts of one round, for the engine, which commits them; here one step at a time.

A ``Way`` plays a round: drafts, scores and judges. ``Stepwise`` brings every row of logits to the CPU and
looks at a position only when it is reached: the way of a CPU. ``core.engine.batched`` does the same on a
card, where each look would cost a wait. Both give the same figures and use the same draws in the same order.

Knows caches and models by their protocols; no transcript, no tokenizer, no record of a whole reply.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

import torch

from core.drafters.names import TREE_DRAFTERS
from core.engine.reuse import Kept
from core.models.base import Cache, Scorer
from core.pairs.pair import Pair
from core.records import Settings
from core.settings import LOSSY
from core.verify.lossy import lossy
from core.verify.sampling import (
    VERIFIERS,
    BadLogitsError,
    Distribution,
    Outcome,
    Proposal,
    Verify,
    distributions,
    raw_probability,
    shows_raw,
)
from core.verify.tree import verify_tree

Uniform = Callable[[], float]  # draws from [0, 1)


@dataclass(frozen=True, slots=True)
class Drafted:
    """What the record keeps of a draft, whatever becomes of it. ``parent`` is the ``Proposal``'s."""

    id: int
    q: float
    parent: int | None


def chain(drafts: Iterable[tuple[int, float]]) -> list[Drafted]:
    """Ids and q of drafts each of which follows the one before."""
    return [Drafted(id, q, index - 1 if index else None) for index, (id, q) in enumerate(drafts)]


def is_chain(drafts: Sequence[Drafted | Proposal]) -> bool:
    """Whether each draft follows the one before."""
    return all(draft.parent == (index - 1 if index else None) for index, draft in enumerate(drafts))


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
    ``rows`` say which row of the target's pass each draft was, that of the last committed id being the first;
    None where they are a chain, in its order.
    """

    drafts: list[Drafted]
    verdicts: Iterator[Verdict]
    draft_seconds: float
    target_seconds: float
    rows: Sequence[int] | None = None

    @property
    def positions(self) -> list[int]:
        """How deep in the block each draft stands, from 0."""
        positions: list[int] = []
        for draft in self.drafts:
            positions.append(0 if draft.parent is None else positions[draft.parent] + 1)
        return positions


class Way(Protocol):
    """Plays the rounds of one reply."""

    def play(self, ids: Sequence[int], count: int, caches: Kept) -> Played:
        """A round after ``ids`` (all committed ids) with up to ``count`` drafts.

        ``caches`` hold a beginning of ``ids``, the target's all but the last; afterwards also drafts that
        may not stand. Where an error ended it, the next call may be the same once more, and meets the same
        draws.
        """


class _Replayed:
    """The draws of a reply, of which those of a round that broke off come once more."""

    def __init__(self, uniform: Uniform):
        self._uniform = uniform
        self._drawn: list[float] = []  # in the round so far
        self._again = 0  # how many of these are still to come once more

    def __call__(self) -> float:
        if self._again:
            self._again -= 1
            return self._drawn[-self._again - 1]
        self._drawn.append(self._uniform())
        return self._drawn[-1]

    def begin(self, again: bool) -> None:
        """Begins a round, the last one ``again`` or the next."""
        if not again:
            del self._drawn[: len(self._drawn) - self._again]
        self._again = len(self._drawn)


class Stepwise:
    """Asks for each figure when it is needed, on the CPU. A round that an error ended can be played again."""

    def __init__(self, pair: Pair, settings: Settings, uniform: Uniform):
        self._pair = pair
        # Lossy rules judge chains: what a tree does to the output could not be said in one number.
        self._settings = settings if settings.exact else replace(settings, tree_width=1)
        self._uniform = _Replayed(uniform)
        self._broken_off = False

    def play(self, ids: Sequence[int], count: int, caches: Kept) -> Played:
        self._uniform.begin(again=self._broken_off)
        self._broken_off = True  # until it is over
        start = time.perf_counter()
        target, drafter, proposals = self._pair.target, self._pair.drafter, []
        settings, tree = self._settings, False
        if count:
            state = caches.state(drafter)
            settings = replace(settings, tree_width=tree_width(settings, target, count, caches.cache))
            proposals = drafter.draft(ids, count, settings, self._uniform, state, caches.cache)
            tree = settings.tree_width > 1 and drafter.proposer(state) in TREE_DRAFTERS
        drafted = time.perf_counter()
        block, places = [ids[-1], *(p.id for p in proposals)], None
        if is_chain(proposals):
            rows = target.logits(block, caches.cache)
        else:
            parents = [-1, *(0 if p.parent is None else p.parent + 1 for p in proposals)]
            tree, places = True, range(1, len(block))
            rows = target.tree_logits(block, parents, caches.cache)
        scored = time.perf_counter()
        # All before any is committed: where memory ends, nothing of the round stands, and it is played again.
        verdicts = _made(self._verdicts(list(ids), proposals, rows, tree))
        if count:  # last: what is learnt of a round is not taken back
            drafter.observe(block, rows, state)
        self._broken_off = False
        return Played(
            [Drafted(p.id, p.q.at(p.id), p.parent) for p in proposals],
            verdicts,
            drafted - start,
            scored - drafted,
            places,
        )

    def _verdicts(
        self, ids: list[int], proposals: list[Proposal], rows: torch.Tensor, tree: bool
    ) -> Iterator[Verdict]:
        targets: dict[int, tuple[Distribution, Distribution]] = {}

        def before(row: int) -> list[int]:
            """The ids a row of the target follows: those committed, then drafts from the root on."""
            path: list[int] = []
            index = row - 1 if row else None
            while index is not None:
                path.append(proposals[index].id)
                index = proposals[index].parent
            return ids + path[::-1]

        def target(row: int) -> Distribution:
            """p after the committed ids (row 0) or after proposal ``row - 1``."""
            if row not in targets:
                targets[row] = distributions(rows[row], self._settings, before(row))
            return targets[row][0]

        @cache  # a rejected token and the one in its place stand at one row
        def of_row(row: int) -> dict[str, object]:
            p, soft = targets[row]
            return {"entropy_p": p.entropy(), "top_p": soft.top()}

        @cache
        def total(row: int) -> torch.Tensor:
            return rows[row].logsumexp(0)

        def raw(row: int, token_id: int) -> float:
            if shows_raw(self._settings):  # a pass over the vocabulary less
                return targets[row][1].at(token_id)
            return raw_probability(rows[row], token_id, total(row))

        @cache
        def of_proposal(index: int) -> dict[str, object]:
            proposal = proposals[index]
            return {"entropy_q": proposal.q.entropy(), "top_q": proposal.soft.top()}

        for outcome in verifier(self._settings, tree)(target, proposals, self._uniform):
            row = outcome.position if outcome.row is None else outcome.row
            figures = outcome_figures(outcome) | of_row(row)
            figures["p_raw"] = raw(row, outcome.id)
            if outcome.q is not None:
                figures |= of_proposal(outcome.position if outcome.index is None else outcome.index)
            yield Verdict(outcome, figures)


def tree_width(settings: Settings, target: Scorer, count: int, cache: Cache) -> int:
    """How many candidates a position a round of ``count`` drafts has, where its drafter makes trees; 1 is a
    chain."""
    # Every node of a tree takes a place of the target's context until the round is over.
    places = count * settings.tree_width
    if not hasattr(target, "tree_logits") or places >= target.tree_room(cache):
        return 1
    return settings.tree_width


def _made(verdicts: Iterator[Verdict]) -> Iterator[Verdict]:
    """The same verdicts, made now: an iterator that ends, or raises BadLogitsError, where they do."""
    made: list[Verdict] = []
    problem: str | None = None  # as text, since whoever kept the exception would keep the rows
    try:
        for verdict in verdicts:
            made.append(verdict)
    except BadLogitsError as bad:
        problem = str(bad)

    def told() -> Iterator[Verdict]:
        yield from made
        if problem is not None:
            raise BadLogitsError(problem)

    return told()


def verifier(settings: Settings, tree: bool) -> Verify:
    """The rule that judges a round's drafts: a tree is judged token by token whatever exact rule is set, also
    where it came out as a chain."""
    if settings.verifier in LOSSY:
        return lossy(settings.verifier, settings.acceptance_threshold)
    return verify_tree if tree else VERIFIERS[settings.verifier]


def outcome_figures(outcome: Outcome) -> dict[str, object]:
    """The figures of an outcome itself, by the names the record has for them."""
    return {name: getattr(outcome, name) for name in ("p", "q", "u", "h", "overlap", "drift")}
