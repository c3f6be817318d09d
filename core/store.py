"""The record: conversations, messages, replies, rounds and tokens in one SQLite file, written as they arrive.

Knows the records and the schema (``core.migrations``), nothing of the engine or the page; reading back is in
``core.stored``. No method raises because of the database: what goes wrong becomes one sentence in
``Store.problem``, and chatting goes on.

Rules:

- Each round is one transaction, its tokens with it, so that a killed process loses at most the round in
  flight.
- What is on disk of a reply is always its beginning: rounds 0 to n without a gap. A reply counts as whole
  only by its ``finish_reason``, and that is written only together with, or after, all of its rounds.
- A round that cannot be written is held in memory, and later rounds of that reply behind it, without trying
  again at each; when the reply ends everything held is tried once more. If that fails too, what is held is
  dropped: the file keeps the beginning, which reads as ``interrupted``. Messages, conversations and
  comparisons that could not be written are held until a later write succeeds (at most ``MAX_HELD_MESSAGES``),
  so that no turn is missing before a later one.
- With ``recording`` off nothing is written. Switching it off in the middle of a reply ends the record of that
  reply there; one that began while it was off is never recorded.
- Deleting wins: what still arrives for a reply that was deleted is dropped, and so is what is held of it.
- A database made by a later Redline is not touched.
- Scalars of NumPy and torch become Python's own numbers (``core.plain``). A record with anything else in it
  is not written, and the record of its reply ends before it.
- Text that UTF-8 or SQL tools cannot hold is cleaned before it is stored (see ``core.text.clean_text``).
- Deleted text is really gone: freed pages are overwritten and the write-ahead log is emptied.
- A full disk does not keep anything from being deleted (``core.deletion``).
"""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import threading
import uuid
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

from sqlite_utils import Database

from core import compared, deletion
from core.compared import Comparison
from core.metrics import Tally
from core.migrations import is_newer, migrate
from core.plain import NotPlain, plain, plain_record
from core.records import PairInfo, Reply, Round, Settings, Token, writes_exactly
from core.stored import (
    BUSY_SECONDS,
    KINDS,
    PAIR_NAMES,
    ROUND_NAMES,
    SETTING_NAMES,
    TOKEN_NAMES,
    ConversationSummary,
    StoredConversation,
    StoredMessage,
    StoredReply,
    StoreError,
    conversation,
    measured_with_others,
    newer_sentence,
    pack_top,
    reading,
    summaries,
    why_unusable,
)
from core.text import clean_text

__all__ = [
    "ConversationSummary",
    "Store",
    "StoreError",
    "StoredConversation",
    "StoredMessage",
    "StoredReply",
    "default_path",
]

BUSY_SECONDS_IN_TROUBLE = 0.25  # how long a write waits after one that failed: one long wait is enough
MAX_HELD_MESSAGES = 1000

Job = Callable[[sqlite3.Connection], object]
Result = TypeVar("Result")


def default_path() -> Path:
    """``REDLINE_DB`` where it is set, else ``data/redline.db`` of this checkout."""
    named = os.environ.get("REDLINE_DB", "").strip()
    if named:
        return Path(named).expanduser()
    return Path(__file__).resolve().parent.parent / "data" / "redline.db"


class _NoQuestion(Exception):
    """A reply to a message that is not in the database."""


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def _insert(table: str, names: Iterable[str]) -> str:
    names = tuple(names)
    columns = ", ".join(f'"{name}"' for name in names)
    return f"INSERT INTO {table} ({columns}) VALUES ({', '.join('?' * len(names))})"


_INSERT_ROUND = _insert("rounds", ("reply_id", *ROUND_NAMES))
_INSERT_TOKEN = _insert("tokens", ("round_id", *TOKEN_NAMES))


def _round_row(reply_id: str, round_: Round) -> tuple:
    values = {name: getattr(round_, name) for name in ROUND_NAMES}
    values["text"] = clean_text(round_.text)
    return (reply_id, *values.values())


def _token_row(token: Token) -> tuple:
    values = {name: getattr(token, name) for name in TOKEN_NAMES}
    values["text"] = clean_text(token.text)
    values["label"] = token.label and clean_text(token.label)
    values["fate"] = token.fate.value
    values["top_p"] = pack_top(token.top_p)
    values["top_q"] = pack_top(token.top_q)
    return tuple(values.values())


# --- The store ---------------------------------------------------------------------------------------------


