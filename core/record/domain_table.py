"""How a pair fares on code, prose, maths, structured text and the rest, from all replies on record.

What is compared was made alike: a ``Combination`` holds fixed the pair (both models by name and fingerprint,
what they were quantised to, their dtypes and the device), the drafter with the width of its trees, K as it
was set (chosen automatically up to a number is apart from fixed at it), the temperature, and the verifier
with its threshold and its exactness. Everything else is pooled: the filters (top-k, top-p, min-p, repetition
penalty; ``Choice.filter_settings`` says how many settings of them there are), stop strings, the length limit,
system prompts, and whether a domain was detected or picked.

Rules:

- A round belongs to one domain whole, that of its first token, as in ``core.figures.metrics.by_domain``: the
  figures here are the ones it gives for the same rounds.
- Every round on record counts, also of a reply that was stopped, failed, was interrupted or is still being
  written: what a draft was worth in a round does not depend on how the reply ended.
- A figure is a ratio of sums over all rounds, so long replies weigh more. Its interval comes from resampling
  whole replies (``core.figures.intervals``); it is None where fewer than two replies have what the figure
  needs.
- Plain speed, to compare with, is that of the same target on the same device at the same temperature with
  K = 0, on any text that was recorded so: not only of repetitions of the same prompts.

Reads with SQL aggregates in one pass over a combination's tokens; no token becomes a Python object. Knows the
columns of the database, nothing of the page.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from core.figures.intervals import Interval, quotient_interval, ratio_interval
from core.records import DOMAINS, DRAFTED, Fate

ALL = "all"  # the domain of the row over all domains

# Each compared figure, as core.figures.metrics names it, is the first sum over the second.
MEASURES = {
    "draft_acceptance_rate": ("accepted", "drafted"),
    "alpha": ("overlap", "overlaps"),
    "tokens_per_pass": ("emitted", "rounds"),
    "tokens_per_second": ("emitted", "decode_seconds"),
}


@dataclass(frozen=True, slots=True)
class Combination:
    """What is held fixed in one comparison. Fields are columns of ``replies``, with their meaning there."""

    pair: str
    target: str
    draft: str
    target_fingerprint: str
    draft_fingerprint: str
    quantization: str
    draft_quantization: str
    dtype: str
    draft_dtype: str
    device: str
    drafter: str
    tree_width: int
    num_draft_tokens: int
    auto_draft_tokens: bool
    temperature: float
    exact: bool
    verifier: str
    acceptance_threshold: float | None  # of a rule that takes one


COMBINATION_NAMES = tuple(f.name for f in fields(Combination))
PAIR_NAMES = COMBINATION_NAMES[: COMBINATION_NAMES.index("drafter")]
_OF_THE_TARGET = ("target", "target_fingerprint", "quantization", "dtype", "device", "temperature")


@dataclass(frozen=True, slots=True)
class Choice:
    """A combination that is on record: how many replies it has, and how many of these drafted anything."""

    combination: Combination
    replies: int
    drafted_replies: int
    filter_settings: int  # different settings of the filters that are pooled in it
    newest: str  # when its newest reply began, ISO 8601 in UTC


@dataclass(frozen=True, slots=True)
class Sums:
    """What is counted and measured over some rounds; ``overlap`` sums over ``overlaps`` tested tokens."""

    rounds: int = 0
    rounds_with_drafts: int = 0
    accepted: int = 0
    rejected: int = 0
    discarded: int = 0
    resampled: int = 0
    bonus: int = 0
    plain: int = 0
    overlaps: int = 0
    overlap: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    overhead_seconds: float = 0.0

    @property
    def drafted(self) -> int:
        return self.accepted + self.rejected + self.discarded

    @property
    def tested(self) -> int:
        return self.accepted + self.rejected

    @property
    def emitted(self) -> int:
        return self.accepted + self.resampled + self.bonus + self.plain

    @property
    def decode_seconds(self) -> float:
        return self.draft_seconds + self.target_seconds + self.overhead_seconds

    def measure(self, name: str) -> float | None:
        """One of ``MEASURES``; None where it is undefined."""
        part, whole = (getattr(self, of) for of in MEASURES[name])
        return part / whole if whole else None


SUM_NAMES = tuple(f.name for f in fields(Sums))


def total(sums: Iterable[Sums]) -> Sums:
    """All of them together."""
    rows = [[getattr(one, name) for name in SUM_NAMES] for one in sums]
    return Sums(*(sum(column) for column in zip(*rows, strict=True)))


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its 95% interval, either None where it is undefined.

    ``replies`` counts those that the figure is defined for; of a quotient, on the side that has fewer.
    """

    value: float | None
    interval: Interval | None
    replies: int


