"""Case NX-16: what fills a disk can be deleted although the disk is full."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from core.record import deletion
from core.record import store as store_module
from core.record.store import Store
from tests.core.builders import record

SECRET = "a harbour nobody knows"


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of 4 MB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = (
        sys.platform == "linux"
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)], capture_output=True
        ).returncode
    )
    if not mounted:
        pytest.skip("only root on Linux may mount a small file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place: Path) -> None:
    """Leave no byte of room."""
    file = os.open(place / "others", os.O_CREAT | os.O_WRONLY)
    try:
        while True:
            os.write(file, bytes(4096))
    except OSError:
        assert os.statvfs(place).f_bavail == 0
    finally:
        os.close(file)


def recorded(path: Path, count: int = 12) -> list[str]:
    """Conversations of some 20 kB each, in a database that nobody has open."""
    with contextlib.closing(Store(path)) as store:
        return [record(store, "aaxr", "p", question=f"{n} {SECRET} " * 800)[0] for n in range(count)]


def contents(place: Path) -> bytes:
    return b"".join(path.read_bytes() for path in place.iterdir() if path.name != "others")


def conversations(path: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return [id for (id,) in connection.execute("SELECT id FROM conversations ORDER BY rowid")]


# --- NX-16 on a real small disk


@pytest.mark.parametrize("is_open", [True, False])
def test_everything_is_deleted_from_a_full_disk(small_disk, is_open):
    path = small_disk / "redline.db"
    recorded(path)
    store = Store(path)
    if not is_open:
        store.close()
    else:  # what was written last is in the log alone, with no room in the file
        record(store, "p", question="x" * 200_000)
    fill(small_disk)
    assert store.delete_all() and store.problem is None
    assert SECRET.encode() not in contents(small_disk)
    kept = record(store, "p")[0]  # the room is there again, and the record goes on
    assert store.problem is None
    store.close()
    assert conversations(path) == [kept]


@pytest.mark.parametrize("is_open", [True, False])
def test_a_conversation_is_deleted_from_a_full_disk(small_disk, is_open):
    path = small_disk / "redline.db"
    ids = recorded(path)
    with contextlib.closing(Store(path)) as store:
        if not is_open:
            store.close()
        fill(small_disk)
        assert store.delete_conversation(ids[3]) and store.problem is None
        assert store.conversation(ids[3]) is None and store.conversation(ids[4]) is not None
    assert conversations(path) == [*ids[:3], *ids[4:]]
    assert f"3 {SECRET}".encode() not in contents(small_disk)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for table in ("messages", "replies"):  # and all that hung on it
            assert connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] % 11 == 0
    (small_disk / "others").unlink()
    with contextlib.closing(Store(path)) as store:  # with room again all is as it was
        record(store, "p")
        assert store.problem is None
    assert len(conversations(path)) == 12


def test_held_messages_do_not_keep_a_full_disk_full(small_disk):
    path = small_disk / "redline.db"
    ids = recorded(path)
    with contextlib.closing(Store(path)) as store:
        store.close()
        fill(small_disk)
        store.add_message(ids[0], "user", "what finds no room")
        assert "full" in store.problem
        assert store.delete_conversation(ids[1]), store.problem
        assert store.delete_all() and store.problem is None
    assert SECRET.encode() not in contents(small_disk)


def test_a_log_that_cannot_be_written_back_is_told_with_the_way_out(small_disk):
    path = small_disk / "redline.db"
    ids = recorded(path)
    with contextlib.closing(Store(path)) as store:
        record(store, "p", question="x" * 400_000)  # beyond the end of the file, in the log
        fill(small_disk)
        assert not store.delete_conversation(ids[0])
        assert store.problem.endswith(
            "the disk is full. Make room on it, or delete everything, which needs none."
        )
        assert store.conversation(ids[0]) is not None
        assert store.delete_all() and store.problem is None


# --- NX-16 without such a disk


@pytest.fixture
def full(monkeypatch):
    """Whatever would need room fails in SQLite's words while the list is empty, as on a full disk."""
    connect, room = sqlite3.connect, []

    class OnFullDisk(sqlite3.Connection):
        def execute(self, sql, *values):
            mode = super().execute("PRAGMA journal_mode").fetchone()[0] if sql.startswith("BEGIN IMM") else ""
            exclusive = mode and super().execute("PRAGMA locking_mode").fetchone()[0] == "exclusive"
            if not room and mode and mode != "memory" and not exclusive:
                raise sqlite3.OperationalError(said)
            return super().execute(sql, *values)

    said = "database or disk is full"
    monkeypatch.setattr(
        store_module.sqlite3, "connect", lambda *a, **more: connect(*a, factory=OnFullDisk, **more)
    )
    return room


def test_deleting_anywhere_where_writing_fails_for_want_of_room(tmp_path, full):
    path = tmp_path / "redline.db"
    full.append("room")
    ids = recorded(path, 3)
    full.clear()
    with contextlib.closing(Store(path)) as store:
        assert "the disk is full" in store.problem or store.problem is None
        assert store.delete_conversation(ids[0]) and store.problem is None
        full.append("room")
        assert conversations(path) == ids[1:]
        full.clear()
        assert store.delete_all() and not path.exists()
        assert [entry.name for entry in tmp_path.iterdir()] == []


def test_what_another_program_has_open_is_not_taken_away(tmp_path, full, monkeypatch):
    monkeypatch.setattr(deletion, "PATIENCE", 0.05)
    path = tmp_path / "redline.db"
    full.append("room")
    ids = recorded(path, 2)
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM conversations").fetchone() == (2,)
    full.clear()
    with contextlib.closing(Store(path)) as store:
        for delete in (store.delete_all, lambda: store.delete_conversation(ids[0])):
            assert not delete() and "another program keeps it locked" in store.problem
        assert reader.execute("SELECT count(*) FROM messages").fetchone() == (4,)
        reader.close()
        assert store.delete_all() and store.problem is None


def test_a_file_that_is_no_database_is_never_taken_away(tmp_path, full):
    path = tmp_path / "letters.db"
    path.write_bytes(b"dear reader " * 1000)
    with contextlib.closing(Store(path)) as store:
        assert not store.delete_all() and "not an SQLite database" in store.problem
    with pytest.raises(sqlite3.DatabaseError, match="not a database"):
        deletion.remove(path)
    assert path.read_bytes() == b"dear reader " * 1000


def test_a_quota_counts_as_a_full_disk():
    assert deletion.out_of_room(sqlite3.OperationalError("disk I/O error"))
    assert not deletion.out_of_room(sqlite3.OperationalError("database is locked"))
    assert not deletion.out_of_room(sqlite3.DatabaseError("database disk image is malformed"))
