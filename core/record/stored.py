"""What the record holds, read back: conversations, messages and replies with their rounds, exactly as they
were.

Knows the columns of the database and the forms its values have there, nothing of writing
(``core.record.store``). Every reading has a connection of its own, from ``reading``, and sees one consistent
state of the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from sqlite_utils import Database

from core.figures.metrics import Figures, summarize
from core.record.migrations import is_newer, migrate
from core.records import Fate, PairInfo, Round, Settings, Token

KINDS = ("first", "regenerated", "plain")
INTERRUPTED = "interrupted"  # how a reply without an end on record reads

BUSY_SECONDS = 5.0  # how long a reader or writer waits for another program's lock


class StoreError(Exception):
    """The database cannot be used; the message is one sentence."""


# --- What is read back -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredReply:
    """A reply as it was stored; has every attribute of ``records.Reply``, and its rounds.

    Without an end on record ``finish_reason`` is ``interrupted``, the text is put together from the tokens,
    and times are None. ``kind`` is one of ``KINDS`` and ``answers_reply_id`` the reply that was answered
    again. ``opening`` is the part of the reply that the chat template had written already
    (``core.text.template``).
    """

    id: str
    kind: str
    answers_reply_id: str | None
    created: str
    system_prompt: str
    domain_choice: str
    settings: Settings
    pair: PairInfo
    opening: str
    prompt_tokens: int
    reused_tokens: int | None
    prefill_seconds: float | None
    ttft_seconds: float | None
    seconds: float | None
    finish_reason: str
    error: str | None
    text: str
    visible_chars: int
    tail: str
    rounds: tuple[Round, ...] = field(repr=False)

    @property
    def visible_text(self) -> str:
        return self.text[: self.visible_chars]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.id for round_ in self.rounds for token in round_.tokens if token.emitted)

    @property
    def num_rounds(self) -> int:
        return len(self.rounds)

    @property
    def figures(self) -> Figures:
        return summarize(self.rounds)


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message; an assistant's has its replies, oldest first, and the text of the one that is shown.

    Shown is the newest reply that is not a plain repetition (``kind`` ``plain``), or the newest if all are.
    """

    id: str
    parent_id: str | None
    role: str
    content: str
    created: str
    replies: tuple[StoredReply, ...] = ()

    @property
    def shown(self) -> StoredReply | None:
        return next((r for r in reversed(self.replies) if r.kind != "plain"), None) or (
            self.replies[-1] if self.replies else None
        )


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """A whole conversation, messages in order."""

    id: str
    created: str
    client: str | None
    system_prompt: str
    messages: tuple[StoredMessage, ...]


@dataclass(frozen=True, slots=True)
class ConversationSummary:
    """One line about a conversation: ``title`` is the beginning of its first message."""

    id: str
    created: str
    client: str | None
    title: str
    num_messages: int
    num_replies: int


# --- Values ------------------------------------------------------------------------------------------------


