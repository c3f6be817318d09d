"""CSV files that spreadsheets and pandas read as they were meant."""

import contextlib
import csv
import dataclasses
import json
import os
import sqlite3
import stat
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from core import export
from core.export import COLUMNS, ExportError, main, write_csv
from core.figures.metrics import FIGURE_NAMES, summarize
from core.record.cells import Form, as_text, original
from core.record.store import Store
from core.records import Settings
from tests.core.builders import PAIR, answer, record, round_of, rounds_of, token

ROOT = Path(__file__).resolve().parents[2]

FORMULAS = [
    "=1+1", "+1", "-1+1", "@SUM(1)", "\t=1+1", "\r=1+1", "\n=1+1", '=HYPERLINK("http://x","y")',
    "  =1", '"=1"', "'=1", "\u00a0+1", "＝1", "-",
]  # fmt: skip


@pytest.fixture
def store(tmp_path):
    with contextlib.closing(Store(tmp_path / "redline.db")) as opened:
        yield opened


def read(path):
    """Rows as dictionaries, read as RFC 4180 says."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        rows = list(csv.reader(file, strict=True))
    header = rows[0]
    assert all(len(row) == len(header) for row in rows)
    return [dict(zip(header, row, strict=True)) for row in rows[1:]]


def exported(store, what, tmp_path, session=None):
    out = tmp_path / f"{what}.csv"
    written = write_csv(store, what, out, session)
    rows = read(out)
    assert len(rows) == written
    return rows


def number(cell):
    return float(cell) if cell else None


def assert_identities(row):
    counts = {name: int(row[name]) for name in ("drafted", "accepted", "rejected", "discarded", "resampled",
                                                "bonus", "plain", "emitted")}  # fmt: skip
    assert counts["drafted"] == counts["accepted"] + counts["rejected"] + counts["discarded"]
    assert counts["emitted"] == counts["accepted"] + counts["resampled"] + counts["bonus"] + counts["plain"]


def a_varied_record(store):
    """Two sessions; the first has a reply in two domains, its plain repetition, and one that was killed."""
    mixed = rounds_of("aaxdr", "aab", "p")
    code = tuple(dataclasses.replace(t, domain="code", monospaced=True) for t in mixed[1].tokens)
    mixed[1] = dataclasses.replace(mixed[1], tokens=code)
    conversation, question, first = record(store, rounds=mixed)
    plain = answer(store, conversation, question, "p", "p", kind="plain")
    follow_up = store.add_message(conversation, "user", "And then?")
    killed = answer(store, conversation, follow_up, "xr", finish=False)
    other, _, empty = record(store)
    return conversation, other, {"first": first, "plain": plain, "killed": killed, "empty": empty}


# --- Figures and identities


@pytest.mark.parametrize("what", ["sessions", "replies", "rounds", "domains"])
def test_identities_hold_in_every_row(store, tmp_path, what):
    a_varied_record(store)
    rows = exported(store, what, tmp_path)
    assert rows
    for row in rows:
        assert_identities(row)


def test_identities_hold_for_the_tokens_of_every_reply(store, tmp_path):
    a_varied_record(store)
    tokens = exported(store, "tokens", tmp_path)
    for reply in exported(store, "replies", tmp_path):
        fates = [t["fate"] for t in tokens if t["reply_id"] == reply["reply_id"]]
        for fate in ("accepted", "rejected", "discarded", "resampled", "bonus", "plain"):
            assert fates.count(fate) == int(reply[fate])
        indexes = [
            int(t["emitted_index"])
            for t in tokens
            if t["reply_id"] == reply["reply_id"] and t["emitted_index"]
        ]
        assert indexes == list(range(int(reply["emitted"])))


def test_sessions_have_a_row_of_their_own_one_a_reply_and_one_a_domain(store, tmp_path):
    conversation, other, ids = a_varied_record(store)
    rows = exported(store, "sessions", tmp_path)
    assert [(r["row"], r["session_id"], r["reply_id"], r["domain"], r["kind"]) for r in rows] == [
        ("session", conversation, "", "", ""),
        ("reply", conversation, ids["first"], "", "first"),
        ("domain", conversation, ids["first"], "code", "first"),
        ("domain", conversation, ids["first"], "prose", "first"),
        ("reply", conversation, ids["plain"], "", "plain"),
        ("domain", conversation, ids["plain"], "prose", "plain"),
        ("reply", conversation, ids["killed"], "", "first"),
        ("domain", conversation, ids["killed"], "prose", "first"),
        ("session", other, "", "", ""),
        ("reply", other, ids["empty"], "", "first"),
    ]
    assert [r["replies"] for r in rows if r["row"] == "session"] == ["3", "1"]
    assert [r["finish_reason"] for r in rows if r["row"] == "reply"] == [
        "eos_token", "eos_token", "interrupted", "eos_token",
    ]  # fmt: skip
    for name in ("rounds", "drafted", "emitted", "decode_seconds"):
        per_reply = [number(r[name]) for r in rows if r["row"] == "reply"]
        for kind in ("session", "domain"):
            assert sum(number(r[name]) for r in rows if r["row"] == kind) == sum(per_reply)


def test_every_figure_is_that_of_the_metrics(store, tmp_path):
    rounds = rounds_of("aaxdr", "aab", "p")
    record(store, rounds=rounds)
    expected = summarize(rounds).as_row()
    for row in exported(store, "sessions", tmp_path) + exported(store, "replies", tmp_path):
        for name in FIGURE_NAMES:
            if isinstance(expected[name], str):
                assert json.loads(row[name]) == json.loads(expected[name])
            else:
                assert number(row[name]) == expected[name], name


def test_exported_figures_are_those_in_the_database(store, tmp_path):
    a_varied_record(store)
    with contextlib.closing(sqlite3.connect(store.path)) as connection:
        connection.row_factory = sqlite3.Row
        stored = {
            r["id"]: r for r in connection.execute("SELECT * FROM replies WHERE finish_reason IS NOT NULL")
        }
    compared = 0
    for row in exported(store, "replies", tmp_path):
        if row["reply_id"] in stored:
            for name in FIGURE_NAMES:
                assert row[name] == str(
                    "" if stored[row["reply_id"]][name] is None else stored[row["reply_id"]][name]
                )
                compared += 1
    assert compared == 3 * len(FIGURE_NAMES)


def test_undefined_figures_are_empty(store, tmp_path):
    record(store, "p", "p")
    (row,) = exported(store, "replies", tmp_path)
    empty = {name for name in FIGURE_NAMES if row[name] == ""}
    assert empty == {
        "draft_acceptance_rate", "tested_acceptance_rate", "acceptance_per_position",
        "conditional_acceptance", "mean_acceptance_length", "alpha", "drift",
    }  # fmt: skip
    assert (row["drafted"], row["tokens_per_pass"], row["error"]) == ("0", "1.0", "")


def test_what_was_read_already_is_told_and_empty_where_it_is_not_known(store, tmp_path):
    record(store, "aab", reused_tokens=0)
    record(store, "aab", reused_tokens=7)
    record(store, "aab", finish=False)
    assert [row["reused_tokens"] for row in exported(store, "replies", tmp_path)] == ["0", "7", ""]
    rows = exported(store, "sessions", tmp_path)
    assert [row["reused_tokens"] for row in rows if row["row"] == "reply"] == ["0", "7", ""]


def test_replies_say_how_they_were_made(store, tmp_path):
    settings = Settings(
        temperature=0.0, top_k=5, top_p=0.5, stop=("\n", "é"), seed=2**63 - 1, num_draft_tokens=7
    )
    record(store, "aab", settings=settings, visible_chars=3, domain="maths", question="Hi\r\n")
    (row,) = exported(store, "replies", tmp_path)
    assert (row["question"], row["visible_text"], row["system_prompt"]) == ("Hi\r\n", " a0", "Be brief.")
    assert (row["seed"], row["temperature"], row["num_draft_tokens"]) == ("9223372036854775807", "0.0", "7")
    assert (row["exact"], row["domain_choice"], json.loads(row["stop"])) == ("1", "maths", ["\n", "é"])
    assert (row["target"], row["target_fingerprint"]) == (PAIR.target, PAIR.target_fingerprint)


def test_tokens_have_all_their_figures_and_top_tens_as_json(store, tmp_path):
    given = token("x", 0, 0, p=1 / 3, q=0.1 + 0.2, u=5e-324, top_p=((49151, 0.5), (2, 0.25)), label="▁")
    record(store, rounds=[round_of("", tokens=(given, token("d", 1, 1), token("r", 2, 0, 0)))])
    rejected, discarded, resampled = exported(store, "tokens", tmp_path)
    assert (number(rejected["p"]), number(rejected["q"]), number(rejected["u"])) == (1 / 3, 0.1 + 0.2, 5e-324)
    assert json.loads(rejected["top_p"]) == [[49151, 0.5], [2, 0.25]]
    assert (rejected["id"], rejected["text"], rejected["label"], rejected["fate"]) == (
        "1000",
        " x0",
        "▁",
        "rejected",
    )
    assert (discarded["p"], discarded["u"], discarded["top_p"], discarded["emitted_index"]) == (
        "",
        "",
        "",
        "",
    )
    assert (resampled["q"], resampled["position"], resampled["monospaced"]) == ("", "0", "0")


def test_files_join_on_ids_and_indexes(store, tmp_path):
    a_varied_record(store)
    rounds = exported(store, "rounds", tmp_path)
    keys = {(r["session_id"], r["reply_id"], r["round_index"]): r for r in rounds}
    assert len(keys) == len(rounds)
    tokens = exported(store, "tokens", tmp_path)
    assert {(t["session_id"], t["reply_id"], t["round_index"]) for t in tokens} == set(keys)
    first = rounds[0]
    assert (first["num_draft_tokens"], first["num_draft_tokens_reason"], first["domain"]) == (
        "4",
        "fixed",
        "prose",
    )
    assert number(first["draft_seconds"]) == 0.25


def test_one_session_alone(store, tmp_path):
    conversation, other, _ = a_varied_record(store)
    for what in ("sessions", "replies", "rounds", "tokens"):
        assert {r["session_id"] for r in exported(store, what, tmp_path, conversation)} == {conversation}
    assert [r["row"] for r in exported(store, "sessions", tmp_path, other)] == ["session", "reply"]


def test_rows_in_the_write_ahead_log_are_exported(store, tmp_path):
    record(store, "p")
    assert (tmp_path / "redline.db-wal").stat().st_size > 0
    assert len(exported(store, "tokens", tmp_path)) == 1


# --- Domains


def test_domains_have_a_row_for_each_combination_and_domain(store, tmp_path):
    conversation, _, _ = a_varied_record(store)
    rows = exported(store, "domains", tmp_path)
    settings = [(r["num_draft_tokens"], r["domain"], r["replies"]) for r in rows]
    assert settings == [("3", "code", "1"), ("3", "prose", "3")]
    alone = exported(store, "domains", tmp_path, conversation)
    assert [(r["domain"], r["replies"]) for r in alone] == [("code", "1"), ("prose", "3")]
    sessions = [r for r in exported(store, "sessions", tmp_path) if r["row"] == "session"]
    for name in ("rounds", "drafted", "tested", "emitted", "decode_seconds"):
        assert sum(number(r[name]) for r in rows) == sum(number(r[name]) for r in sessions), name
    code = rows[0]
    assert (code["exact"], code["temperature"], code["filter_settings"]) == ("1", "0.7", "1")
    assert (code["target_fingerprint"], code["device"]) == (PAIR.target_fingerprint, "cpu")


def test_k_chosen_automatically_is_told_from_a_fixed_one(store, tmp_path):
    for auto in (False, True):
        record(store, "aab", settings=Settings(num_draft_tokens=8, auto_draft_tokens=auto))
    for what in ("domains", "replies"):
        rows = exported(store, what, tmp_path)
        assert {(row["num_draft_tokens"], row["auto_draft_tokens"]) for row in rows} == {
            ("8", "0"),
            ("8", "1"),
        }


def test_domains_have_intervals_and_plain_speed_where_these_are_known(store, tmp_path):
    for words in ("aab", "xr"), ("aab", "aab"):
        record(store, *words)
    for _ in range(2):
        record(store, "p", settings=Settings(num_draft_tokens=0))
    plain, drafted = exported(store, "domains", tmp_path)
    rate = [number(drafted[f"draft_acceptance_rate{end}"]) for end in ("_low", "", "_high")]
    assert rate == [pytest.approx(2 / 3), 6 / 7, 1.0]
    assert (drafted["plain_replies"], number(drafted["plain_tokens_per_second"])) == ("2", 1.6)
    speed = number(drafted["tokens_per_second"])
    assert number(drafted["measured_speedup"]) == pytest.approx(speed / 1.6)
    assert drafted["plain_tokens_per_second_low"] == ""  # the two do not differ: no interval of no width
    empty = {name for name, cell in plain.items() if cell == ""}
    ends = ("", "_low", "_high")
    undefined = ("draft_acceptance_rate", "alpha", "plain_tokens_per_second", "measured_speedup")
    assert {name + end for name in undefined for end in ends} <= empty
    assert (plain["drafted"], plain["tokens_per_pass"], plain["tokens_per_pass_low"]) == ("0", "1.0", "")


# --- CS-01: formulas


@pytest.mark.parametrize("text", FORMULAS)
def test_cs_01_text_that_begins_like_a_formula_is_neutralised_wherever_it_stands(store, tmp_path, text):
    bad = round_of("", tokens=(token("p", 0, 0, 0, text=text, label=text),), text=text)
    conversation = store.new_conversation(text)
    question = store.add_message(conversation, "user", text)
    pair = dataclasses.replace(PAIR, target=text, draft=text)
    answer(store, conversation, question, rounds=[bad], pair=pair)
    (reply,) = exported(store, "replies", tmp_path)
    for name in ("question", "visible_text", "system_prompt", "target", "draft"):
        assert reply[name] == "'" + text
    (row,) = exported(store, "tokens", tmp_path)
    assert (row["text"], row["label"]) == ("'" + text, "'" + text)
    assert store.conversation(conversation).messages[0].content == text  # the database keeps the raw text


def test_cs_01_other_text_and_all_numbers_are_left_alone(store, tmp_path):
    for text in ("a=1", "x -1", "'quoted'", "b - 2", "", "[1]"):
        assert as_text(text) == text
    assert Form().cell(-1.5) == -1.5
    below_zero = round_of("p", overhead_seconds=-0.001)  # a clock that was set back
    record(store, rounds=[below_zero])
    assert exported(store, "rounds", tmp_path)[0]["overhead_seconds"] == "-0.001"


@pytest.mark.parametrize("text", [*FORMULAS, "'", "''=1", "'\t", "'abc", "' '=", "plain", ""])
def test_cs_01_the_apostrophe_can_be_taken_away_again(text):
    assert original(as_text(text)) == text


# --- CS-03: line breaks, quotes, rows


def test_cs_03_line_breaks_and_quotes_come_back(store, tmp_path, monkeypatch):
    def open_as_on_windows(*args, newline=None, **kwargs):
        return open(*args, newline="\r\n" if newline is None else newline, **kwargs)

    monkeypatch.setattr(export, "open", open_as_on_windows, raising=False)
    text = 'a\r\nb,"c"\rd\n\ne'
    record(store, "p", question=text)
    record(store, "p", question=text)
    rows = exported(store, "replies", tmp_path)
    assert [r["question"] for r in rows] == [text, text]
    raw = (tmp_path / "replies.csv").read_bytes()
    assert raw.endswith(b"\r\n") and b"\r\r\n" not in raw and b"\n\r\n" not in raw


@pytest.mark.parametrize("what", COLUMNS)
def test_cs_03_an_empty_database_gives_the_header_only(store, tmp_path, what):
    store.new_conversation()  # in which nothing was said
    assert exported(store, what, tmp_path) == []
    header = (tmp_path / f"{what}.csv").read_text(encoding="utf-8-sig")
    assert header.rstrip("\n").split(",") == list(COLUMNS[what])


def test_cs_03_fifty_thousand_rows_in_bounded_memory(store, tmp_path):
    _, _, reply = record(store, finish=False)
    with contextlib.closing(sqlite3.connect(store.path)) as connection, connection:
        # Written by SQL, because only reading is tried here.
        connection.execute(
            "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 9999) "
            "INSERT INTO rounds SELECT i + 1, ?, i, 5, 'fixed', '', i, 0, 0, 0, NULL, NULL FROM n",
            [reply],
        )
        connection.execute(
            "WITH k(j) AS (VALUES (0), (1), (2), (3), (4)) "
            "INSERT INTO tokens SELECT id, j, j, 'x', NULL, 'accepted', j, NULL, NULL, "
            "0.5, 0.5, 0.5, 0.5, 1, 1, 0.5, NULL, NULL, 'prose', 0, NULL, NULL FROM rounds, k"
        )
    tracemalloc.start()
    try:
        assert write_csv(store, "tokens", tmp_path / "tokens.csv") == 50_000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    size = (tmp_path / "tokens.csv").stat().st_size
    assert size > 5_000_000
    assert peak < size / 10


# --- CS-04: the byte order mark


def test_cs_04_one_byte_order_mark(store, tmp_path):
    text = "你好 ñ 😀 עברית"
    record(store, "p", question=text)
    out = tmp_path / "replies.csv"
    for _ in range(2):  # a second export to the same file replaces the first
        write_csv(store, "replies", out)
        raw = out.read_bytes()
        assert raw.startswith(b"\xef\xbb\xbf") and raw.count(b"\xef\xbb\xbf") == 1
        (row,) = read(out)
        assert row["question"] == text and next(iter(row)) == "session_id"
        assert raw.decode("utf-8")[1:] == raw.decode("utf-8-sig")


# --- Files and the command


def test_a_failed_export_leaves_the_old_file_and_no_half_one(store, tmp_path, monkeypatch):
    record(store, "p")
    folder = tmp_path / "out"
    folder.mkdir()
    out = folder / "tokens.csv"
    out.write_text("before")

    def broken(connection, session_id):
        yield {"text": "half"}
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setitem(export._ROWS, "tokens", broken)
    with pytest.raises(ExportError, match="cannot be read to its end: disk I/O error"):
        write_csv(store, "tokens", out)
    assert [file.name for file in folder.iterdir()] == ["tokens.csv"]
    assert out.read_text() == "before"


@pytest.mark.parametrize("end", ["", "-wal", "-shm"])
def test_the_database_is_never_replaced_by_an_export(store, tmp_path, end, capsys):
    record(store)
    link = tmp_path / "link.csv"
    link.symlink_to(f"{store.path}{end}")
    for out in (f"{store.path}{end}", link):
        assert main(["--what", "tokens", "--db", str(store.path), "--out", str(out)]) == 2
        assert capsys.readouterr().err == f"{out} belongs to the database: name another file.\n"
    assert store.list_conversations() and store.problem is None


def test_a_link_is_written_through(store, tmp_path):
    record(store)
    link, real = tmp_path / "link.csv", tmp_path / "real.csv"
    link.symlink_to(real)
    write_csv(store, "sessions", link)
    assert link.is_symlink() and read(real)


@pytest.mark.skipif(os.name == "nt", reason="named pipes are in no folder there")
def test_what_is_no_file_is_written_into_and_not_replaced(store, tmp_path):
    record(store)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as cat:
        write_csv(store, "sessions", pipe)
        said, _ = cat.communicate()
    write_csv(store, "sessions", tmp_path / "file.csv")
    assert said == (tmp_path / "file.csv").read_bytes() and stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_long_name_is_no_trouble(store, tmp_path):
    record(store)
    write_csv(store, "sessions", tmp_path / f"{'x' * 240}.csv")
    assert len(list(tmp_path.glob("*.csv"))) == 1


@pytest.mark.parametrize("out", ["", "missing/x.csv", "file/x.csv"])
def test_a_place_that_cannot_be_written_gets_a_sentence(store, tmp_path, out, capsys):
    (tmp_path / "file").write_text("in the way")
    status = main(["--what", "tokens", "--out", str(tmp_path / out), "--db", str(store.path)])
    message = capsys.readouterr().err
    assert status == 2
    assert str(tmp_path / out) in message and message.count("\n") == 1 and message.endswith(".\n")


def test_an_unknown_session_gets_a_sentence(store, tmp_path, capsys):
    arguments = ["--what", "tokens", "--out", str(tmp_path / "x.csv"), "--db", str(store.path)]
    assert main([*arguments, "--session", "nobody"]) == 2
    assert capsys.readouterr().err == f"There is no session nobody in {store.path}.\n"
    assert not (tmp_path / "x.csv").exists()


def test_a_session_of_bytes_that_are_no_text_gets_a_sentence(store, tmp_path, capsys):
    arguments = ["--what", "tokens", "--out", str(tmp_path / "x.csv"), "--db", str(store.path)]
    assert main([*arguments, "--session", "\udcff"]) == 2
    assert capsys.readouterr().err == f"There is no session \ufffd in {store.path}.\n"


def test_no_database_gets_a_sentence_and_is_not_made(tmp_path, capsys):
    arguments = ["--what", "tokens", "--out", str(tmp_path / "x.csv"), "--db", str(tmp_path / "none.db")]
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"There is no database {tmp_path / 'none.db'} yet.\n"
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_kind_of_export_is_refused(store, tmp_path):
    with pytest.raises(ExportError, match="tokens, domains, comparisons, not 'all'"):
        write_csv(store, "all", tmp_path / "x.csv")


def test_the_command(store, tmp_path):
    conversation, _, _ = a_varied_record(store)
    out = tmp_path / ".hidden" / "sessions.csv"
    out.parent.mkdir()
    options = ["--what", "sessions", "--out", out, "--session", conversation, "--db", store.path]
    done = subprocess.run(
        [sys.executable, "-m", "core.export", *options],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"8 rows written to {out}.\n"
    assert len(read(out)) == 8


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX permissions")
def test_the_file_gets_the_rights_of_a_new_file(store, tmp_path):
    (tmp_path / "reference").touch()
    write_csv(store, "tokens", tmp_path / "x.csv")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("reference", "x.csv")]
    assert modes[0] == modes[1]
