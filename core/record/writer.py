"""The one connection that writes the record: opening, transactions, deleting for good, and trouble in words.

Knows the file and the schema; not what jobs write. Not for two threads at once: ``core.record.store`` locks.
What goes wrong with the database becomes one sentence in ``Writer.problem``.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from sqlite_utils import Database

from core.record import deletion
from core.record.entries import Job
from core.record.migrations import is_newer, migrate
from core.record.stored import BUSY_SECONDS, StoreError, newer_sentence, why_unusable

BUSY_SECONDS_IN_TROUBLE = 0.25  # how long a write waits after one that failed: one long wait is enough


class Writer:
    """Writes to the database at ``path``, whose folder is made where it is missing.

    ``problem`` is one sentence about what is not being recorded and why; None while all is well.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem: str | None = None
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None  # which file the connection has open
        self._out_of_room = False  # whether that was the last problem

    def do(self, jobs: Iterable[Job], *, purpose: str = "recorded") -> bool:
        """Does all jobs or none. False, with a ``problem``, if the database is in the way; ``purpose`` says
        in a sentence what could not be done.

        Raises ``sqlite3.IntegrityError`` where a job adds to something that is no longer there, and what jobs
        raise.
        """
        try:
            connection = self._connect()
            connection.execute("BEGIN IMMEDIATE")
            try:
                for job in jobs:
                    job(connection)
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
        except sqlite3.IntegrityError:
            raise
        except (sqlite3.Error, OSError, StoreError) as error:
            self.trouble(error, purpose)
            return False
        if self.problem is not None:
            self.problem = None
            self._set_busy_seconds(BUSY_SECONDS)
        return True

    def delete_for_good(self, job: Job, *, everything: bool) -> bool:
        """Sees that what ``job`` deleted is gone from the disk. False, with a ``problem``, where it is not.

        ``everything``: nothing is left, and the file shrinks; where the disk is full it is taken away.
        """
        try:
            connection = self._connect()
            if everything:
                connection.execute("VACUUM")
            (busy, *_) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except (sqlite3.Error, OSError, StoreError) as error:
            self.trouble(error, "deleted for good")
            return self.delete_without_room(job, everything=everything, purpose="deleted for good")
        if busy:
            self.problem = (
                f"Deleted, but another program is reading {self.path}, so the text may stay in "
                f"{self.path.name}-wal until it ends."
            )
        return not busy

    def delete_without_room(self, job: Job, *, everything: bool, purpose: str = "deleted") -> bool:
        """Deletes where a full disk was the last problem; everything goes by a new file in the place of the
        old. False, with a ``problem``, where it was another or this cannot be done either."""
        if not self._out_of_room:
            return False
        try:
            if everything:
                deletion.remove(self.path)
            else:
                deletion.delete_in_place(self.path, job)
        except (sqlite3.Error, OSError) as error:
            self.trouble(error, purpose)
            if not everything and self._out_of_room:
                self.problem += " Make room on it, or delete everything, which needs none."
            return False
        self.problem = None
        return True

    def close(self) -> None:
        """Closes the file; the next job opens it again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def trouble(self, error: Exception, purpose: str) -> None:
        """Says in ``problem`` what could not be done, and why."""
        self._out_of_room = deletion.out_of_room(error)
        if isinstance(error, StoreError):
            sentence = str(error)
        else:
            sentence = why_unusable(self.path, error)
        self.problem = f"Not {purpose}: {sentence[0].lower()}{sentence[1:]}"
        if "locked" in str(error):
            self._set_busy_seconds(BUSY_SECONDS_IN_TROUBLE)
        else:
            # A file that was full, read-only or damaged may be another one, or mended, when it is next asked
            # for.
            self.close()

    def _connect(self) -> sqlite3.Connection:
        """The connection; a new one where there is none or the file was replaced or removed."""
        if self._connection is not None:
            if self._file == _identity(self.path):
                return self._connection
            self.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(self.path, check_same_thread=False)
        try:
            busy_seconds = BUSY_SECONDS_IN_TROUBLE if self.problem else BUSY_SECONDS
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

    def _set_busy_seconds(self, seconds: float) -> None:
        if self._connection is not None:
            self._connection.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
