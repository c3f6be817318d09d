"""What a comparison of drafters measured, what its figures come to, and how it is kept in the database.

A ``Comparison`` is one run: the same prompts, the same target, the same settings, several drafters that took
turns. Of every reply the counts and seconds of its rounds are kept; all figures are made from those, with 95%
intervals from resampling prompts. Knows records and SQL; runs nothing (``core.compare`` does).
"""

from __future__ import annotations

import json
import sqlite3
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timezone

from core.figures.intervals import paired_interval
from core.record.domain_table import SUM_NAMES, Estimate, Sums, columns, estimate
from core.records import Round, Settings, writes_exactly

PLAIN = "plain"
DOMAINS = ("code", "prose")
# Each figure is the first sum over the second.
MEASURES = {
    "alpha": ("overlap", "overlaps"),
    "draft_acceptance_rate": ("accepted", "drafted"),
    "tokens_per_pass": ("emitted", "rounds"),
    "seconds_per_round": ("draft_seconds", "rounds_with_drafts"),
    "seconds_per_draft": ("draft_seconds", "drafted"),
    "tokens_per_second": ("emitted", "decode_seconds"),
}
SPEEDUP = "speedup"


@dataclass(frozen=True, slots=True)
class Compared:
    """One reply of a comparison. ``draft`` is what drafted, as ``PairInfo`` names it; "" of a plain reply."""

    drafter: str
    draft: str
    domain: str
    prompt_id: str
    sums: Sums


