"""The schema: from nothing, from every earlier version, and from a later one."""

import contextlib
import dataclasses
import sqlite3
import threading

import pytest
from sqlite_utils import Database

from core.figures.metrics import FIGURE_NAMES
from core.record import migrations, stored
from core.record.domain_table import choices
from core.record.migrations import is_newer, migrate
from core.record.store import Store
from core.records import PairInfo, Reply, Round, Settings, Token
from tests.core.builders import record

NAMES = [
    "m001_conversations_and_messages",
    "m002_replies",
    "m003_rounds_and_tokens",
    "m004_reply_figures",
    "m005_any_pair",
    "m006_block_verification",
    "m007_auto_draft_tokens",
    "m008_drafters_and_lossy_rules",
    "m009_comparisons",
]


def open_database(path):
    return contextlib.closing(Database(path))


def applied(db):
    return [migration.name for migration in migrations.migrations.applied(db)]


def names(record_class):
    return {field.name for field in dataclasses.fields(record_class)}


def test_migrations_are_only_ever_appended():
    # Databases in the world carry these names: a released one is never renamed, moved or removed.
    with Database(memory=True) as db:
        assert [m.name for m in migrations.migrations.pending(db)][: len(NAMES)] == NAMES


def test_from_nothing_to_every_field_of_the_records():
    with Database(memory=True) as db:
        migrate(db)
        columns = {table.name: set(table.columns_dict) for table in db.tables}
    assert names(Token) <= columns["tokens"]
    assert names(Round) - {"tokens"} <= columns["rounds"]
    # The ids of a reply are those of its emitted tokens, and num_rounds is the figure called rounds.
    stored_elsewhere = {"settings", "pair", "token_ids", "num_rounds"}
    expected = names(PairInfo) | names(Settings) | (names(Reply) - stored_elsewhere) | set(FIGURE_NAMES)
    assert expected <= columns["replies"]


def old_database(path, stop_before):
    """A database as an earlier version left it, with three conversations and what its schema holds of
    replies.
    """
    with open_database(path) as db:
        migrations.migrations.apply(db, stop_before=stop_before)
        for i in range(3):
            db["conversations"].insert({"id": f"c{i}", "created": f"2025-01-0{i + 1}T00:00:00+00:00"})
            message = {"id": f"m{i}", "conversation_id": f"c{i}", "number": 0, "role": "user"}
            db["messages"].insert({**message, "content": f"old {i}", "created": "2025-01-01T00:00:00+00:00"})


@pytest.mark.parametrize("stop_before", NAMES[1:])
def test_db_02_an_old_database_is_brought_up_to_date_and_keeps_its_rows(tmp_path, stop_before):
    path = tmp_path / "redline.db"
    old_database(path, stop_before)
    for _ in range(2):  # the second start finds nothing to do
        with contextlib.closing(Store(path)) as opened:
            assert opened.problem is None
            assert [c.title for c in opened.list_conversations()] == ["old 2", "old 1", "old 0"]
    with contextlib.closing(Store(path)) as opened:
        record(opened, "aab")
        assert opened.problem is None
    with open_database(path) as db:
        assert applied(db) == NAMES
        assert db["replies"].count == 1


def test_replies_from_before_their_figures_were_stored_are_kept(tmp_path):
    path = tmp_path / "redline.db"
    with contextlib.closing(Store(path)) as opened:
        conversation, _, _ = record(opened, "aaxdr", "p")
        expected = opened.conversation(conversation)
    with open_database(path) as db:
        # drift came with a later migration
        db["replies"].transform(drop=[name for name in FIGURE_NAMES if name != "drift"])
        db["_sqlite_migrations"].delete_where("name = ?", [NAMES[3]])
        assert "alpha" not in db["replies"].columns_dict
    with contextlib.closing(Store(path)) as opened:
        assert opened.conversation(conversation) == expected
        record(opened, "aab")
        assert opened.problem is None
    with open_database(path) as db:
        assert [row["accepted"] for row in db["replies"].rows] == [None, 2]


def test_replies_from_before_k_could_be_chosen_have_a_fixed_one_and_are_judged_by_token(tmp_path):
    path = tmp_path / "redline.db"
    with contextlib.closing(Store(path)) as opened:
        conversation, _, _ = record(opened, "aaxdr", settings=Settings(seed=1, num_draft_tokens=4))
    with open_database(path) as db:
        db["replies"].transform(drop=["auto_draft_tokens"])
        db["_sqlite_migrations"].delete_where("name = ?", ["m007_auto_draft_tokens"])
        assert "auto_draft_tokens" not in db["replies"].columns_dict
    with contextlib.closing(Store(path)) as opened:
        reply = opened.conversation(conversation).messages[1].replies[0]
        assert reply.settings == Settings(seed=1, num_draft_tokens=4)
        record(opened, "aab", settings=Settings(seed=1, num_draft_tokens=4))
        with stored.reading(path) as connection:
            (choice,) = choices(connection)  # the old reply and a new one are alike
        assert choice.replies == 2 and not choice.combination.auto_draft_tokens
        assert choice.combination.verifier == "token"


def test_db_02_a_newer_database_is_left_alone_with_a_message(tmp_path):
    path = tmp_path / "redline.db"
    with contextlib.closing(Store(path)) as opened:
        record(opened, "p")
    with open_database(path) as db:
        db["_sqlite_migrations"].insert(
            {"migration_set": "redline", "name": "m999_later", "applied_at": "later"}
        )
        db["replies"].add_column("wonder", str)
        assert is_newer(db)
        db.disable_wal()
    before = path.read_bytes()
    with contextlib.closing(Store(path)) as opened:
        record(opened, "p")
        assert "made by a later version of Redline and is left alone" in opened.problem
        assert opened.list_conversations() == ()
        assert not opened.delete_all()
        with pytest.raises(stored.StoreError, match="later version"), stored.reading(path):
            pass
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["redline.db"]


def test_reading_an_old_database_brings_it_up_to_date(tmp_path):
    path = tmp_path / "redline.db"
    old_database(path, NAMES[3])
    with stored.reading(path) as connection:
        assert connection.execute("SELECT alpha FROM replies").fetchall() == []


def test_a_migration_that_fails_leaves_the_database_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "redline.db"
    old_database(path, NAMES[1])
    later = type(migrations.migrations)("redline")
    for migration in list(migrations.migrations._migrations):
        later(name=migration.name)(migration.fn)

    @later()
    def m999_broken(db):
        db["conversations"].add_column("half", str)
        raise sqlite3.OperationalError("no such function: magic")

    monkeypatch.setattr(migrations, "migrations", later)
    with open_database(path) as db:
        with pytest.raises(sqlite3.OperationalError, match="magic"):
            migrate(db)
        assert applied(db) == NAMES[:1]
        assert "half" not in db["conversations"].columns_dict and not db["replies"].exists()


def test_programs_that_start_together_migrate_once(tmp_path):
    path, problems = tmp_path / "redline.db", []

    def start():
        with contextlib.closing(Store(path)) as opened:
            problems.append(opened.problem)

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == [None] * 6
    with open_database(path) as db:
        assert applied(db) == NAMES
