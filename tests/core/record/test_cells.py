"""Case NX-26: text stays text in the spreadsheets of every country, and comes back as it was."""

from __future__ import annotations

import contextlib
import csv
import random

import pytest

from core.export import ExportError, main, write_csv
from core.record.cells import DELIMITERS, Form, as_text, original
from core.record.store import Store
from tests.core.builders import answer, record, round_of, token

# What some spreadsheet in some country makes a number, a date, a time, a truth value or an error of.
CONVERTED = [
    "1/2", "MAR1", "00123", "1E5", "1e-5", "12:30", "12:30 pm", "5 a", "3-4", "3 - 2", "1.2.3",
    "1.5", "1,5", "1 000", "1'000", "1\u00a0000", "1\u202f000", "50%", "50 %", "$5", "5 €", "R$ 5",
    "kr 5", "EUR 5", "(5)", "5", " 2", "2\n", "007", "1 1/2", "2024-01-05", "5. Mai", "3. März",
    "12 Dezember 2020", "14 août", "3 Mrz 24", "2 de maio de 2020", "Sept 2", "1-ene", "5 okt",
    "1 янв", "3 kwi", "1月2日", "上午 3:00", "12h30", "１２", "１／２", "٥", "TRUE", " true", "False",
    "WAHR", "vrai", "FAŁSZ", "DOĞRU", "ИСТИНА", "#N/A", "#REF!", "#NAME?", "#BEZUG!",
    "Mon, 3 Mar 2020", "9" * 30, '"12"', "'12", "''1/2",
    # And what LibreOffice made values of in the language it ran in.
    "2026-11-30T22:30", "2026-11-30t22:30:36,5", "2026-11-30T22:30:36Z", "9" * 300, "1" * 70 + "e5",
    "9" * 70 + " €", "５：３０", "￥5", "5 ￥", "Rp 5", "﷼5", "5 Nachm.", "5:30 vorm.", "5 pop.", "5 ص",
    "3:04 م", "Dienstag, 23. Juni 2020", "Di 2020-05-05", "jueves 5/5/2020", "jeudi 3 décembre 2020",
    "segunda-feira, 2020-05-05", "lördag 3 oktober 2020", "ke 2020-05-05", "火曜日, 2020-05-05", "12 май",
    "5-май-20", "12 szeptember", "H 2020-05-05", "5.IV.2020", "1 x 2", "5 IV", "23 Ekim 2020 Cuma",
    "kovo/12", "99 spalio", "dets/99", "5 veljača", "kolovoza 2020", "iul./31", "5 януари 2020",
    "5 Σεπ 2020", "31-ינואר-20", "12/أبريل", "12 เมษายน", "12 ก.ย. 2020", "5 अगस्त", "12 मार्च",
    "31 грудня", "23. јул 2020", "5 Deireadh Fómhair 2020", "Dé Sathairn 23 Bealtaine 2020",
    "Awwissu-12", "Ġun/31", "ots. 99", "31 四月", "T 2020-05-05",
]  # fmt: skip

ORDINARY = [
    "the", " a0", " x1", "int8", "qwen2.5-7b", "v2", "SmolLM2-135M", "true story", "March", "[1]", "{2}",
    "x_1", "#", "# 1", "a1b2c3d4e5f60718293a4b5c6d7e8f90", "2026-11-30T22:30:36.123+00:00",
    "In 1999 it rained.", "gpt-4", "phi-4", "Chapter 5", "a1", "x -1", "cuda:0", "B 52", "T5", "ix2",
    "Do 5 things", "", " ", "é", "In the year 2525, if man is still alive, 12 3 4 5 6 7 8",
]  # fmt: skip


@pytest.mark.parametrize("text", CONVERTED)
def test_nx_26_what_a_spreadsheet_would_convert_is_kept_as_text(text):
    assert as_text(text) == f"'{text}" and original(as_text(text)) == text


@pytest.mark.parametrize("text", ORDINARY)
def test_nx_26_other_text_is_left_alone(text):
    assert as_text(text) == text and original(text) == text


def test_nx_26_whatever_was_written_is_read_back():
    draw = random.Random(26)
    letters = "'\"=+-@ \t\n\r0159eE/:.,%$€marMAR#!aptruefalsé年月１٥()\ufeff\u00a0"
    for _ in range(20_000):
        text = "".join(draw.choices(letters, k=draw.randrange(8)))
        assert original(as_text(text)) == text, repr(text)
    for text in CONVERTED + ORDINARY:
        for around in ("'", "''", '"', " ", "'\u00a0"):
            assert original(as_text(around + text)) == around + text


def read_back(path, delimiter, decimal):
    """As somebody reads the file in: text as it was, numbers as numbers."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        for row in csv.DictReader(file, delimiter=DELIMITERS[delimiter], strict=True):
            assert None not in row and None not in row.values()
            yield {
                **row,
                "text": original(row["text"]),
                "p": float(row["p"].replace(",", ".")) if row["p"] else None,
                "label": original(row["label"]) or None,
            }
            assert ("." in row["p"]) <= (decimal == "point")


@pytest.mark.parametrize(
    ("delimiter", "decimal"),
    [("comma", "point"), ("semicolon", "point"), ("semicolon", "comma"), ("tab", "point"), ("tab", "comma")],
)
def test_nx_26_every_form_gives_the_same_values_back(tmp_path, delimiter, decimal):
    texts = [*CONVERTED, *ORDINARY, "a;b", "a,b", "a\tb", 'say "so"', "two\r\nlines", "=1+1"]
    tokens = tuple(token("p", n, 0, n, text=text, label=text, p=0.1 + n / 7) for n, text in enumerate(texts))
    path = tmp_path / "tokens.csv"
    with contextlib.closing(Store(tmp_path / "redline.db")) as store:
        conversation = store.new_conversation()
        question = store.add_message(conversation, "user", "Hello?")
        answer(store, conversation, question, rounds=[round_of("", tokens=tokens)])
        kept = store.conversation(conversation).messages[1].replies[0].rounds[0].tokens
        assert write_csv(store, "tokens", path, delimiter=delimiter, decimal=decimal) == len(texts)
    rows = list(read_back(path, delimiter, decimal))
    assert [(row["text"], row["label"], row["p"]) for row in rows] == [
        (t.text, t.label or None, t.p) for t in kept
    ]
    assert path.read_text(encoding="utf-8-sig").startswith(f"session_id{DELIMITERS[delimiter]}reply_id")


def test_nx_26_the_command_takes_a_delimiter(tmp_path, capsys):
    with contextlib.closing(Store(tmp_path / "redline.db")) as store:
        record(store, "aab", question="1/2")
    out = tmp_path / "out.csv"
    common = ["--what", "replies", "--out", str(out), "--db", str(tmp_path / "redline.db")]
    assert main([*common, "--delimiter", "semicolon", "--decimal", "comma"]) == 0
    header, row = out.read_text(encoding="utf-8-sig").splitlines()
    assert header.startswith("session_id;") and ";'1/2;" in row and ";0,25;" in row
    assert main([*common, "--decimal", "comma"]) == 2
    assert "A comma cannot part both" in capsys.readouterr().err


def test_a_form_that_there_is_not_is_refused(tmp_path):
    for delimiter, decimal in (("pipe", "point"), ("tab", "slash"), ("comma", "comma")):
        with pytest.raises(ValueError, match=r"\.$"):
            Form(delimiter, decimal)
        with pytest.raises(ExportError):
            write_csv(tmp_path / "r.db", "tokens", tmp_path / "x", delimiter=delimiter, decimal=decimal)
