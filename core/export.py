"""The record as CSV: sessions, replies, rounds, tokens, or domains compared.

    python -m core.export --what WHAT --out FILE [--session ID] [--db FILE]
        [--delimiter comma|semicolon|tab] [--decimal point|comma]

WHAT is sessions, replies, rounds, tokens, domains or comparisons.

Knows the store and the metrics. Every figure is computed anew from the rounds on record, so that a reply
without an end has its figures too, and the identities of ``core.figures.metrics`` hold in every row that has
counts.

The format: UTF-8 with one byte order mark, so that Excel sees that it is UTF-8 (``encoding="utf-8-sig"``
reads it elsewhere); RFC 4180, that is commas, CRLF, and double quotes where a cell needs them; a header
always; undefined figures empty; numbers as numbers with a decimal point, yes and no as 1 and 0, lists as JSON
text. Where spreadsheets write 0,5 (Germany, France, Brazil, ...) ask for ``--delimiter semicolon --decimal
comma``; pandas then reads it with ``sep=";", decimal=","``.

**Text that a spreadsheet would take for a formula, a number or a date** gets one apostrophe in front
(``core.record.cells``): text that begins with ``=``, ``+``, ``-`` or ``@`` (or their full-width forms), also
behind white space and quotation marks, or with a tab or a line break, also behind quotation marks; and short
text like ``1/2``, ``MAR1``, ``00123``, ``1E5``, ``True`` or ``#N/A``. Numbers are never touched.
``core.record.cells.original`` gives the text back. The database keeps the raw text.

What a row is:

- ``sessions``: the column ``row`` says. ``session``: one for each conversation in which something was said,
  over all its replies; ``reply``: one for each reply; ``domain``: one for each domain that occurs in a reply.
  To add up or average, keep one kind of row: the others repeat the same tokens. Settings stand in reply and
  domain rows; what is measured once a reply (prefill, time to first token, ...) in reply rows only.
- ``replies``: one a reply, with its question and its visible text.
- ``rounds``: one a round, ``domain`` that of its first token.
- ``tokens``: one a token, drafted ones that were not kept included.
- ``domains``: one for each domain that occurs in each combination of pair, drafter, K, temperature and
  verifier on record, newest combination first (``core.record.domain_table`` has the rules). Where
  ``auto_draft_tokens`` is 1, K was chosen before each round, ``num_draft_tokens`` at most. ``replies`` counts
  those in which the domain occurs; ``*_low`` and ``*_high`` bound the 95% interval from resampling them,
  empty where there is none. ``plain_tokens_per_second`` is the target's own speed with K = 0, where that is
  on record too.
- ``comparisons``: one for each drafter and domain of each comparison on record (``core.record.compared``),
  newest first; ``speedup`` is over plain decoding on the same prompts.

``session_id``, ``reply_id``, ``round_index`` and ``index`` join the first four. A ``finish_reason`` of
``interrupted`` says that no end is on record: the process was killed, or the reply is still being written.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import sqlite3
import sys
import uuid
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from core.figures.metrics import FIGURE_NAMES, Tally, by_domain, round_domain
from core.record import compared, deletion
from core.record.cells import DECIMALS, DELIMITERS, Form
from core.record.domain_table import (
    COMBINATION_NAMES,
    MEASURES,
    SUM_NAMES,
    Choice,
    DomainRow,
    Estimate,
    choices,
    domain_table,
)
from core.record.store import Store, default_path
from core.record.stored import StoredReply, StoreError, read_rounds, reading, reply_from_row, unpack_top
from core.records import Fate, PairInfo, Round, Settings, Token
from core.text.detokenise import clean_text
from core.text.terminal import printable, put_out, use_utf8

Row = dict[str, object]

_MADE_WITH = (
    "domain_choice",
    *(f.name for f in fields(Settings)),
    "exact",
    *(f.name for f in fields(PairInfo)),
)
_ORIGIN = ("session_id", "reply_id", "kind", "answers_reply_id")
_ONCE = (
    "prompt_tokens",
    "reused_tokens",
    "prefill_seconds",
    "ttft_seconds",
    "seconds",
    "finish_reason",
    "error",
)
_ROUND = tuple(f.name for f in fields(Round) if f.name not in ("index", "tokens"))
_TOKEN = tuple(f.name for f in fields(Token))
_COUNTS = ("drafted", *(fate.value for fate in Fate), "emitted")
_SUMS = tuple(name for name in SUM_NAMES if name not in ("overlap", "overlaps"))
_SUMS_OF_SUMS = ("drafted", "tested", "emitted", "decode_seconds")
_COMPARED = (*MEASURES, "plain_tokens_per_second", "measured_speedup")

COLUMNS: dict[str, tuple[str, ...]] = {
    "sessions": (
        "row", *_ORIGIN, "domain", "created", "replies", *FIGURE_NAMES, *_ONCE, *_MADE_WITH,
    ),
    "replies": (
        *_ORIGIN, "created", "system_prompt", "question", "visible_text", *FIGURE_NAMES, *_ONCE, *_MADE_WITH,
    ),
    "rounds": ("session_id", "reply_id", "round_index", "domain", *_COUNTS, *_ROUND),
    "tokens": ("session_id", "reply_id", "round_index", *_TOKEN),
    "domains": (
        *COMBINATION_NAMES, "filter_settings", "domain", "replies", *_SUMS, *_SUMS_OF_SUMS, "plain_replies",
        *(name + end for name in _COMPARED for end in ("", "_low", "_high")),
    ),
    "comparisons": compared.FLAT_NAMES,
}  # fmt: skip


class ExportError(Exception):
    """An export that cannot be made; the message is one sentence."""


# --- Rows --------------------------------------------------------------------------------------------------


def _replies(connection: sqlite3.Connection, session_id: str | None) -> Iterator[sqlite3.Row]:
    return connection.execute(
        """
        SELECT replies.*, conversations.id AS session_id, replies.id AS reply_id, question.content AS question
        FROM replies
        JOIN conversations ON conversations.id = replies.conversation_id
        JOIN messages AS answer ON answer.id = replies.message_id
        LEFT JOIN messages AS question ON question.id = answer.parent_id
        WHERE :session IS NULL OR conversations.id = :session
        ORDER BY conversations.created, conversations.rowid, answer.number, replies.number
        """,
        {"session": session_id},
    )


def _described(reply: sqlite3.Row) -> Row:
    """What a row says of where its reply comes from and how it was made."""
    row: Row = {name: reply[name] for name in (*_ORIGIN, "created", *_MADE_WITH)}
    if row["stop"] == "[]":
        row["stop"] = None
    return row


def _once(reply: StoredReply) -> Row:
    return {name: getattr(reply, name) for name in _ONCE}


def _reply_rows(connection: sqlite3.Connection, session_id: str | None) -> Iterator[Row]:
    for reply in _replies(connection, session_id):
        stored = reply_from_row(reply, tuple(read_rounds(connection, reply["reply_id"])))
        yield {
            **_described(reply),
            "system_prompt": reply["system_prompt"],
            "question": reply["question"],
            "visible_text": stored.visible_text,
            **stored.figures.as_row(),
            **_once(stored),
        }


def _session_rows(connection: sqlite3.Connection, session_id: str | None) -> Iterator[Row]:
    """Each session's own row, then its replies', each followed by its domains'. Holds one session's rows."""
    sessions = connection.execute(
        """
        SELECT id, created FROM conversations AS c
        WHERE (:session IS NULL OR id = :session)
            AND EXISTS (SELECT 1 FROM messages WHERE conversation_id = c.id)
        ORDER BY created, rowid
        """,
        {"session": session_id},
    )
    for session in sessions:
        whole, rows, replies = Tally(), [], 0
        for reply in _replies(connection, session["id"]):
            replies += 1
            stored = reply_from_row(reply, tuple(read_rounds(connection, reply["reply_id"])))
            described = _described(reply)
            rows.append({"row": "reply", **described, **stored.figures.as_row(), **_once(stored)})
            for domain, figures in by_domain(stored.rounds).items():
                rows.append({"row": "domain", **described, "domain": domain, **figures.as_row()})
            for round_ in stored.rounds:
                whole.add(round_)
        yield {
            "row": "session",
            "session_id": session["id"],
            "created": session["created"],
            "replies": replies,
            **whole.figures().as_row(),
        }
        yield from rows


def _round_rows(connection: sqlite3.Connection, session_id: str | None) -> Iterator[Row]:
    for reply in _replies(connection, session_id):
        for round_ in read_rounds(connection, reply["reply_id"]):
            yield {
                "session_id": reply["session_id"],
                "reply_id": reply["reply_id"],
                "round_index": round_.index,
                "domain": round_domain(round_),
                "drafted": round_.drafted,
                **{fate.value: round_.count(fate) for fate in Fate},
                "emitted": round_.emitted,
                **{name: getattr(round_, name) for name in _ROUND},
            }


def _token_rows(connection: sqlite3.Connection, session_id: str | None) -> Iterator[Row]:
    # Straight from the table: no figure is computed, and there are many rows.
    columns = ", ".join(f'tokens."{name}"' for name in _TOKEN)
    for reply in _replies(connection, session_id):
        tokens = connection.execute(
            f'SELECT rounds."index", {columns} FROM rounds JOIN tokens ON round_id = rounds.id '
            'WHERE reply_id = ? ORDER BY rounds."index", tokens."index"',
            [reply["reply_id"]],
        )
        for token in tokens:
            row = dict(zip(("round_index", *_TOKEN), token, strict=True))
            row.update(session_id=reply["session_id"], reply_id=reply["reply_id"])
            row.update(top_p=unpack_top(row["top_p"]), top_q=unpack_top(row["top_q"]))
            yield row


def _domain_rows(connection: sqlite3.Connection, session_id: str | None) -> Iterator[Row]:
    for choice in choices(connection, session_id):
        for row in domain_table(connection, choice.combination, session_id).rows:
            yield _domain_row(choice, row)


def _domain_row(choice: Choice, row: DomainRow) -> Row:
    cells: Row = {name: getattr(choice.combination, name) for name in COMBINATION_NAMES}
    cells.update((name, int(cells[name])) for name in ("auto_draft_tokens", "exact"))
    cells.update(filter_settings=choice.filter_settings, domain=row.domain, replies=len(row.replies))
    cells.update((name, getattr(row.sums, name)) for name in (*_SUMS, *_SUMS_OF_SUMS))
    cells["plain_replies"] = row.plain_replies
    compared: dict[str, Estimate] = {
        **row.measures,
        "plain_tokens_per_second": row.plain_speed,
        "measured_speedup": row.speedup,
    }
    for name, estimate in compared.items():
        cells[name] = estimate.value
        cells[f"{name}_low"], cells[f"{name}_high"] = estimate.interval or (None, None)
    return cells


def _comparison_rows(connection: sqlite3.Connection, session_id: str | None) -> Iterator[Row]:
    """All of them: no session has any."""
    for comparison in compared.read(connection) if session_id is None else ():
        yield from compared.flat(comparison)


_ROWS = {
    "sessions": _session_rows,
    "replies": _reply_rows,
    "rounds": _round_rows,
    "tokens": _token_rows,
    "domains": _domain_rows,
    "comparisons": _comparison_rows,
}


# --- Files -------------------------------------------------------------------------------------------------


def write_csv(
    source: Store | str | os.PathLike,
    what: str,
    out: str | os.PathLike,
    conversation_id: str | None = None,
    *,
    delimiter: str = "comma",
    decimal: str = "point",
) -> int:
    """Writes one of ``COLUMNS`` to the file ``out``, all of it or nothing, and returns the number of rows.

    ``source`` is a store or a database's path; ``delimiter`` and ``decimal`` are those of
    ``core.record.cells``. Rows go to the file as they are read, from one consistent state of the database. An
    existing file is replaced; what is no file, as a pipe, is written into. Raises ExportError with one
    sentence.
    """
    if what not in COLUMNS:
        raise ExportError(f"What to export is one of {', '.join(COLUMNS)}, not {what!r}.")
    try:
        form = Form(delimiter, decimal)
    except ValueError as error:
        raise ExportError(str(error)) from error
    out, path = Path(out), source.path if isinstance(source, Store) else Path(source)
    try:
        if out.resolve() in deletion.files(path.resolve()):
            raise ExportError(f"{out} belongs to the database: name another file.")
        with reading(path) as connection:
            if conversation_id is not None:
                found = connection.execute("SELECT 1 FROM conversations WHERE id = ?", [conversation_id])
                if found.fetchone() is None:
                    raise ExportError(f"There is no session {conversation_id} in {path}.")
            rows = _ROWS[what](connection, conversation_id)
            return _write(out, COLUMNS[what], rows, form)
    except StoreError as error:
        raise ExportError(str(error)) from error
    except sqlite3.Error as error:
        raise ExportError(f"The database {path} cannot be read to its end: {error}.") from error
    except OSError as error:
        raise ExportError(f"{out} cannot be written: {(error.strerror or str(error)).lower()}.") from error


def _write(out: Path, columns: tuple[str, ...], rows: Iterator[Row], form: Form) -> int:
    if out.is_dir():
        raise ExportError(f"{out} is a folder: name a file in it.")
    if out.exists() and not out.is_file():  # a pipe or a device: its place must not be taken
        return _write_rows(out, columns, rows, form)
    # Beside the goal, so that taking its place at the end is one step on one file system.
    out = out.resolve()
    part = out.with_name(f".redline-{uuid.uuid4().hex}.part")
    try:
        written = _write_rows(part, columns, rows, form)
        os.replace(part, out)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    return written


def _write_rows(path: Path, columns: tuple[str, ...], rows: Iterator[Row], form: Form) -> int:
    written = 0
    with open(path, "w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file, delimiter=DELIMITERS[form.delimiter], lineterminator="\r\n")
        writer.writerow(columns)
        for written, row in enumerate(rows, 1):  # noqa: B007 - the count is what is returned
            writer.writerow([form.cell(row.get(column)) for column in columns])
    return written


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status, 2 where nothing could be exported."""
    parser = argparse.ArgumentParser(prog="python -m core.export", description="Write the record as CSV.")
    parser.add_argument("--what", required=True, choices=tuple(COLUMNS))
    parser.add_argument("--out", required=True, metavar="FILE")
    parser.add_argument("--session", metavar="ID", help="only this conversation")
    parser.add_argument(
        "--delimiter", choices=tuple(DELIMITERS), default="comma", help="between cells (default: %(default)s)"
    )
    parser.add_argument(
        "--decimal", choices=tuple(DECIMALS), default="point", help="in numbers (default: %(default)s)"
    )
    parser.add_argument("--db", metavar="FILE", default=default_path(), help="default: %(default)s")
    given = parser.parse_args(arguments)
    use_utf8()
    try:
        session = given.session and clean_text(given.session)
        written = write_csv(
            given.db, given.what, given.out, session, delimiter=given.delimiter, decimal=given.decimal
        )
    except ExportError as error:
        print(printable(str(error)), file=sys.stderr)
        return 2
    return put_out(f"{written} rows written to {given.out}.")


if __name__ == "__main__":
    sys.exit(main())