def pack_top(pairs: Iterable[tuple[int, float]]) -> bytes | None:
    """(id, probability) pairs as bytes: uint32 and float32 in turn, little-endian; None for no pairs."""
    flat = [value for pair in pairs for value in pair]
    return struct.pack("<" + "If" * (len(flat) // 2), *flat) if flat else None


def unpack_top(packed: bytes | None) -> tuple[tuple[int, float], ...]:
    """The pairs that ``pack_top`` packed; probabilities come back with float32's precision."""
    return tuple(struct.iter_unpack("<If", packed)) if packed else ()


PAIR_NAMES = tuple(f.name for f in fields(PairInfo))
SETTING_NAMES = tuple(f.name for f in fields(Settings))
ROUND_NAMES = tuple(f.name for f in fields(Round) if f.name != "tokens")
TOKEN_NAMES = tuple(f.name for f in fields(Token))
_SELECT_TOKENS = (
    "SELECT "
    + ", ".join(f'"{name}"' for name in TOKEN_NAMES)
    + ' FROM tokens WHERE round_id = ? ORDER BY "index"'
)


def _token_from_row(row: tuple) -> Token:
    """The token of a row that holds the columns ``TOKEN_NAMES``."""
    values = dict(zip(TOKEN_NAMES, row, strict=True))
    values["fate"] = Fate(values["fate"])
    values["top_p"] = unpack_top(values["top_p"])
    values["top_q"] = unpack_top(values["top_q"])
    values["monospaced"] = bool(values["monospaced"])
    return Token(**values)


# --- Reading -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def reading(path: str | os.PathLike) -> Iterator[sqlite3.Connection]:
    """A connection of its own that sees one consistent state of the file, whatever is written meanwhile.

    Raises StoreError with one sentence when there is no such file, when a later Redline made it, or when it
    cannot be read. A database of an earlier version is brought up to date first.
    """
    path = Path(path)
    if not path.is_file():
        raise StoreError(f"There is no database {path} yet.")
    try:
        connection = _open_for_reading(path)
    except sqlite3.Error as error:
        raise StoreError(why_unusable(path, error)) from error
    with contextlib.closing(connection):
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA query_only = ON")
        connection.execute("BEGIN")
        yield connection


def _open_for_reading(path: Path) -> sqlite3.Connection:
    # mode=rw rather than ro: SQLite reads a write-ahead log only where it may share it. In a folder where it
    # may not, a file without a log is read as one that nobody can change.
    modes = ["mode=rw"]
    log = path.with_name(path.name + "-wal")
    if not log.exists() or not log.stat().st_size:
        modes.append("mode=ro&immutable=1")
    for mode in modes:
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True, timeout=BUSY_SECONDS)
        try:
            db = Database(connection, execute_plugins=False)
            if is_newer(db):
                raise StoreError(newer_sentence(path))
            migrate(db)
            return connection
        except BaseException as error:
            connection.close()
            if mode == modes[-1] or not any(sign in str(error) for sign in ("readonly", "unable to open")):
                raise
    raise AssertionError("the last mode returns or raises")


def read_rounds(connection: sqlite3.Connection, reply_id: str) -> Iterator[Round]:
    """The rounds of a reply in order, each built when it is asked for."""
    tokens_of = connection.cursor()
    tokens_of.row_factory = None  # plain tuples: half the time of a long reply goes into its tokens
    for row in connection.execute('SELECT * FROM rounds WHERE reply_id = ? ORDER BY "index"', [reply_id]):
        tokens = tuple(map(_token_from_row, tokens_of.execute(_SELECT_TOKENS, [row["id"]])))
        yield Round(tokens=tokens, **{name: row[name] for name in ROUND_NAMES})


def reply_from_row(row: sqlite3.Row, rounds: tuple[Round, ...]) -> StoredReply:
    """The reply of a row of ``replies`` and its rounds; see StoredReply for one without an end on record."""
    settings = {name: row[name] for name in SETTING_NAMES}
    settings["stop"] = tuple(json.loads(settings["stop"]))
    settings["auto_draft_tokens"] = bool(settings["auto_draft_tokens"])
    text, visible_chars = row["text"], row["visible_chars"]
    finished = rounds[-1].finish_reason if rounds else None
    if text is None:  # no end on record
        text = "".join(token.text for round_ in rounds for token in round_.tokens if token.emitted)
        # Where the last round did end the reply, a stop string may stand behind what is to be shown.
        visible_chars = len("".join(round_.text for round_ in rounds)) if finished else len(text)
    names = {f.name for f in fields(StoredReply)} - {"rounds"}
    values = {name: row[name] for name in names if name in row.keys()}  # a Row iterates over values
    values.update(
        settings=Settings(**settings),
        pair=PairInfo(**{name: row[name] for name in PAIR_NAMES}),
        finish_reason=row["finish_reason"] or finished or INTERRUPTED,
        text=text,
        visible_chars=visible_chars,
        tail=row["tail"] or "",
        rounds=rounds,
    )
    return StoredReply(**values)


def conversation(connection: sqlite3.Connection, conversation_id: str) -> StoredConversation | None:
    """A conversation with all its replies, or None when there is none of that id."""
    row = connection.execute("SELECT * FROM conversations WHERE id = ?", [conversation_id]).fetchone()
    if row is None:
        return None
    replies: dict[str, list[StoredReply]] = {}
    for reply in connection.execute(
        "SELECT * FROM replies WHERE conversation_id = ? ORDER BY message_id, number", [conversation_id]
    ):
        rounds = tuple(read_rounds(connection, reply["id"]))
        replies.setdefault(reply["message_id"], []).append(reply_from_row(reply, rounds))
    messages = []
    for message in connection.execute(
        "SELECT * FROM messages WHERE conversation_id = ? ORDER BY number", [conversation_id]
    ):
        stored = StoredMessage(
            id=message["id"],
            parent_id=message["parent_id"],
            role=message["role"],
            content=message["content"],
            created=message["created"],
            replies=tuple(replies.get(message["id"], ())),
        )
        if stored.shown is not None:
            stored = replace(stored, content=stored.shown.visible_text)
        messages.append(stored)
    return StoredConversation(row["id"], row["created"], row["client"], row["system_prompt"], tuple(messages))


def summaries(
    connection: sqlite3.Connection, limit: int, client: str | None
) -> tuple[ConversationSummary, ...]:
    """The newest ``limit`` conversations that have a message; only ``client``'s unless that is None."""
    rows = connection.execute(
        """
        SELECT id, created, client,
            (SELECT substr(content, 1, 80) FROM messages WHERE conversation_id = c.id
             ORDER BY number LIMIT 1) AS title,
            (SELECT count(*) FROM messages WHERE conversation_id = c.id) AS num_messages,
            (SELECT count(*) FROM replies WHERE conversation_id = c.id) AS num_replies
        FROM conversations AS c
        WHERE (:client IS NULL OR client = :client) AND num_messages > 0
        ORDER BY created DESC, rowid DESC LIMIT :limit
        """,
        {"client": client, "limit": limit},
    )
    return tuple(ConversationSummary(*row) for row in rows)


def measured_with_others(connection: sqlite3.Connection, info: PairInfo) -> bool:
    """Whether pairs of these names were measured, but never with the weights that ``info`` names.

    Measured are rounds that drafted; of a target alone, all.
    """
    rows = connection.execute(
        """
        SELECT DISTINCT target_fingerprint, draft_fingerprint FROM replies
        WHERE target = :target AND draft = :draft AND EXISTS (
            SELECT 1 FROM rounds WHERE reply_id = replies.id AND (num_draft_tokens > 0 OR :draft = '')
        )
        """,
        {"target": info.target, "draft": info.draft},
    )
    measured = {tuple(row) for row in rows}
    return bool(measured) and (info.target_fingerprint, info.draft_fingerprint) not in measured


def why_unusable(path: Path, error: Exception) -> str:
    """What keeps the database from being used, as one sentence for people."""
    reason = (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
    for sign, words in (
        ("locked", "another program keeps it locked"),
        ("busy", "another program keeps it locked"),
        ("full", "the disk is full"),
        ("disk I/O error", "a write to the disk failed, which may be full (disk I/O error)"),
        ("readonly", "it cannot be written to (read-only)"),
        ("unable to open", "it cannot be opened"),
        ("not a database", "the file is not an SQLite database"),
        ("malformed", "the file is damaged"),
    ):
        if sign in reason:
            reason = words
            break
    return f"The database {path} cannot be used: {reason}."


def newer_sentence(path: Path) -> str:
    """What is said of a database that a later Redline made."""
    return (
        f"The database {path} was made by a later version of Redline and is left alone: "
        "update Redline, or name another file."
    )
