"""Figures from rounds: counts, acceptance, expected tokens and speed. Pure functions, no torch.

Knows the records and nothing else. Every figure that is undefined (nothing drafted, no rounds, no time
measured) is None, never 0 or 1. Identities that hold for every ``Figures``::

    drafted = accepted + rejected + discarded
    emitted = accepted + resampled + bonus + plain
    tested  = accepted + rejected
    target passes = rounds

Where vLLM or llama.cpp has a name for a figure, it is that name with that meaning: ``draft_acceptance_rate``,
``acceptance_per_position`` and ``mean_acceptance_length`` are vLLM's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from core.records import DOMAINS, DRAFTED, EMITTED, Fate, Round


@dataclass(frozen=True, slots=True)
class Figures:
    """Everything that is counted or measured over a set of rounds. Seconds are wall time.

    ``acceptance_per_position[i]`` = rounds in which position i was accepted / rounds with drafts;
    ``conditional_acceptance[i]`` = rounds in which position i was accepted / rounds in which it was tested
    (a_i; None where it never was). Both are as long as the longest block drafted, and None where nothing was.
    ``alpha`` is the mean overlap, the sum of min(p, q), over tested tokens. ``decode_seconds`` is the three
    parts together: rounds only, no prefill. ``drift`` is the mean of a lossy rule's over tested tokens.
    """

    rounds: int
    rounds_with_drafts: int
    drafted: int
    accepted: int
    rejected: int
    discarded: int
    tested: int
    resampled: int
    bonus: int
    plain: int
    emitted: int
    draft_acceptance_rate: float | None
    tested_acceptance_rate: float | None
    acceptance_per_position: tuple[float, ...] | None
    conditional_acceptance: tuple[float | None, ...] | None
    mean_acceptance_length: float | None
    tokens_per_pass: float | None
    alpha: float | None
    drift: float | None
    draft_seconds: float
    target_seconds: float
    overhead_seconds: float
    decode_seconds: float
    tokens_per_second: float | None

    @property
    def mean_draft_tokens(self) -> float | None:
        """Drafted tokens a round: the mean K, where it changes from round to round."""
        return _ratio(self.drafted, self.rounds)

    def as_row(self) -> dict[str, int | float | str | None]:
        """One flat row with the database's and the CSV's names.

        The two per-position figures are JSON text (``[0.75, 0.5]``, null where a position was never tested).
        """
        row = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: json.dumps(value) if isinstance(value, tuple) else value for name, value in row.items()}


FIGURE_NAMES = tuple(field.name for field in fields(Figures))


class Tally:
    """Adds up rounds one at a time, so that live figures and long exports need not keep or re-read them."""

    def __init__(self) -> None:
        self._rounds = 0
        self._rounds_with_drafts = 0
        self._fates = dict.fromkeys(Fate, 0)
        self._accepted_at: list[int] = []
        self._tested_at: list[int] = []
        self._overlap = 0.0
        self._overlaps = 0
        self._drift = 0.0
        self._drifts = 0
        self._draft_seconds = 0.0
        self._target_seconds = 0.0
        self._overhead_seconds = 0.0

    def add(self, round_: Round) -> None:
        """Counts one more round."""
        self._rounds += 1
        self._rounds_with_drafts += round_.drafted > 0
        self._draft_seconds += round_.draft_seconds
        self._target_seconds += round_.target_seconds
        self._overhead_seconds += round_.overhead_seconds
        # Sets, because a tree of drafts may test several tokens at one position: positions count once a
        # round.
        accepted: set[int] = set()
        tested: set[int] = set()
        for token in round_.tokens:
            self._fates[token.fate] += 1
            if not token.drafted:
                continue
            while len(self._tested_at) <= token.position:
                self._tested_at.append(0)
                self._accepted_at.append(0)
            if token.fate is Fate.DISCARDED:
                continue
            tested.add(token.position)
            if token.fate is Fate.ACCEPTED:
                accepted.add(token.position)
            if token.overlap is not None:
                self._overlap += token.overlap
                self._overlaps += 1
            if token.drift is not None:
                self._drift += token.drift
                self._drifts += 1
        for position in tested:
            self._tested_at[position] += 1
        for position in accepted:
            self._accepted_at[position] += 1

    def figures(self) -> Figures:
        """The figures of all rounds added so far."""
        fates = self._fates
        accepted, rejected = fates[Fate.ACCEPTED], fates[Fate.REJECTED]
        drafted = sum(fates[fate] for fate in DRAFTED)
        emitted = sum(fates[fate] for fate in EMITTED)
        with_drafts = self._rounds_with_drafts
        decode_seconds = self._draft_seconds + self._target_seconds + self._overhead_seconds
        return Figures(
            rounds=self._rounds,
            rounds_with_drafts=with_drafts,
            drafted=drafted,
            accepted=accepted,
            rejected=rejected,
            discarded=fates[Fate.DISCARDED],
            tested=accepted + rejected,
            resampled=fates[Fate.RESAMPLED],
            bonus=fates[Fate.BONUS],
            plain=fates[Fate.PLAIN],
            emitted=emitted,
            draft_acceptance_rate=_ratio(accepted, drafted),
            tested_acceptance_rate=_ratio(accepted, accepted + rejected),
            acceptance_per_position=tuple(count / with_drafts for count in self._accepted_at) or None,
            conditional_acceptance=tuple(map(_ratio, self._accepted_at, self._tested_at)) or None,
            mean_acceptance_length=1 + accepted / with_drafts if with_drafts else None,
            tokens_per_pass=_ratio(emitted, self._rounds),
            alpha=_ratio(self._overlap, self._overlaps),
            drift=_ratio(self._drift, self._drifts),
            draft_seconds=self._draft_seconds,
            target_seconds=self._target_seconds,
            overhead_seconds=self._overhead_seconds,
            decode_seconds=decode_seconds,
            tokens_per_second=_ratio(emitted, decode_seconds),
        )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def summarize(rounds: Iterable[Round]) -> Figures:
    """The figures of any rounds: of one reply, of a session, of a domain."""
    tally = Tally()
    for round_ in rounds:
        tally.add(round_)
    return tally.figures()


def round_domain(round_: Round) -> str:
    """The domain a round belongs to: that of its first token."""
    return round_.tokens[0].domain if round_.tokens else "other"


def by_domain(rounds: Iterable[Round]) -> dict[str, Figures]:
    """Figures for each domain that occurs, in the order of ``records.DOMAINS``.

    A round belongs to one domain whole, that of its first token, so that the domains' rounds, tokens and
    seconds add up to the reply's.
    """
    tallies: dict[str, Tally] = {}
    for round_ in rounds:
        tallies.setdefault(round_domain(round_), Tally()).add(round_)
    return {domain: tallies[domain].figures() for domain in DOMAINS if domain in tallies}


def expected_tokens(a: float | Sequence[float | None] | None, k: int) -> float | None:
    """Expected tokens per round with K = ``k`` drafts: E(K) = 1 + sum over i of a_1 · … · a_i.

    ``a`` is one acceptance probability for all positions (alpha) or ``conditional_acceptance``. None where a
    position that matters was never measured. Raises ValueError for a negative ``k``.
    """
    if k < 0:
        raise ValueError(f"K must be 0 or more, not {k}.")
    expected = reach = 1.0
    for i in range(k):
        if a is None or isinstance(a, (int, float)):
            acceptance = a
        else:
            acceptance = a[i] if i < len(a) else None
        if acceptance is None:
            return None
        reach *= acceptance
        expected += reach
        if reach == 0:  # later positions are never reached, so it does not matter that nobody measured them
            break
    return expected


def predicted_speedup(
    expected: float | None,
    *,
    plain_seconds: float | None,
    draft_seconds: float | None,
    target_seconds: float | None,
    overhead_seconds: float | None,
) -> float | None:
    """E(K) · t_plain / (d(K) + v(K+1) + o), all in seconds measured on one machine.

    ``plain_seconds``: a round of plain decoding; ``draft_seconds``: drafting K tokens; ``target_seconds``: a
    target pass over K + 1 rows; ``overhead_seconds``: the rest of a round. Assumes that acceptances are
    independent, which over-predicts on real text: show ``measured_speedup`` beside it. None where a figure is
    missing or no time passed.
    """
    parts = (draft_seconds, target_seconds, overhead_seconds)
    if expected is None or plain_seconds is None or any(part is None for part in parts):
        return None
    return _ratio(expected * plain_seconds, sum(parts))


def measured_speedup(speculative: Figures, plain: Figures) -> float | None:
    """Tokens per second of one reply over those of a plain one, prefill in neither; None if unknown."""
    if speculative.tokens_per_second is None or plain.tokens_per_second is None:
        return None
    return _ratio(speculative.tokens_per_second, plain.tokens_per_second)