@dataclass(frozen=True, slots=True)
class DomainRow:
    """One domain, or ``ALL`` of them. ``replies`` has the sums of each reply in which the domain occurs.

    ``plain_speed`` is the target's tokens per second with K = 0, over ``plain_replies`` replies, and
    ``speedup`` the ratio of the two speeds. Both are undefined where the combination is itself plain.
    """

    domain: str
    sums: Sums
    replies: tuple[Sums, ...] = field(repr=False)
    measures: Mapping[str, Estimate]
    plain_replies: int
    plain_speed: Estimate
    speedup: Estimate


@dataclass(frozen=True, slots=True)
class DomainTable:
    """A row for each domain that occurs, in the order of ``records.DOMAINS``, and one for all; none is empty.

    ``whole`` is None where nothing is on record.
    """

    combination: Combination
    rows: tuple[DomainRow, ...]
    whole: DomainRow | None


# --- Which combinations there are ---------------------------------------------------------------------------


def choices(connection: sqlite3.Connection, session_id: str | None = None) -> tuple[Choice, ...]:
    """Every combination of which a round is on record, newest first; only one conversation's if given.

    ``connection`` is one of ``core.record.stored.reading``. Raises ``sqlite3.Error``.
    """
    names = ", ".join(COMBINATION_NAMES)
    drafted = ", ".join(f"'{fate}'" for fate in sorted(DRAFTED))
    rows = connection.execute(
        f"""
        SELECT {names}, COUNT(*), SUM(drafts),
            COUNT(DISTINCT top_k || ' ' || top_p || ' ' || min_p || ' ' || repetition_penalty),
            MAX(created) AS newest
        FROM (
            SELECT *, rowid AS entry, num_draft_tokens > 0 AND EXISTS (
                SELECT 1 FROM rounds JOIN tokens ON round_id = rounds.id
                WHERE reply_id = replies.id AND fate IN ({drafted})
            ) AS drafts
            FROM replies
            WHERE (:session IS NULL OR conversation_id = :session)
                AND EXISTS (SELECT 1 FROM rounds WHERE reply_id = replies.id)
        )
        GROUP BY {names} ORDER BY newest DESC, MAX(entry) DESC
        """,
        {"session": session_id},
    )
    size = len(COMBINATION_NAMES)
    return tuple(Choice(_combination(row[:size]), *row[size:]) for row in map(tuple, rows))


def default_choice(found: Sequence[Choice]) -> Choice | None:
    """The one with most replies that drafted, the newest of equals; None where there is none."""
    return max(found, key=lambda choice: choice.drafted_replies, default=None)


def _combination(values: Sequence) -> Combination:
    named = dict(zip(COMBINATION_NAMES, values, strict=True))
    return Combination(**{**named, **{name: bool(named[name]) for name in ("auto_draft_tokens", "exact")}})


# --- The comparison -----------------------------------------------------------------------------------------


def domain_table(
    connection: sqlite3.Connection, combination: Combination, session_id: str | None = None
) -> DomainTable:
    """The comparison of all replies of this combination; only of one conversation if one is given.

    ``connection`` is one of ``core.record.stored.reading``. Raises ``sqlite3.Error``.
    """
    fixed = {name: getattr(combination, name) for name in COMBINATION_NAMES}
    by_domain = _by_domain(_sums(connection, fixed, session_id))
    plain: dict[str, list[Sums]] = {}
    if combination.num_draft_tokens > 0:
        alike = {name: getattr(combination, name) for name in _OF_THE_TARGET}
        plain = _by_domain(_sums(connection, {**alike, "num_draft_tokens": 0}, session_id))
    rows = {domain: _row(domain, of, plain.get(domain, [])) for domain, of in by_domain.items()}
    return DomainTable(
        combination, tuple(rows[domain] for domain in DOMAINS if domain in rows), rows.get(ALL)
    )


