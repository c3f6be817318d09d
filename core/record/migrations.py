"""The database's schema, as named migrations that are only ever appended.

A database carries the names of the migrations it has been through (table ``_sqlite_migrations``, kept by
sqlite-utils). ``migrate`` applies what is missing, all of it or nothing; ``is_newer`` tells a database that a
later Redline made, which is left alone. Never change or remove a migration that has been released: add one.

Column names are the field names of ``core.records`` and ``core.figures.metrics``. Times are ISO 8601 in UTC.
An undefined figure is NULL. A reply whose ``finish_reason`` is NULL has no end on record: it is still being
written, or the process was killed.
"""

from __future__ import annotations

from functools import cache

from sqlite_utils import Database, Migrations

migrations = Migrations("redline")


@migrations()
def m001_conversations_and_messages(db: Database) -> None:
    db.executescript("""
        CREATE TABLE conversations (
            id TEXT PRIMARY KEY,
            created TEXT NOT NULL,
            client TEXT,
            system_prompt TEXT NOT NULL DEFAULT ''
        );
        CREATE INDEX idx_conversations_client ON conversations (client, created);
        CREATE TABLE messages (
            id TEXT PRIMARY KEY,
            conversation_id TEXT NOT NULL REFERENCES conversations(id) ON DELETE CASCADE,
            number INTEGER NOT NULL,
            parent_id TEXT REFERENCES messages(id) ON DELETE SET NULL,
            role TEXT NOT NULL,
            content TEXT NOT NULL,
            created TEXT NOT NULL
        );
        CREATE UNIQUE INDEX idx_messages_number ON messages (conversation_id, number);
        CREATE INDEX idx_messages_parent ON messages (parent_id);
    """)


@migrations()
def m002_replies(db: Database) -> None:
    # message_id is the assistant's message that the reply is a version of; that message's parent is the
    # question.
    db.executescript("""
        CREATE TABLE replies (
            id TEXT PRIMARY KEY,
            conversation_id TEXT NOT NULL REFERENCES conversations(id) ON DELETE CASCADE,
            message_id TEXT NOT NULL REFERENCES messages(id) ON DELETE CASCADE,
            number INTEGER NOT NULL,
            kind TEXT NOT NULL,
            answers_reply_id TEXT REFERENCES replies(id) ON DELETE SET NULL,
            created TEXT NOT NULL,
            system_prompt TEXT NOT NULL,
            pair TEXT NOT NULL,
            target TEXT NOT NULL,
            draft TEXT NOT NULL,
            target_fingerprint TEXT NOT NULL,
            draft_fingerprint TEXT NOT NULL,
            quantization TEXT NOT NULL,
            draft_quantization TEXT NOT NULL,
            device TEXT NOT NULL,
            drafter TEXT NOT NULL,
            context_length INTEGER NOT NULL,
            draft_context_length INTEGER NOT NULL,
            exactness_note TEXT,
            temperature REAL NOT NULL,
            top_k INTEGER NOT NULL,
            top_p REAL NOT NULL,
            num_draft_tokens INTEGER NOT NULL,
            max_new_tokens INTEGER NOT NULL,
            stop TEXT NOT NULL,
            seed INTEGER NOT NULL,
            verifier TEXT NOT NULL,
            exact INTEGER NOT NULL,
            domain_choice TEXT NOT NULL,
            prompt_tokens INTEGER NOT NULL,
            prefill_seconds REAL,
            ttft_seconds REAL,
            seconds REAL,
            finish_reason TEXT,
            error TEXT,
            text TEXT,
            visible_chars INTEGER,
            tail TEXT
        );
        CREATE UNIQUE INDEX idx_replies_number ON replies (message_id, number);
        CREATE INDEX idx_replies_conversation ON replies (conversation_id, created);
        CREATE INDEX idx_replies_answers ON replies (answers_reply_id);
    """)


@migrations()
def m003_rounds_and_tokens(db: Database) -> None:
    # top_p and top_q: see stored.pack_top. p, q, u and their like are REAL, which holds a float64 exactly.
    db.executescript("""
        CREATE TABLE rounds (
            id INTEGER PRIMARY KEY,
            reply_id TEXT NOT NULL REFERENCES replies(id) ON DELETE CASCADE,
            "index" INTEGER NOT NULL,
            num_draft_tokens INTEGER NOT NULL,
            num_draft_tokens_reason TEXT NOT NULL,
            text TEXT NOT NULL,
            context_tokens INTEGER NOT NULL,
            draft_seconds REAL NOT NULL,
            target_seconds REAL NOT NULL,
            overhead_seconds REAL NOT NULL,
            finish_reason TEXT
        );
        CREATE UNIQUE INDEX idx_rounds_index ON rounds (reply_id, "index");
        CREATE TABLE tokens (
            round_id INTEGER NOT NULL REFERENCES rounds(id) ON DELETE CASCADE,
            "index" INTEGER NOT NULL,
            id INTEGER NOT NULL,
            text TEXT NOT NULL,
            label TEXT,
            fate TEXT NOT NULL,
            position INTEGER NOT NULL,
            parent INTEGER,
            emitted_index INTEGER,
            p REAL,
            q REAL,
            u REAL,
            overlap REAL,
            entropy_p REAL,
            entropy_q REAL,
            p_raw REAL,
            top_p BLOB,
            top_q BLOB,
            domain TEXT NOT NULL,
            monospaced INTEGER NOT NULL,
            PRIMARY KEY (round_id, "index")
        ) WITHOUT ROWID;
    """)


