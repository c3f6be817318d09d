"""The record on disk: exact, whole or plainly not, and never in the way of the chat."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from core.figures.metrics import summarize
from core.record import store as store_module
from core.record import stored
from core.record import writer as writer_module
from core.record.store import Store
from core.records import Reply, Settings
from core.text.detokenise import clean_text
from tests.core.builders import PAIR, answer, record, reply_of, round_of, rounds_of, token

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "redline.db"


@pytest.fixture
def store(path):
    with contextlib.closing(Store(path)) as opened:
        yield opened


@pytest.fixture
def impatient(monkeypatch):
    """Waits for locks only as long as it takes to find that they are there."""
    monkeypatch.setattr(writer_module, "BUSY_SECONDS", 0.01)
    monkeypatch.setattr(writer_module, "BUSY_SECONDS_IN_TROUBLE", 0.01)


@contextlib.contextmanager
def locked(path):
    """Another connection holds the database, as another program would."""
    other = sqlite3.connect(path)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.rollback()
        other.close()


def rows(path, sql, *parameters):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute(sql, parameters).fetchall()


def count(path, table):
    return rows(path, f"SELECT count(*) FROM {table}")[0][0]


def only_reply(store, conversation):
    (_, message) = store.conversation(conversation).messages
    (reply,) = message.replies
    return reply


# --- What is written comes back


def test_a_conversation_comes_back_exactly(store):
    rounds = [
        round_of("aaxdr", 0, 0, domain="code"),
        round_of("p", 1, 3, num_draft_tokens_reason="length", finish_reason="length"),
    ]
    settings = Settings(
        temperature=0.3, top_k=40, top_p=0.9, num_draft_tokens=4, stop=("\n\n", "é"), seed=2**63 - 1
    )
    pair = dataclasses.replace(PAIR, exactness_note="Up to rounding.")
    written = reply_of(
        rounds, settings=settings, pair=pair, finish_reason="length", error="A sentence.", tail="\ufffd"
    )
    conversation = store.new_conversation("Be brief.", client="browser-1")
    question = store.add_message(conversation, "user", "  two\n lines\t")
    reply_id = store.begin_reply(conversation, question, settings, pair, "code", 10)
    for round_ in rounds:
        store.add_round(reply_id, round_)
    store.finish_reply(reply_id, written)

    found = store.conversation(conversation)
    assert (found.system_prompt, found.client) == ("Be brief.", "browser-1")
    user, assistant = found.messages
    assert (user.id, user.role, user.content, user.replies) == (question, "user", "  two\n lines\t", ())
    assert (assistant.role, assistant.content, assistant.parent_id) == ("assistant", written.text, question)
    (reply,) = assistant.replies
    assert (reply.id, reply.kind, reply.answers_reply_id) == (reply_id, "first", None)
    assert (reply.domain_choice, reply.system_prompt) == ("code", "Be brief.")
    assert reply.rounds == tuple(rounds)
    for name in (f.name for f in dataclasses.fields(Reply)):
        assert getattr(reply, name) == getattr(written, name), name
    assert reply.figures == summarize(rounds)
    assert store.problem is None


def test_what_the_template_had_written_and_what_was_reused_are_kept(store):
    conversation, *_ = record(store, "ab", opening="<think>\n", reused_tokens=7)
    (_, reply) = store.conversation(conversation).messages
    assert (reply.shown.opening, reply.shown.reused_tokens) == ("<think>\n", 7)


def test_a_pair_of_the_same_names_and_other_weights_was_not_measured(store, path):
    other = dataclasses.replace(PAIR, target_fingerprint="ee" * 32)
    assert not store.changed_since_measured(PAIR)  # nothing was measured yet
    record(store, "ab")
    assert not store.changed_since_measured(PAIR)
    assert store.changed_since_measured(other)
    assert store.changed_since_measured(dataclasses.replace(PAIR, draft_fingerprint="ee" * 32))
    assert not store.changed_since_measured(dataclasses.replace(other, draft="another draft"))
    record(store, "p", "p", pair=other)  # a plain reply says nothing of the draft
    assert store.changed_since_measured(other)
    record(store, "ab", pair=other)
    assert not store.changed_since_measured(other) and not store.changed_since_measured(PAIR)
    alone = dataclasses.replace(PAIR, draft="", draft_fingerprint="", drafter="plain")
    record(store, "p", pair=alone)
    assert not store.changed_since_measured(alone)
    assert store.changed_since_measured(dataclasses.replace(alone, target_fingerprint="ee" * 32))
    path.write_bytes(b"no database")
    assert not store.changed_since_measured(other)


def test_probabilities_keep_every_bit(store):
    p, q, u = 0.1 + 0.2, 1 / 3, 5e-324
    given = round_of("", tokens=(token("a", 0, 0, 0, p=p, q=q, u=u, overlap=2 / 3),))
    conversation, _, _ = record(store, rounds=[given])
    (found,) = only_reply(store, conversation).rounds
    assert found == given


def test_visible_text_ends_before_the_stop_string(store):
    rounds = rounds_of("aab")
    conversation, _, _ = record(store, rounds=rounds, visible_chars=4, finish_reason="stop_string")
    reply = only_reply(store, conversation)
    assert reply.visible_text == reply.text[:4] == " a0 "
    assert store.conversation(conversation).messages[1].content == " a0 "


def test_sd_16_colours_are_counters_are_the_row(store, path):
    conversation, _, reply_id = record(store, "aaaxr", "aaaab", "xdddr")
    (row,) = rows(path, "SELECT accepted, resampled, bonus, emitted, tokens_per_pass FROM replies")
    assert row == (7, 2, 1, 10, 10 / 3)
    fates = rows(path, "SELECT fate, count(*) FROM tokens GROUP BY fate ORDER BY fate")
    assert fates == [("accepted", 7), ("bonus", 1), ("discarded", 3), ("rejected", 2), ("resampled", 2)]


def test_sd_15_undefined_figures_are_null(store, path):
    record(store, "p")
    record(store)  # stopped before the first token
    for row in rows(path, "SELECT draft_acceptance_rate, alpha, acceptance_per_position FROM replies"):
        assert row == (None, None, None)
    assert rows(path, "SELECT ttft_seconds, emitted FROM replies WHERE rounds = 0") == [(None, 0)]


def test_settings_pair_and_exactness_stand_in_columns(store, path):
    record(store, "p", settings=Settings(seed=7, stop=("a", "b")))
    (row,) = rows(path, "SELECT seed, stop, exact, target_fingerprint, quantization, drafter FROM replies")
    assert row == (7, '["a", "b"]', 1, "ab" * 32, "int8", "model")


def test_a_question_answered_again(store):
    conversation, question, first = record(store, "aab")
    plain = answer(store, conversation, question, "p", "p", "p", kind="plain")
    message = store.conversation(conversation).messages[1]
    assert [(r.id, r.kind, r.answers_reply_id) for r in message.replies] == [
        (first, "first", None),
        (plain, "plain", first),
    ]
    assert message.shown.id == first and message.content == " a0 a1 b2"
    again = answer(store, conversation, question, "xr")
    message = store.conversation(conversation).messages[1]
    assert (message.replies[2].kind, message.replies[2].answers_reply_id) == ("regenerated", plain)
    assert message.shown.id == again and message.content == " r1"
    store.add_message(conversation, "user", "And then?")
    assert [m.role for m in store.conversation(conversation).messages] == ["user", "assistant", "user"]


def test_a_reply_that_answers_one_not_on_record_is_recorded(store):
    conversation = store.new_conversation()
    question = store.add_message(conversation, "user", "Why?")
    replies = [
        store.begin_reply(conversation, question, Settings(), PAIR, "auto", 3, answers_reply_id="gone")
        for _ in range(2)
    ]
    (_, message) = store.conversation(conversation).messages
    assert [reply.answers_reply_id for reply in message.replies] == [None, replies[0]]
    assert store.problem is None


def test_stored_content_of_the_message_follows_the_shown_reply(store, path):
    conversation, question, _ = record(store, "aab")
    answer(store, conversation, question, "p", kind="plain")
    assert rows(path, "SELECT content FROM messages WHERE role = 'assistant'") == [(" a0 a1 b2",)]
    answer(store, conversation, question, "xr")
    assert rows(path, "SELECT content FROM messages WHERE role = 'assistant'") == [(" r1",)]


def test_a_plain_reply_that_comes_first_is_the_shown_one(store, path):
    """A repetition stands beside what it repeats; without one before it there is nothing to stand beside."""
    conversation = store.new_conversation()
    question = store.add_message(conversation, "user", "Hello?")
    answer(store, conversation, question, "p", "p", kind="plain")
    assert rows(path, "SELECT content FROM messages WHERE role = 'assistant'") == [(" p0 p0",)]


def test_an_unknown_kind_is_refused(store):
    with pytest.raises(ValueError, match="kind is one of first, regenerated, plain"):
        store.begin_reply("c", "m", Settings(), PAIR, "auto", 1, kind="second")


def test_each_reply_keeps_the_system_prompt_it_was_made_with(store):
    conversation, _, _ = record(store, "p")
    store.set_system_prompt(conversation, "Be long.")
    answer(store, conversation, store.add_message(conversation, "user", "More"), "p")
    found = store.conversation(conversation)
    assert [m.shown.system_prompt for m in found.messages if m.replies] == ["Be brief.", "Be long."]
    assert found.system_prompt == "Be long."


def test_conversations_are_listed_newest_first_and_by_client(store):
    ids = []
    for client in ("a", "b", "a"):
        ids.append(store.new_conversation(client=client))
        store.add_message(ids[-1], "user", "x" * 100)
    store.new_conversation(client="a")  # nothing was said in it
    assert [c.id for c in store.list_conversations()] == ids[::-1]
    assert [c.id for c in store.list_conversations(client="a")] == [ids[2], ids[0]]
    (newest,) = store.list_conversations(1)
    assert (newest.id, newest.title, newest.num_messages, newest.num_replies) == (ids[2], "x" * 80, 1, 0)


def test_an_unknown_conversation_is_none(store):
    assert store.conversation("nobody") is None


def test_the_missing_folder_is_made(tmp_path):
    with contextlib.closing(Store(tmp_path / "a" / "b" / "redline.db")) as store:
        record(store, "p")
        assert store.problem is None
        assert (tmp_path / "a" / "b" / "redline.db").is_file()


def test_the_default_path_is_the_checkout_s_unless_named(monkeypatch, tmp_path):
    monkeypatch.delenv("REDLINE_DB", raising=False)
    assert store_module.default_path() == ROOT / "data" / "redline.db"
    monkeypatch.setenv("REDLINE_DB", str(tmp_path / "mine.db"))
    assert store_module.default_path() == tmp_path / "mine.db"


# --- Text


def test_db_04_text_that_utf_8_cannot_hold(store):
    for question in ("hi \ud83d", "a\x00b"):
        bad = round_of("", tokens=(token("p", 0, 0, 0, text=question, label=question),), text=question)
        conversation, _, _ = record(
            store, rounds=[bad], question=question, pair=dataclasses.replace(PAIR, draft=question)
        )
        found = store.conversation(conversation)
        assert [m.content for m in found.messages] == [clean_text(question)] * 2
        assert found.messages[1].shown.pair.draft == clean_text(question)
        assert found.messages[1].shown.rounds[0].tokens[0].label == clean_text(question)
    assert store.problem is None


def test_what_is_visible_stays_so_when_cleaning_shortens_the_text(store):
    conversation, _, _ = record(store, "p", text="\ud83d\ude00ab", visible_chars=3)
    reply = only_reply(store, conversation)
    assert (reply.text, reply.visible_text) == ("😀ab", "😀a")


# --- Killed


WRITER = """
import itertools, sys
from core.record.store import Store
from tests.core.builders import record, round_of
store = Store(sys.argv[1])
_, _, reply = record(store, finish=False)
for index in itertools.count():
    store.add_round(reply, round_of("aaxdr", index, 3 * index))
    print(index, flush=True)