def _sums(
    connection: sqlite3.Connection, fixed: Mapping[str, object], session_id: str | None
) -> list[tuple[str, str, Sums]]:
    """(reply, domain, sums) of the replies that have these values in these columns of ``replies``."""
    like = " AND ".join(f"{name} IS :{name}" for name in fixed)  # IS, for what is NULL too
    fates = ", ".join(f"COUNT(*) FILTER (WHERE fate = '{fate}') AS {fate}" for fate in Fate)
    drafted = " + ".join(sorted(DRAFTED))
    tested = f"fate IN ('{Fate.ACCEPTED}', '{Fate.REJECTED}')"
    added = ", ".join(f"SUM({name}) AS {name}" for name in SUM_NAMES[2:])
    rows = connection.execute(
        f"""
        WITH counted AS (
            SELECT rounds.id AS round_id, reply_id, draft_seconds, target_seconds, overhead_seconds, {fates},
                TOTAL(overlap) FILTER (WHERE {tested}) AS overlap,
                COUNT(overlap) FILTER (WHERE {tested}) AS overlaps,
                COALESCE(
                    (SELECT domain FROM tokens AS t WHERE t.round_id = rounds.id ORDER BY "index" LIMIT 1),
                    'other'
                ) AS domain
            FROM rounds LEFT JOIN tokens ON tokens.round_id = rounds.id
            WHERE reply_id IN (
                SELECT id FROM replies WHERE {like} AND (:session IS NULL OR conversation_id = :session)
            )
            GROUP BY rounds.id
        )
        SELECT reply_id, domain, COUNT(*) AS rounds, SUM({drafted} > 0) AS rounds_with_drafts, {added}
        FROM counted GROUP BY reply_id, domain ORDER BY MIN(round_id)
        """,
        {**fixed, "session": session_id},
    )
    return [(row[0], row[1], Sums(*tuple(row)[2:])) for row in rows]


def _by_domain(sums: Iterable[tuple[str, str, Sums]]) -> dict[str, list[Sums]]:
    """The replies' sums for each domain, and under ``ALL`` those of whole replies."""
    found: dict[str, list[Sums]] = {}
    whole: dict[str, list[Sums]] = {}
    for reply_id, domain, of in sums:
        found.setdefault(domain, []).append(of)
        whole.setdefault(reply_id, []).append(of)
    if whole:
        found[ALL] = [total(parts) for parts in whole.values()]
    return found


def _row(domain: str, replies: Sequence[Sums], plain: Sequence[Sums]) -> DomainRow:
    measures = {name: estimate(parts, replies) for name, parts in MEASURES.items()}
    plain_speed = estimate(MEASURES["tokens_per_second"], plain)
    return DomainRow(
        domain=domain,
        sums=total(replies),
        replies=tuple(replies),
        measures=measures,
        plain_replies=len(plain),
        plain_speed=plain_speed,
        speedup=_speedup(measures["tokens_per_second"], plain_speed, replies, plain),
    )


def estimate(parts: tuple[str, str], replies: Sequence[Sums]) -> Estimate:
    """The first of two sums over the second, and its interval from resampling ``replies``."""
    above, below = columns(parts, replies)
    value = sum(above) / sum(below) if sum(below) else None
    return Estimate(value, ratio_interval(above, below), sum(whole > 0 for whole in below))


def _speedup(speed: Estimate, plain: Estimate, replies: Sequence[Sums], others: Sequence[Sums]) -> Estimate:
    fewer = min(speed.replies, plain.replies)
    if speed.value is None or not plain.value:
        return Estimate(None, None, fewer)
    interval = quotient_interval(*(columns(MEASURES["tokens_per_second"], of) for of in (replies, others)))
    return Estimate(speed.value / plain.value, interval, fewer)


def columns(parts: tuple[str, str], replies: Sequence[Sums]) -> tuple[list[float], list[float]]:
    """Two sums of each reply."""
    above, below = parts
    return [getattr(of, above) for of in replies], [getattr(of, below) for of in replies]