@migrations()
def m004_reply_figures(db: Database) -> None:
    # Of the reply's rounds, written when it ends, for whoever reads the file with SQL alone.
    columns = {
        int: "rounds rounds_with_drafts drafted accepted rejected discarded tested "
        "resampled bonus plain emitted",
        float: "draft_acceptance_rate tested_acceptance_rate mean_acceptance_length tokens_per_pass alpha "
        "draft_seconds target_seconds overhead_seconds decode_seconds tokens_per_second",
        str: "acceptance_per_position conditional_acceptance",
    }
    for kind, names in columns.items():
        for name in names.split():
            db["replies"].add_column(name, kind)


@migrations()
def m005_any_pair(db: Database) -> None:
    # What replies of the embedded pair, all there was before, had without saying so.
    replies = db["replies"]
    replies.add_column("min_p", float, not_null_default=0.0)
    replies.add_column("repetition_penalty", float, not_null_default=1.0)
    replies.add_column("dtype", str, not_null_default="float32")
    replies.add_column("draft_dtype", str, not_null_default="float32")
    replies.add_column("reused_tokens", int)
    replies.add_column("opening", str, not_null_default="")


@migrations()
def m006_block_verification(db: Database) -> None:
    db["tokens"].add_column("h", float)


@migrations()
def m007_auto_draft_tokens(db: Database) -> None:
    db["replies"].add_column("auto_draft_tokens", int, not_null_default=0)


@migrations()
def m008_drafters_and_lossy_rules(db: Database) -> None:
    db["replies"].add_column("acceptance_threshold", float)
    db["replies"].add_column("tree_width", int, not_null_default=1)
    db["replies"].add_column("drift", float)
    db["tokens"].add_column("drift", float)
    rounds = db["rounds"]
    rounds.add_column("drafter", str)
    # Only drafting models proposed anything until now.
    db.execute("""
        UPDATE rounds SET drafter = 'model' WHERE EXISTS (
            SELECT 1 FROM tokens WHERE round_id = rounds.id AND fate IN ('accepted', 'rejected', 'discarded')
        )
    """)


@migrations()
def m009_comparisons(db: Database) -> None:
    # settings: those of core.records.Settings, as JSON. A reply has the sums its figures are made of.
    db.executescript("""
        CREATE TABLE comparisons (
            id TEXT PRIMARY KEY,
            created TEXT NOT NULL,
            pair TEXT NOT NULL,
            target TEXT NOT NULL,
            settings TEXT NOT NULL,
            exact INTEGER NOT NULL,
            prompts INTEGER NOT NULL,
            complete INTEGER NOT NULL
        );
        CREATE TABLE compared_replies (
            comparison_id TEXT NOT NULL REFERENCES comparisons(id) ON DELETE CASCADE,
            number INTEGER NOT NULL,
            drafter TEXT NOT NULL,
            draft TEXT NOT NULL,
            domain TEXT NOT NULL,
            prompt_id TEXT NOT NULL,
            rounds INTEGER NOT NULL,
            rounds_with_drafts INTEGER NOT NULL,
            accepted INTEGER NOT NULL,
            rejected INTEGER NOT NULL,
            discarded INTEGER NOT NULL,
            resampled INTEGER NOT NULL,
            bonus INTEGER NOT NULL,
            plain INTEGER NOT NULL,
            overlaps INTEGER NOT NULL,
            overlap REAL NOT NULL,
            draft_seconds REAL NOT NULL,
            target_seconds REAL NOT NULL,
            overhead_seconds REAL NOT NULL,
            PRIMARY KEY (comparison_id, number)
        ) WITHOUT ROWID;
    """)


def is_newer(db: Database) -> bool:
    """Whether a later Redline made this database: it has been through a migration that is not known here."""
    return any(migration.name not in _known() for migration in migrations.applied(db))


def migrate(db: Database) -> None:
    """Brings the database up to date, in one transaction; does nothing, not even lock, when it is.

    The caller holds no transaction and has not switched ``foreign_keys`` on. Raises ``sqlite3.Error``.
    """
    if not migrations.pending(db):
        return
    db.conn.execute("BEGIN IMMEDIATE")  # so that of two processes that start together only one migrates
    try:
        migrations.apply(db)
        db.commit()
    finally:
        db.rollback()


@cache
def _known() -> frozenset[str]:
    with Database(memory=True, execute_plugins=False) as empty:
        return frozenset(migration.name for migration in migrations.pending(empty))