@dataclass(frozen=True, slots=True)
class Comparison:
    """``settings`` are those of the replies that drafted; ``prompts`` how many were to be answered by each.

    ``complete`` is False where it was cancelled: it then has what was measured by then.
    """

    id: str
    created: str
    pair: str
    target: str
    settings: Settings
    prompts: int
    complete: bool
    replies: tuple[Compared, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """A drafter in a domain: the figures of ``MEASURES``, and ``speedup`` over plain on the same prompts."""

    drafter: str
    draft: str
    domain: str
    replies: int
    figures: dict[str, Estimate]


def new_comparison(pair: str, target: str, settings: Settings, prompts: int) -> Comparison:
    """One in which nothing was measured yet."""
    created = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    return Comparison(uuid.uuid4().hex, created, pair, target, settings, prompts, False, ())


def sums_of(rounds: Iterable[Round]) -> Sums:
    """The counts and seconds of a reply's rounds."""
    found = dict.fromkeys(SUM_NAMES, 0)
    for round_ in rounds:
        found["rounds"] += 1
        found["rounds_with_drafts"] += round_.drafted > 0
        for name in ("draft_seconds", "target_seconds", "overhead_seconds"):
            found[name] += getattr(round_, name)
        for token in round_.tokens:
            found[token.fate.value] += 1
            if token.overlap is not None:
                found["overlap"] += token.overlap
                found["overlaps"] += 1
    return Sums(**found)


def table(comparison: Comparison) -> list[Row]:
    """A row for each drafter and domain, in the order measured; plain's speed-up is undefined."""
    of: dict[tuple[str, str], list[Compared]] = {}
    for reply in comparison.replies:
        of.setdefault((reply.drafter, reply.domain), []).append(reply)
    rows = []
    for (drafter, domain), replies in of.items():
        sums = [reply.sums for reply in replies]
        figures = {name: estimate(parts, sums) for name, parts in MEASURES.items()}
        figures[SPEEDUP] = _speedup(replies, of.get((PLAIN, domain), []), drafter)
        rows.append(Row(drafter, replies[0].draft, domain, len(replies), figures))
    return rows


def _speedup(replies: Sequence[Compared], plain: Sequence[Compared], drafter: str) -> Estimate:
    """Over the prompts that both answered, drawn together."""
    both = {reply.prompt_id: reply for reply in plain}
    pairs = [(reply.sums, both[reply.prompt_id].sums) for reply in replies if reply.prompt_id in both]
    if drafter == PLAIN or not pairs:
        return Estimate(None, None, 0)
    parts = [columns(MEASURES["tokens_per_second"], side) for side in zip(*pairs, strict=True)]
    speeds = [sum(above) / sum(below) if sum(below) else 0 for above, below in parts]
    value = speeds[0] / speeds[1] if speeds[1] else None
    return Estimate(value, paired_interval(*parts), len(pairs))


# --- In the database ---------------------------------------------------------------------------------------

_REPLY_NAMES = ("drafter", "draft", "domain", "prompt_id", *SUM_NAMES)


def write(connection: sqlite3.Connection, comparison: Comparison) -> None:
    """Enters the comparison, or what was added to it since."""
    settings = json.dumps(asdict(comparison.settings))
    connection.execute(
        "INSERT INTO comparisons (id, created, pair, target, settings, exact, prompts, complete) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET complete = excluded.complete",
        [
            *(comparison.id, comparison.created, comparison.pair, comparison.target, settings),
            *(comparison.settings.exact, comparison.prompts, comparison.complete),
        ],
    )
    names = ", ".join(f'"{name}"' for name in _REPLY_NAMES)
    places = ", ".join("?" * (2 + len(_REPLY_NAMES)))
    connection.executemany(
        f"INSERT OR IGNORE INTO compared_replies (comparison_id, number, {names}) VALUES ({places})",
        [
            [comparison.id, number, r.drafter, r.draft, r.domain, r.prompt_id]
            + [getattr(r.sums, name) for name in SUM_NAMES]
            for number, r in enumerate(comparison.replies)
        ],
    )


def delete(connection: sqlite3.Connection, comparison_id: str) -> None:
    connection.execute("DELETE FROM compared_replies WHERE comparison_id = ?", [comparison_id])
    connection.execute("DELETE FROM comparisons WHERE id = ?", [comparison_id])


def read(connection: sqlite3.Connection, limit: int | None = None) -> list[Comparison]:
    """The comparisons on record, newest first."""
    found = []
    query = "SELECT * FROM comparisons ORDER BY created DESC, rowid DESC LIMIT ?"
    for row in connection.execute(query, [-1 if limit is None else limit]).fetchall():
        settings = json.loads(row["settings"])
        settings["stop"] = tuple(settings["stop"])
        replies = connection.execute(
            "SELECT * FROM compared_replies WHERE comparison_id = ? ORDER BY number", [row["id"]]
        )
        found.append(
            Comparison(
                id=row["id"],
                created=row["created"],
                pair=row["pair"],
                target=row["target"],
                settings=Settings(**settings),
                prompts=row["prompts"],
                complete=bool(row["complete"]),
                replies=tuple(
                    Compared(
                        *(r[name] for name in ("drafter", "draft", "domain", "prompt_id")),
                        Sums(*(r[name] for name in SUM_NAMES)),
                    )
                    for r in replies
                ),
            )
        )
    return found


def flat(comparison: Comparison) -> list[dict[str, object]]:
    """Its table as rows of plain values, for CSV and JSON: figures with ``_low`` and ``_high``."""
    settings = comparison.settings
    rows = []
    for row in table(comparison):
        values: dict[str, object] = dict(
            comparison_id=comparison.id,
            created=comparison.created,
            pair=comparison.pair,
            target=comparison.target,
            drafter=row.drafter,
            draft=row.draft,
            domain=row.domain,
            replies=row.replies,
            complete=int(comparison.complete),
            exact=int(writes_exactly(settings, row.drafter)),
        )
        for field in fields(Settings):
            values[field.name] = getattr(settings, field.name)
        for name, figure in row.figures.items():
            low, high = figure.interval or (None, None)
            values |= {name: figure.value, f"{name}_low": low, f"{name}_high": high}
        rows.append(values)
    return rows


FLAT_NAMES = (
    *("comparison_id", "created", "pair", "target", "drafter", "draft", "domain", "replies", "complete"),
    "exact",
    *(field.name for field in fields(Settings)),
    *(name + end for name in (*MEASURES, SPEEDUP) for end in ("", "_low", "_high")),
)


def with_replies(comparison: Comparison, replies: Sequence[Compared], complete: bool) -> Comparison:
    """The comparison with what was measured."""
    return replace(comparison, replies=tuple(replies), complete=complete)