"""


def test_a_killed_process_loses_at_most_the_round_in_flight(store, path):
    # The writer never stops by itself: it is killed while it writes.
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        said = next(int(line) for line in writer.stdout if int(line) >= 20)
    finally:
        writer.send_signal(signal.SIGKILL)
        said = max([said, *(int(line) for line in writer.communicate()[0].split() if line.isdigit())])
    (summary,) = store.list_conversations()
    reply = only_reply(store, summary.id)
    assert len(reply.rounds) - 1 in (said, said + 1)
    assert reply.rounds == tuple(round_of("aaxdr", i, 3 * i) for i in range(len(reply.rounds)))
    assert reply.finish_reason == "interrupted" and reply.seconds is None
    assert reply.text == reply.visible_text == " a0 a1 r4" * len(reply.rounds)
    assert store.conversation(summary.id).messages[1].content == reply.text
    assert rows(path, "SELECT finish_reason FROM replies") == [(None,)]
    record(store, "p")
    assert store.problem is None


def test_a_reply_killed_after_its_last_round_knows_how_it_ended(store):
    # The stop string "b" was completed by the last token; what is to be shown ends before it.
    last = round_of("ab", text=" a0 ", finish_reason="stop_string")
    conversation, _, _ = record(store, rounds=[last], finish=False)
    reply = only_reply(store, conversation)
    assert (reply.finish_reason, reply.text, reply.visible_text) == ("stop_string", " a0 b1", " a0 ")


def test_a_round_that_fails_halfway_leaves_no_row(store, path):
    twice = token("a", 0, 0, 0)
    record(store, rounds=[round_of("", tokens=(twice, twice))], finish=False)
    assert (count(path, "rounds"), count(path, "tokens")) == (0, 0)
    assert "UNIQUE" in store.problem


# --- Locked, full, read-only, gone


def test_db_01_twenty_threads_wait_for_another_process(path):
    store = Store(path)
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sqlite3, sys, time; c = sqlite3.connect(sys.argv[1]); c.execute('BEGIN IMMEDIATE');"
            "print('held', flush=True); time.sleep(3); c.rollback()",
            str(path),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "held\n"
    threads = [threading.Thread(target=record, args=(store, "aab", "p")) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    holder.communicate()
    store.close()
    assert (count(path, "replies"), count(path, "rounds"), count(path, "tokens")) == (20, 40, 80)
    assert rows(path, "SELECT count(*) FROM replies WHERE finish_reason IS NULL") == [(0,)]


def test_rounds_written_under_a_short_lock_are_held_and_written_at_the_end(impatient, store, path):
    rounds = rounds_of("aab", "xr", "p", "p")
    conversation, _, reply_id = record(store, rounds=rounds[:1], finish=False)
    with locked(path):
        store.add_round(reply_id, rounds[1])
        assert "Not recorded" in store.problem and "another program keeps it locked" in store.problem
        store.add_round(reply_id, rounds[2])
    store.add_round(reply_id, rounds[3])
    assert count(path, "rounds") == 1  # never the fourth without the second and third
    store.finish_reply(reply_id, reply_of(rounds))
    assert only_reply(store, conversation).rounds == tuple(rounds)
    assert store.problem is None


def test_what_could_not_be_written_at_all_reads_as_interrupted(impatient, store, path):
    rounds = rounds_of("aab", "xr")
    conversation, question, reply_id = record(store, rounds=rounds[:1], finish=False)
    with locked(path):
        store.add_round(reply_id, rounds[1])
        store.finish_reply(reply_id, reply_of(rounds))
        follow_up = store.add_message(conversation, "user", "And then?")
        lost = answer(store, conversation, follow_up, "p")
        assert store.problem
    next_question = store.add_message(conversation, "user", "Still there?")
    assert store.problem is None
    kept = answer(store, conversation, next_question, "p")
    messages = store.conversation(conversation).messages
    assert [m.content for m in messages if m.role == "user"] == ["Hello?", "And then?", "Still there?"]
    assert [(r.id, r.finish_reason, len(r.rounds)) for m in messages for r in m.replies] == [
        (reply_id, "interrupted", 1),
        (kept, "eos_token", 1),
    ]
    assert lost not in {r.id for m in messages for r in m.replies}


def test_messages_held_when_the_store_closes_are_written_then(impatient, path):
    store = Store(path)
    conversation = store.new_conversation()
    with locked(path):
        store.add_message(conversation, "user", "held")
    store.close()
    assert rows(path, "SELECT content FROM messages") == [("held",)]


@pytest.mark.parametrize("everything", [True, False])
def test_what_was_deleted_while_it_was_held_is_never_written(impatient, path, everything):
    store = Store(path)
    other = store.new_conversation()
    with locked(path):
        conversation = store.new_conversation()
        store.add_message(conversation, "user", "doomed")
        store.add_message(other, "user", "kept")
        assert not (store.delete_all() if everything else store.delete_conversation(conversation))
    store.add_message(other, "user", "later")
    left = [("later",)] if everything else [("kept",), ("later",)]
    assert rows(path, "SELECT content FROM messages ORDER BY number") == left
    assert (conversation,) not in rows(path, "SELECT id FROM conversations")


def test_db_05_a_full_disk(path, monkeypatch):
    limit = None
    connect = sqlite3.connect

    def connect_to_a_small_disk(*args, **kwargs):
        connection = connect(*args, **kwargs)
        if limit:
            connection.execute(f"PRAGMA max_page_count = {limit}")
        return connection

    monkeypatch.setattr(store_module.sqlite3, "connect", connect_to_a_small_disk)
    with contextlib.closing(Store(path)) as store:
        record(store, "p")
        limit = rows(path, "PRAGMA page_count")[0][0] + 1
        store.close()  # the next write finds the disk nearly full
        conversation, question, broken = record(store, *["aaxdr"] * 200)
        assert "the disk is full" in store.problem
        assert str(path) in store.problem and store.problem.endswith(".")
        limit = None
        kept = answer(store, conversation, question, "p")
        assert store.problem is None
        found = {r.id: r for m in store.conversation(conversation).messages for r in m.replies}
        assert found[kept].finish_reason == "eos_token"
        assert broken not in found or found[broken].finish_reason == "interrupted"


@contextlib.contextmanager
def as_nobody():
    """Without the rights of root, who may write to read-only files."""
    if os.geteuid() == 0:
        os.setegid(65534)
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)
            os.setegid(0)
    else:
        yield


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX permissions")
@pytest.mark.parametrize("folder_mode", [0o555, 0o777])
def test_db_05_a_read_only_file(folder_mode):
    folder = Path(tempfile.mkdtemp())  # not tmp_path: nobody else may look into that
    path = folder / "redline.db"
    try:
        store = Store(path)
        conversation, _, _ = record(store, "p")
        store.close()
        path.chmod(0o444)
        folder.chmod(folder_mode)
        with as_nobody():
            store = Store(path)
            assert "it cannot be written to (read-only)" in store.problem
            record(store, "p")
            assert only_reply(store, conversation).finish_reason == "eos_token"
        folder.chmod(0o777)
        for file in folder.iterdir():  # SQLite gives its log the rights of the database
            file.chmod(0o666)
        with as_nobody():
            record(store, "p")
            assert store.problem is None
        store.close()
        assert count(path, "replies") == 2  # the one before, and the one after
    finally:
        folder.chmod(0o777)
        shutil.rmtree(folder)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    store = Store(tmp_path / "file" / "redline.db")
    assert store.problem.startswith("Not recorded: the database")
    record(store, "p")
    assert store.list_conversations() == () and store.conversation("x") is None


def test_a_file_that_is_no_database_is_left_alone(path):
    path.write_bytes(b"Dear diary, this is not a database. " * 100)
    before = path.read_bytes()
    store = Store(path)
    record(store, "p")
    assert "not an SQLite database" in store.problem
    assert store.list_conversations() == ()
    store.close()
    assert path.read_bytes() == before


def test_a_file_removed_while_running_is_made_anew(store, path):
    record(store, "p")
    for file in path.parent.glob("redline.db*"):
        file.unlink()
    conversation, _, _ = record(store, "aab")
    assert store.problem is None
    assert only_reply(store, conversation).figures.emitted == 3


def test_many_threads_write_and_read_at_once(store, path):
    failures = []

    def chat():
        try:
            for _ in range(5):
                conversation, _, _ = record(store, "aab", "p")
                assert len(only_reply(store, conversation).rounds) == 2
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test must see it
            failures.append(error)

    threads = [threading.Thread(target=chat) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert count(path, "tokens") == 8 * 5 * 4


# --- Switched off


def test_nothing_is_written_while_recording_is_off(store, path):
    store.recording = False
    conversation, question, _ = record(store, "p")
    assert [count(path, table) for table in ("conversations", "messages", "replies")] == [0, 0, 0]
    store.recording = True
    # The question is not on record, so a reply to it could not be understood later.
    answer(store, conversation, question, "p")
    assert "the message it answers is not on record" in store.problem
    answer(store, conversation, store.add_message(conversation, "user", "Now"), "p")
    assert store.problem is None
    assert [m.content for m in store.conversation(conversation).messages] == ["Now", " p0"]


def test_a_store_that_never_records_makes_no_file(path):
    store = Store(path, recording=False)
    record(store, "p")
    assert store.delete_all() and store.list_conversations() == ()
    assert list(path.parent.iterdir()) == []


def test_switching_off_and_on_within_a_reply_leaves_no_gap(store):
    rounds = rounds_of("aab", "xr", "p")
    conversation, _, reply_id = record(store, rounds=rounds[:1], finish=False)
    store.recording = False
    store.add_round(reply_id, rounds[1])
    store.recording = True
    store.add_round(reply_id, rounds[2])
    store.finish_reply(reply_id, reply_of(rounds))
    reply = only_reply(store, conversation)
    assert (reply.rounds, reply.finish_reason) == (tuple(rounds[:1]), "interrupted")


def test_switching_off_forgets_what_is_held(impatient, store, path):
    with locked(path):
        record(store, "p")
        store.recording = False
        assert store.problem is None
    store.recording = True
    record(store, "p", question="after")
    assert rows(path, "SELECT content FROM messages WHERE role = 'user'") == [("after",)]


# --- Deleted


def files_hold(path, text):
    return any(text.encode() in file.read_bytes() for file in path.parent.glob("redline.db*"))


@pytest.mark.parametrize("everything", [True, False])
def test_deleted_text_is_really_gone(store, path, everything):
    kept, _, _ = record(store, "p", question="harmless")
    secrets = [record(store, *["aaxdr"] * 50, question=f"secret-{i} " * 200)[0] for i in range(5)]
    assert files_hold(path, "secret-3")
    if everything:
        assert store.delete_all()
        assert [count(path, t) for t in ("conversations", "messages", "replies", "rounds", "tokens")] == [
            0
        ] * 5
    else:
        assert all(store.delete_conversation(conversation) for conversation in secrets)
        assert [c.id for c in store.list_conversations()] == [kept]
        assert (count(path, "rounds"), count(path, "tokens")) == (1, 1)
    assert not files_hold(path, "secret")
    assert store.problem is None


@pytest.mark.parametrize("everything", [True, False])
def test_rounds_that_arrive_for_a_deleted_reply_are_dropped(store, path, everything):
    conversation, _, reply_id = record(store, "aab", finish=False)
    with contextlib.closing(Store(path)) as another:
        assert another.delete_all() if everything else another.delete_conversation(conversation)
    store.add_round(reply_id, round_of("p", 1, 3))
    store.finish_reply(reply_id, reply_of(rounds_of("aab", "p")))
    assert store.problem is None and count(path, "rounds") == 0
    conversation, _, reply_id = record(store, "aab", finish=False)
    assert store.delete_all() if everything else store.delete_conversation(conversation)
    store.add_round(reply_id, round_of("p", 1, 3))
    store.finish_reply(reply_id, reply_of(rounds_of("aab", "p")))
    assert store.problem is None and count(path, "rounds") == 0


def test_deleting_says_when_it_could_not(impatient, store, path):
    record(store, "p", question="secret")
    with locked(path):
        assert not store.delete_all()
        assert store.problem.startswith("Not deleted: the database")
    assert count(path, "messages") == 2
    assert store.delete_all() and store.problem is None


def test_deleting_says_when_a_reader_keeps_the_old_text(impatient, store, path):
    conversation, _, _ = record(store, "p", question="secret")
    with stored.reading(path) as reader:
        reader.execute("SELECT * FROM messages").fetchone()
        assert not store.delete_conversation(conversation)
        assert "another program is reading" in store.problem
    assert store.delete_all() and not files_hold(path, "secret")


def test_settings_are_stored_as_json_that_people_can_read(store, path):
    record(store, "p", settings=Settings(stop=("ß",)))
    ((stop,),) = rows(path, "SELECT stop FROM replies")
    assert "ß" in stop and json.loads(stop) == ["ß"]


# --- Scalars of other libraries


def scalars():
    import numpy as np
    import torch

    return {
        "float32": (np.float32(0.25), 0.25),
        "float64": (np.float64(0.25), 0.25),
        "float16": (np.float16(0.25), 0.25),
        "array": (np.array([0.25]), 0.25),
        "int64": (np.int64(3), 3),
        "tensor": (torch.tensor(0.25), 0.25),
        "bfloat16": (torch.tensor([0.25], dtype=torch.bfloat16), 0.25),
        "whole tensor": (torch.tensor(3), 3),
    }


@pytest.mark.parametrize(
    "kind", ["float32", "float64", "float16", "array", "int64", "tensor", "bfloat16", "whole tensor"]
)
def test_scalars_of_numpy_and_torch_become_numbers(store, path, kind):
    """They were stored as BLOBs, which the next export could not read."""
    value, meant = scalars()[kind]
    tokens = (
        token("a", 0, 0, 0, p=value, overlap=value, top_p=((scalars()["int64"][0], scalars()["tensor"][0]),)),
        token("b", 1, 1, 1),
    )
    round_ = dataclasses.replace(round_of("ab"), tokens=tokens, draft_seconds=value)
    reply = dataclasses.replace(reply_of([round_]), prefill_seconds=value, seconds=value)
    conversation, _, reply_id = record(
        store, rounds=[round_], prefill_seconds=value, settings=Settings(top_p=value)
    )
    assert store.problem is None and reply.seconds is value
    found = "SELECT typeof(p), p, typeof(overlap) FROM tokens ORDER BY id LIMIT 1"
    assert rows(path, found)[0][1] == meant and set(rows(path, found)[0]) <= {meant, "real", "integer"}
    kinds = {
        kind
        for table in ("rounds", "replies")
        for row in rows(path, f"SELECT * FROM {table}")
        for kind in map(type, row)
    }
    assert bytes not in kinds
    assert store.conversation(conversation).messages[1].shown.prefill_seconds == meant


@pytest.mark.parametrize(
    "value", [b"12", [1, 2], object(), 2**63, "many"], ids=["bytes", "list", "object", "too large", "text"]
)
def test_what_is_no_number_ends_the_record_of_that_reply_in_words(store, path, value):
    import numpy as np

    value = np.zeros(2) if value == "many" else value
    good, bad = round_of("ab"), dataclasses.replace(round_of("ab", 1, 2), context_tokens=value)
    _, _, reply_id = record(store, rounds=[good, bad])
    assert store.problem.startswith("Not recorded: context_tokens is a ")
    assert rows(path, "SELECT count(*) FROM rounds") == [(1,)]
    assert rows(path, "SELECT finish_reason FROM replies") == [(None,)]
    record(store, "ab")  # and the next is recorded
    assert store.problem is None and rows(path, "SELECT count(*) FROM rounds") == [(2,)]


def test_an_id_that_no_column_holds_is_refused(store, path):
    bad = dataclasses.replace(round_of("a"), tokens=(token("a", 0, 0, 0, top_p=((-1, 0.5),)),))
    record(store, rounds=[bad])
    assert store.problem.startswith("Not recorded: ") and rows(path, "SELECT count(*) FROM rounds") == [(0,)]