class _OpenReply:
    """A reply that is being written: its figures so far, and what of it is not written yet."""

    __slots__ = ("conversation_id", "held", "tally")

    def __init__(self, conversation_id: str) -> None:
        self.conversation_id = conversation_id
        self.tally = Tally()
        self.held: list[Job] = []


class Store:
    """Writes and reads the record; every method may be called from any thread.

    One connection writes, under a lock; every reading has a connection of its own, so that it waits for
    nobody. The folder of ``path`` is made where it is missing. No method raises because of the database: see
    ``problem``. Raises nothing at construction either.
    """

    def __init__(self, path: str | os.PathLike | None = None, *, recording: bool = True) -> None:
        self.path = Path(path) if path is not None else default_path()
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None  # which file the connection has open
        self._recording = recording
        self._problem: str | None = None
        self._out_of_room = False  # whether that was the last problem
        self._open: dict[str, _OpenReply] = {}
        # What is not written yet, with the id of the conversation or comparison it belongs to.
        self._held: list[tuple[str, Job]] = []
        with self._lock:
            if recording:
                self._transaction([])

    # --- Switches and state

    @property
    def problem(self) -> str | None:
        """One sentence about what is not being recorded and why; None while all is well."""
        return self._problem

    @property
    def recording(self) -> bool:
        """Whether anything is written. Switching off forgets what is held and ends open replies' record."""
        return self._recording

    @recording.setter
    def recording(self, on: bool) -> None:
        with self._lock:
            self._recording = bool(on)
            if on:
                self._transaction([])
            else:
                self._open.clear()
                self._held.clear()
                self._problem = None

    def close(self) -> None:
        """Writes what is still held, if it can be, and closes the file. A later call opens it again."""
        with self._lock:
            if self._held:
                self._transaction([])
            self._disconnect()

    # --- Writing

    def new_conversation(self, system_prompt: str = "", client: str | None = None) -> str:
        """Begins a conversation and returns its id. ``client`` says whose it is (a browser's own id)."""
        conversation_id, created = uuid.uuid4().hex, _now()
        system_prompt = clean_text(system_prompt)
        client = client and clean_text(client)
        self._write(
            conversation_id,
            lambda connection: connection.execute(
                "INSERT INTO conversations (id, created, client, system_prompt) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (id) DO NOTHING",
                [conversation_id, created, client, system_prompt],
            ),
        )
        return conversation_id

    def set_system_prompt(self, conversation_id: str, text: str) -> None:
        """The system prompt from here on; each reply keeps the one it was made with."""
        created, text = _now(), clean_text(text)
        self._write(
            conversation_id,
            lambda connection: connection.execute(
                "INSERT INTO conversations (id, created, system_prompt) VALUES (?, ?, ?) "
                "ON CONFLICT (id) DO UPDATE SET system_prompt = excluded.system_prompt",
                [conversation_id, created, text],
            ),
        )

    def add_message(self, conversation_id: str, role: str, content: str, parent_id: str | None = None) -> str:
        """Adds a message and returns its id; makes the conversation where it is not on record."""
        message_id, created, content = uuid.uuid4().hex, _now(), clean_text(content)
        self._write(
            conversation_id,
            lambda connection: _insert_message(
                connection, conversation_id, message_id, parent_id, role, content, created
            ),
        )
        return message_id

    def begin_reply(
        self,
        conversation_id: str,
        question_id: str,
        settings: Settings,
        pair: PairInfo,
        domain: str,
        prompt_tokens: int,
        *,
        kind: str | None = None,
        answers_reply_id: str | None = None,
        opening: str = "",
    ) -> str:
        """Begins a reply to the message ``question_id`` and returns its id.

        ``domain`` is the user's choice (``domains.CHOICES``). ``kind`` is one of ``KINDS``; None means
        ``first`` for the first reply to that message and ``regenerated`` for later ones. ``answers_reply_id``
        is the reply that is answered again; None, or one that is not on record, means the latest to that
        message. ``opening`` is what the chat template has already written of the reply (``core.chat``).
        Raises ValueError for another ``kind``.
        """
        if kind is not None and kind not in KINDS:
            raise ValueError(f"A reply's kind is one of {', '.join(KINDS)}, not {kind!r}.")
        reply_id, message_id, created = uuid.uuid4().hex, uuid.uuid4().hex, _now()
        try:
            settings, pair = plain_record(settings), plain_record(pair)
            prompt_tokens = plain("prompt_tokens", prompt_tokens)
        except NotPlain as error:
            self._refuse(error)
            return reply_id
        values = {name: getattr(pair, name) for name in PAIR_NAMES}
        values = {name: clean_text(v) if isinstance(v, str) else v for name, v in values.items()}
        values.update((name, getattr(settings, name)) for name in SETTING_NAMES)
        values.update(
            id=reply_id,
            conversation_id=conversation_id,
            created=created,
            stop=json.dumps([clean_text(stop) for stop in settings.stop], ensure_ascii=False),
            exact=writes_exactly(settings, pair.drafter),
            domain_choice=domain,
            opening=clean_text(opening),
            prompt_tokens=prompt_tokens,
        )

        def job(connection: sqlite3.Connection) -> None:
            question = connection.execute(
                "SELECT 1 FROM messages WHERE id = ? AND conversation_id = ?", [question_id, conversation_id]
            ).fetchone()
            if question is None:
                raise _NoQuestion
            answer = connection.execute(
                "SELECT id FROM messages WHERE parent_id = ? AND role = 'assistant'", [question_id]
            ).fetchone()
            if answer is None:
                _insert_message(
                    connection, conversation_id, message_id, question_id, "assistant", "", created
                )
            in_message = answer[0] if answer else message_id
            latest = connection.execute(
                "SELECT id, number FROM replies WHERE message_id = ? ORDER BY number DESC LIMIT 1",
                [in_message],
            ).fetchone()
            answered = connection.execute(
                "SELECT id FROM replies WHERE id = ?", [answers_reply_id]
            ).fetchone()
            answered = answered or latest
            (system_prompt,) = connection.execute(
                "SELECT system_prompt FROM conversations WHERE id = ?", [conversation_id]
            ).fetchone()
            row = dict(
                values,
                message_id=in_message,
                number=latest[1] + 1 if latest else 0,
                kind=kind or ("regenerated" if latest else "first"),
                answers_reply_id=answered[0] if answered else None,
                system_prompt=system_prompt,
            )
            connection.execute(_insert("replies", row), list(row.values()))

        with self._lock:
            if self._recording:
                self._open[reply_id] = _OpenReply(conversation_id)
                self._write_of(reply_id, job)
        return reply_id

    def add_round(self, reply_id: str, round_: Round) -> None:
        """Writes one round and its tokens in one transaction. Rounds come in order."""
        with self._lock:
            if reply_id not in self._open:
                return
            try:
                round_ = plain_record(round_)
                row, tokens = _round_row(reply_id, round_), [_token_row(token) for token in round_.tokens]
            except (NotPlain, struct.error) as error:
                self._refuse(error, reply_id)
                return

            def job(connection: sqlite3.Connection) -> None:
                round_id = connection.execute(_INSERT_ROUND, row).lastrowid
                connection.executemany(_INSERT_TOKEN, [(round_id, *token) for token in tokens])

            self._open[reply_id].tally.add(round_)
            self._write_of(reply_id, job)

    def finish_reply(self, reply_id: str, reply: Reply) -> None:
        """Writes how the reply ended, its figures, and the assistant's message; what is held goes first."""
        with self._lock:
            if reply_id not in self._open:
                return
            try:
                reply = plain_record(reply)
            except NotPlain as error:
                self._refuse(error, reply_id)
                return
            values = self._open[reply_id].tally.figures().as_row()
            visible = clean_text(reply.visible_text)
            values.update(
                reused_tokens=reply.reused_tokens,
                prefill_seconds=reply.prefill_seconds,
                ttft_seconds=reply.ttft_seconds,
                seconds=reply.seconds,
                finish_reason=reply.finish_reason,
                error=reply.error and clean_text(reply.error),
                text=visible + clean_text(reply.text[reply.visible_chars :]),
                visible_chars=len(visible),
                tail=clean_text(reply.tail),
            )
            sets = ", ".join(f'"{name}" = ?' for name in values)

            def job(connection: sqlite3.Connection) -> None:
                connection.execute(f"UPDATE replies SET {sets} WHERE id = ?", [*values.values(), reply_id])
                # A plain repetition stands beside the reply it repeats, and does not replace it in the chat.
                connection.execute(
                    "UPDATE messages SET content = ? WHERE id = "
                    "(SELECT message_id FROM replies WHERE id = ? AND (kind != 'plain' OR number = 0))",
                    [visible, reply_id],
                )

            self._write_of(reply_id, job, last=True)

    def delete_conversation(self, conversation_id: str) -> bool:
        """Deletes a conversation and all of its replies. False, with a ``problem``, if it is not all gone."""
        return self._delete(
            lambda connection: connection.execute(
                "DELETE FROM conversations WHERE id = ?", [conversation_id]
            ),
            conversation_id,
        )

    def delete_all(self) -> bool:
        """Deletes everything and shrinks the file. False, with a ``problem``, if it is not all gone.

        Where the disk is full the file is taken away, and the next write makes a new one.
        """

        def job(connection: sqlite3.Connection) -> None:
            tables = ("tokens", "rounds", "replies", "messages", "conversations")
            for table in (*tables, "compared_replies", "comparisons"):
                connection.execute(f"DELETE FROM {table}")

        return self._delete(job, None)

    def add_comparison(self, comparison: Comparison) -> None:
        """Enters a comparison of drafters, or what was measured of it since it was entered."""
        try:
            comparison = plain_record(comparison)
        except NotPlain as error:
            self._refuse(error)
            return
        self._write(comparison.id, lambda connection: compared.write(connection, comparison))

    def delete_comparison(self, comparison_id: str) -> bool:
        """Deletes a comparison. False, with a ``problem``, if it is not gone."""
        return self._delete(lambda connection: compared.delete(connection, comparison_id), comparison_id)

    def _refuse(self, error: Exception, reply_id: str | None = None) -> None:
        """Ends the record of an open reply before something that no table holds."""
        with self._lock:
            if self._recording:
                self._open.pop(reply_id, None)
                self._problem = f"Not recorded: {error}."

    # --- Reading

    def comparisons(self, limit: int | None = None) -> list[Comparison]:
        """The comparisons on record, newest first; none where they cannot be read."""
        return self._read(lambda connection: compared.read(connection, limit), [])

    def conversation(self, conversation_id: str) -> StoredConversation | None:
        """A conversation as it was, or None when it is not on record or cannot be read."""
        return self._read(lambda connection: conversation(connection, conversation_id), None)

    def list_conversations(
        self, limit: int = 50, *, client: str | None = None
    ) -> tuple[ConversationSummary, ...]:
        """The conversations that have a message, newest first; only ``client``'s where one is given."""
        return self._read(lambda connection: summaries(connection, limit, client), ())

    def changed_since_measured(self, info: PairInfo) -> bool:
        """Whether what is on record of a pair of these names was measured with other weights only.

        Those figures are then not the present pair's. False where the record cannot be read.
        """
        return self._read(lambda connection: measured_with_others(connection, info), False)

    def _read(self, read: Callable[[sqlite3.Connection], Result], empty: Result) -> Result:
        try:
            with reading(self.path) as connection:
                return read(connection)
        except (StoreError, sqlite3.Error):
            return empty

    # --- The connection that writes

    def _write(self, owner: str, job: Job) -> None:
        """Writes something of a conversation or comparison, or holds it until a later write succeeds."""
        with self._lock:
            if not self._recording:
                return
            if len(self._held) < MAX_HELD_MESSAGES:
                self._held.append((owner, job))
            try:
                self._transaction([])
            except sqlite3.IntegrityError:  # of something that was deleted meanwhile
                self._held.clear()

    def _write_of(self, reply_id: str, job: Job, *, last: bool = False) -> None:
        """Writes a part of an open reply behind what is held of it; see the rules above."""
        reply = self._open[reply_id]
        waiting = bool(reply.held)
        reply.held.append(job)
        if last:
            del self._open[reply_id]
        if waiting and not last:
            return
        try:
            if self._transaction(reply.held):
                reply.held.clear()
        except _NoQuestion:
            self._open.pop(reply_id, None)
            self._problem = "This reply is not recorded because the message it answers is not on record."
        except sqlite3.IntegrityError as error:
            self._open.pop(reply_id, None)
            if "FOREIGN KEY" not in str(error):  # which means that somebody deleted the reply meanwhile
                self._trouble(error, "recorded")

    def _transaction(self, jobs: Iterable[Job], *, purpose: str = "recorded") -> bool:
        """Does all jobs, those held first, or none. False, with a ``problem``, if the database is in the way.

        Raises ``sqlite3.IntegrityError`` where a job adds to something that is no longer there.
        """
        try:
            connection = self._connect()
            connection.execute("BEGIN IMMEDIATE")
            try:
                for job in [*(job for _, job in self._held), *jobs]:
                    job(connection)
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
        except sqlite3.IntegrityError:
            raise
        except (sqlite3.Error, OSError, StoreError) as error:
            self._trouble(error, purpose)
            return False
        self._held.clear()
        if self._problem is not None:
            self._problem = None
            self._set_busy_seconds(BUSY_SECONDS)
        return True

    def _delete(self, job: Job, owner: str | None) -> bool:
        """Deletes a conversation or comparison, also what is not written yet of it; None is everything."""
        with self._lock:
            stays = {key: r for key, r in self._open.items() if owner not in (None, r.conversation_id)}
            self._open = stays
            self._held = [held for held in self._held if owner not in (None, held[0])]
            if not self.path.exists():
                return True
            if not self._transaction([job], purpose="deleted"):
                return self._out_of_room and self._delete_without_room(job, owner, "deleted")
            try:
                connection = self._connect()
                if owner is None:
                    connection.execute("VACUUM")
                (busy, *_) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            except (sqlite3.Error, OSError, StoreError) as error:
                self._trouble(error, "deleted for good")
                return self._out_of_room and self._delete_without_room(job, owner, "deleted for good")
            if busy:
                self._problem = (
                    f"Deleted, but another program is reading {self.path}, so the text may stay in "
                    f"{self.path.name}-wal until it ends."
                )
            return not busy

    def _delete_without_room(self, job: Job, owner: str | None, purpose: str) -> bool:
        """Deletes where the disk is full; everything goes by a new file in the place of the old. ``purpose``
        says in a sentence what could not be done."""
        try:
            if owner is None:
                deletion.remove(self.path)
            else:
                deletion.delete_in_place(self.path, job)
        except (sqlite3.Error, OSError) as error:
            self._trouble(error, purpose)
            if owner is not None and self._out_of_room:
                self._problem += " Make room on it, or delete everything, which needs none."
            return False
        self._problem = None
        return True

    def _connect(self) -> sqlite3.Connection:
        """The connection that writes; a new one where there is none or the file was replaced or removed."""
        if self._connection is not None:
            if self._file == _identity(self.path):
                return self._connection
            self._disconnect()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(self.path, check_same_thread=False)
        try:
            busy_seconds = BUSY_SECONDS_IN_TROUBLE if self._problem else BUSY_SECONDS
            connection.execute(f"PRAGMA busy_timeout = {int(busy_seconds * 1000)}")
            db = Database(connection, execute_plugins=False)
            if is_newer(db):  # before anything is written to it
                raise StoreError(newer_sentence(self.path))
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA secure_delete = ON")
            migrate(db)
            connection.execute("PRAGMA user_version = 0")  # any write: it finds a read-only file at once
            connection.execute("PRAGMA foreign_keys = ON")
        except BaseException:
            connection.close()
            raise
        self._connection, self._file = connection, _identity(self.path)
        return connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _trouble(self, error: Exception, purpose: str) -> None:
        self._out_of_room = deletion.out_of_room(error)
        if isinstance(error, StoreError):
            sentence = str(error)
        else:
            sentence = why_unusable(self.path, error)
        self._problem = f"Not {purpose}: {sentence[0].lower()}{sentence[1:]}"
        if "locked" in str(error):
            self._set_busy_seconds(BUSY_SECONDS_IN_TROUBLE)
        else:
            # A file that was full, read-only or damaged may be another one, or mended, when it is next asked
            # for.
            self._disconnect()

    def _set_busy_seconds(self, seconds: float) -> None:
        if self._connection is not None:
            self._connection.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _insert_message(
    connection: sqlite3.Connection,
    conversation_id: str,
    message_id: str,
    parent_id: str | None,
    role: str,
    content: str,
    created: str,
) -> None:
    connection.execute(
        "INSERT INTO conversations (id, created) VALUES (?, ?) ON CONFLICT (id) DO NOTHING",
        [conversation_id, created],
    )
    connection.execute(
        """
        INSERT INTO messages (id, conversation_id, number, parent_id, role, content, created)
        VALUES (:id, :conversation,
            (SELECT coalesce(max(number) + 1, 0) FROM messages WHERE conversation_id = :conversation),
            (SELECT id FROM messages WHERE id = :parent), :role, :content, :created)
        """,
        {
            "id": message_id,
            "conversation": conversation_id,
            "parent": parent_id,
            "role": role,
            "content": content,
            "created": created,
        },
    )
