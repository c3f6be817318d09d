"""Deleting from a database whose disk has no room left, which is when people delete.

SQLite writes before it deletes: pages go to a log, or to a journal beside the file. Here nothing is written
anew. ``delete_in_place`` keeps the journal in memory, ``remove`` takes the whole database away. Both need the
database for themselves and say so with SQLite's own error where another program has it open.

Knows SQLite's files; not what is in them.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

ENDS = ("", "-wal", "-shm", "-journal")  # of the names of a database's files
PATIENCE = 1.0  # seconds for another program to let go
_BLOCK = 1 << 20


def files(path: Path) -> list[Path]:
    """Where the files of the database ``path`` are, if they are."""
    return [path.with_name(path.name + end) for end in ENDS]


def out_of_room(error: Exception) -> bool:
    """Whether SQLite had no room: it says so, or (a quota, its shared index) that a write failed."""
    said = str(error)
    return isinstance(error, sqlite3.Error) and any(sign in said for sign in ("is full", "disk I/O error"))


def delete_in_place(path: Path, job: Callable[[sqlite3.Connection], object]) -> None:
    """Do ``job``, which deletes, in one transaction that overwrites pages where they are.

    The file keeps its size, and its next writer sets the journal's mode anew. What would undo the transaction
    is in memory alone: a process that is killed within these milliseconds leaves a damaged file, which is why
    this is for full disks only. Raises ``sqlite3.Error``, and nothing is deleted then.
    """
    with _alone(path) as connection:
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute("PRAGMA foreign_keys = ON")
        mode = connection.execute("PRAGMA journal_mode = MEMORY").fetchone()[0]  # writes the log back first
        if mode != "memory":
            raise sqlite3.OperationalError("database or disk is full")
        connection.execute("BEGIN IMMEDIATE")
        job(connection)
        connection.execute("COMMIT")


def remove(path: Path) -> None:
    """Take a database away, its contents overwritten. Raises ``sqlite3.Error`` and ``OSError``.

    The database itself goes first: a log without it counts for nothing. Whoever had it open until now and
    looks again finds it gone.
    """
    with _alone(path):
        pass
    for file in files(path):
        with contextlib.suppress(FileNotFoundError):
            _shred(file)


@contextlib.contextmanager
def _alone(path: Path):
    """A connection that nobody else has the database open beside. Raises ``sqlite3.Error``."""
    address = f"{path.resolve().as_uri()}?mode=rw"  # a file that is not there is not made
    connection = sqlite3.connect(address, uri=True, timeout=PATIENCE, isolation_level=None)
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # with the log's index in memory, too
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
        yield connection
    finally:
        connection.close()


def _shred(path: Path) -> None:
    """Unlink a file and overwrite what it held, in this order: nobody is to find it half overwritten."""
    with open(path, "r+b", buffering=0) as file:
        if os.name == "posix":
            path.unlink()
        left = os.fstat(file.fileno()).st_size
        while left > 0:
            left -= file.write(bytes(min(left, _BLOCK)))
        os.fsync(file.fileno())
        file.truncate(0)
    path.unlink(missing_ok=True)  # where a file that is open cannot be unlinked
