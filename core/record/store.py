"""The record: conversations, messages, replies, rounds and tokens in one SQLite file, written as they arrive.

Knows the records and the schema (``core.record.migrations``), nothing of the engine or the page; reading back
is in ``core.record.stored``. No method raises because of the database: what goes wrong becomes one sentence
in ``Store.problem``, and chatting goes on.

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
- Scalars of NumPy and torch become Python's own numbers (``core.record.plain``). A record with anything else
  in it is not written, and the record of its reply ends before it.
- Text that UTF-8 or SQL tools cannot hold is cleaned before it is stored (see
  ``core.text.detokenise.clean_text``).
- Deleted text is really gone: freed pages are overwritten and the write-ahead log is emptied.
- A full disk does not keep anything from being deleted (``core.record.deletion``).
"""

from __future__ import annotations

import os
import sqlite3
import struct
import threading
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from core.figures.metrics import Tally
from core.record import compared, entries
from core.record.compared import Comparison
from core.record.entries import Job, NoQuestion
from core.record.plain import NotPlain, plain_record
from core.record.stored import (
    KINDS,
    ConversationSummary,
    StoredConversation,
    StoredMessage,
    StoredReply,
    StoreError,
    conversation,
    measured_with_others,
    reading,
    summaries,
)
from core.record.writer import Writer
from core.records import PairInfo, Reply, Round, Settings

__all__ = [
    "ConversationSummary",
    "Store",
    "StoreError",
    "StoredConversation",
    "StoredMessage",
    "StoredReply",
    "default_path",
]

MAX_HELD_MESSAGES = 1000

Result = TypeVar("Result")


def default_path() -> Path:
    """``REDLINE_DB`` where it is set, else ``data/redline.db`` of this checkout."""
    named = os.environ.get("REDLINE_DB", "").strip()
    if named:
        return Path(named).expanduser()
    return Path(__file__).resolve().parents[2] / "data" / "redline.db"


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
        self._writer = Writer(self.path)
        self._recording = recording
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
        return self._writer.problem

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
                self._writer.problem = None

    def close(self) -> None:
        """Writes what is still held, if it can be, and closes the file. A later call opens it again."""
        with self._lock:
            if self._held:
                self._transaction([])
            self._writer.close()

    # --- Writing

    def new_conversation(self, system_prompt: str = "", client: str | None = None) -> str:
        """Begins a conversation and returns its id. ``client`` says whose it is (a browser's own id)."""
        conversation_id = uuid.uuid4().hex
        self._write(conversation_id, entries.conversation(conversation_id, client, system_prompt))
        return conversation_id

    def set_system_prompt(self, conversation_id: str, text: str) -> None:
        """The system prompt from here on; each reply keeps the one it was made with."""
        self._write(conversation_id, entries.system_prompt(conversation_id, text))

    def add_message(self, conversation_id: str, role: str, content: str, parent_id: str | None = None) -> str:
        """Adds a message and returns its id; makes the conversation where it is not on record."""
        message_id = uuid.uuid4().hex
        self._write(conversation_id, entries.message(conversation_id, message_id, role, content, parent_id))
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
        message. ``opening`` is what the chat template has already written of the reply
        (``core.text.template``). Raises ValueError for another ``kind``.
        """
        if kind is not None and kind not in KINDS:
            raise ValueError(f"A reply's kind is one of {', '.join(KINDS)}, not {kind!r}.")
        reply_id = uuid.uuid4().hex
        try:
            job = entries.reply(
                reply_id,
                conversation_id,
                question_id,
                uuid.uuid4().hex,
                settings,
                pair,
                domain=domain,
                prompt_tokens=prompt_tokens,
                kind=kind,
                answers_reply_id=answers_reply_id,
                opening=opening,
            )
        except NotPlain as error:
            self._refuse(error)
            return reply_id
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
                job = entries.round_of(reply_id, round_)
            except (NotPlain, struct.error) as error:
                self._refuse(error, reply_id)
                return
            self._open[reply_id].tally.add(round_)
            self._write_of(reply_id, job)

    def finish_reply(self, reply_id: str, reply: Reply) -> None:
        """Writes how the reply ended, its figures, and the assistant's message; what is held goes first."""
        with self._lock:
            if reply_id not in self._open:
                return
            try:
                job = entries.end(reply_id, reply, self._open[reply_id].tally.figures().as_row())
            except NotPlain as error:
                self._refuse(error, reply_id)
                return
            self._write_of(reply_id, job, last=True)

    def delete_conversation(self, conversation_id: str) -> bool:
        """Deletes a conversation and all of its replies. False, with a ``problem``, if it is not all gone."""
        return self._delete(entries.nothing_of(conversation_id), conversation_id)

    def delete_all(self) -> bool:
        """Deletes everything and shrinks the file. False, with a ``problem``, if it is not all gone.

        Where the disk is full the file is taken away, and the next write makes a new one.
        """
        return self._delete(entries.nothing, None)

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
                self._writer.problem = f"Not recorded: {error}."

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

    # --- What is held, and what is written

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
        except NoQuestion:
            self._open.pop(reply_id, None)
            self._writer.problem = (
                "This reply is not recorded because the message it answers is not on record."
            )
        except sqlite3.IntegrityError as error:
            self._open.pop(reply_id, None)
            if "FOREIGN KEY" not in str(error):  # which means that somebody deleted the reply meanwhile
                self._writer.trouble(error, "recorded")

    def _transaction(self, jobs: Iterable[Job], *, purpose: str = "recorded") -> bool:
        """Does all jobs, those held first, or none. False, with a ``problem``, if the database is in the way.

        Raises ``sqlite3.IntegrityError`` where a job adds to something that is no longer there.
        """
        done = self._writer.do([*(job for _, job in self._held), *jobs], purpose=purpose)
        if done:
            self._held.clear()
        return done

    def _delete(self, job: Job, owner: str | None) -> bool:
        """Deletes a conversation or comparison, also what is not written yet of it; None is everything."""
        with self._lock:
            stays = {key: r for key, r in self._open.items() if owner not in (None, r.conversation_id)}
            self._open = stays
            self._held = [held for held in self._held if owner not in (None, held[0])]
            if not self.path.exists():
                return True
            if self._transaction([job], purpose="deleted"):
                return self._writer.delete_for_good(job, everything=owner is None)
            return self._writer.delete_without_room(job, everything=owner is None)
