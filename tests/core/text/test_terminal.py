"""A reply drawn in a terminal: the marks, what waits for a stop string, and text that would be a command."""

import io
import itertools
import re
import sys

import pytest

from core.records import Fate
from core.text.terminal import (
    MARKS,
    PlainWriter,
    RedlineWriter,
    legend,
    mark,
    printable,
    progress_printer,
    put_out,
    use_utf8,
)
from tests.core.builders import reply_of, round_of, rounds_of, token

SGR = re.compile(r"\x1b\[[0-9;]*m")


def written(make_writer, rounds, reply):
    out = io.StringIO()
    writer = make_writer(out)
    for round_ in rounds:
        writer.round(round_)
    writer.end(reply or reply_of(rounds))
    return out.getvalue()


def drawn(rounds, reply=None, **options):
    options = {"colour": False, "discarded": False, "plain_marked": True, **options}
    return written(lambda out: RedlineWriter(out, **options), rounds, reply)


def plainly(rounds, reply=None):
    return written(PlainWriter, rounds, reply)


def test_every_fate_has_its_own_mark_without_colour():
    attributes = [attribute for attribute, _ in MARKS.values()]
    assert len(set(attributes)) == len(Fate)


@pytest.mark.parametrize("colour", [True, False])
def test_the_legend_shows_the_marks_it_names(colour):
    for fate in set(Fate) - {Fate.DISCARDED}:
        assert mark(fate.value, fate, colour) in legend(colour)
    assert Fate.DISCARDED.value not in legend(colour)
    assert mark(Fate.DISCARDED.value, Fate.DISCARDED, colour) in legend(colour, discarded=True)


def test_no_colour_code_without_colour():
    codes = {
        code
        for fate in Fate
        for found in SGR.findall(mark("x", fate, False))
        for code in found[2:-1].split(";")
    }
    assert codes and not any(len(code) > 1 for code in codes)


def test_a_rejected_token_stands_struck_through_before_its_replacement():
    rounds = rounds_of("aaxdr", "aab")
    text = drawn(rounds)
    assert text.startswith(" a0 a1\x1b[9m x2\x1b[0m\x1b[4m r4\x1b[0m a0")
    assert " d3" not in text
    assert "\x1b[4m r4\x1b[0m\x1b[2;9m d3\x1b[0m" in drawn(rounds, discarded=True)


def test_plain_tokens_bear_their_mark_only_beside_drafts():
    assert "\x1b[3m p0\x1b[0m" in drawn(rounds_of("p"))
    assert drawn(rounds_of("p", "p"), plain_marked=False) == " p0 p0\n"


def test_drafts_that_do_not_stand_never_break_the_line():
    round_ = round_of("xr")
    tokens = (token("x", 0, 0, text="\n\t"), round_.tokens[1])
    rounds = [round_of("xr", tokens=tokens, text=tokens[1].text)]
    assert drawn(rounds) == "\x1b[9m↵⇥\x1b[0m\x1b[4m r1\x1b[0m\n"


def test_marks_end_with_the_line():
    assert mark("a\n\nb", Fate.BONUS, False) == "\x1b[1ma\x1b[0m\n\n\x1b[1mb\x1b[0m"
    tokens = (token("b", 0, 0, 0, text="\n\n"),)
    assert drawn([round_of("b", tokens=tokens, text="\n\n")]) == "\x1b[1m↵\x1b[0m\n\n"


def test_a_token_without_text_shows_its_name():
    tokens = (token("x", 0, 0, text="", label="⟨F0 9F⟩"), token("r", 1, 0, 0, text="", label="<|im_end|>"))
    shown = drawn([round_of("xr", tokens=tokens, text="")])
    assert shown == "\x1b[9m⟨F0 9F⟩\x1b[0m\x1b[4m<|im_end|>\x1b[0m\n"


def stopped():
    """Two rounds of which a stop string "0 a1" that begins in the first leaves only " a"."""
    first = round_of("b", text=" ", tokens=(token("b", 0, 0, 0, text=" a0"),))
    last = round_of("ap", 1, text="a", tokens=(token("a", 0, 0, 1, text=" a1"), token("p", 1, 1, 2)))
    return [first, last], reply_of([first, last], visible_chars=2)


def test_what_may_be_a_stop_string_is_not_shown():
    rounds, reply = stopped()
    assert drawn(rounds, reply) == "\x1b[1m a\x1b[0m\n"
    assert plainly(rounds, reply) == " a\n"


def test_what_was_held_back_comes_when_the_reply_is_cancelled():
    rounds = [round_of("ab", text=" a0")]  # " b1" could have been the beginning of a stop string
    assert drawn(rounds) == " a0\x1b[1m b1\x1b[0m\n"
    assert plainly(rounds) == " a0 b1\n"


def test_the_tail_of_a_cut_character_is_shown():
    rounds = [round_of("a", text=" a0\ufffd")]
    reply = reply_of(rounds, text=" a0\ufffd", tail="\ufffd", visible_chars=4)
    assert drawn(rounds, reply) == plainly(rounds, reply) == " a0\ufffd\n"


@pytest.mark.parametrize("words", list(itertools.product(("aaxr", "aab", "xddr", "p"), repeat=2)))
def test_what_is_kept_reads_as_the_reply(words):
    rounds = rounds_of(*words)
    unmarked = re.sub(r"\x1b\[9m.*?\x1b\[0m", "", drawn(rounds))
    assert SGR.sub("", unmarked) == plainly(rounds) == reply_of(rounds).visible_text + "\n"


def test_text_cannot_command_the_terminal():
    hostile = "".join(map(chr, range(0xA0))) + "\x1b]0;title\x07\x1b[2J\x9b31m"
    for shown in (printable(hostile), plainly([round_of("a", tokens=(token("a", 0, 0, 0, text=hostile),))])):
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
    text = drawn(
        [
            round_of(
                "xr", tokens=(token("x", 0, 0, text=hostile), token("r", 1, 0, 0, text=hostile)), text=hostile
            )
        ]
    )
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", SGR.sub("", text))
    assert printable("a\tb\nc é 😀 ␛") == "a\tb\nc é 😀 ␛"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_rewrites_one_line_on_a_terminal():
    out = Terminal()
    progress = progress_printer(out)
    progress("Downloading", 0.25)
    progress("", None)
    assert out.getvalue() == "\r\x1b[KDownloading 25%\r\x1b[K"


def test_progress_elsewhere_is_a_line_a_sentence():
    out = io.StringIO()
    progress = progress_printer(out)
    for fraction in (0.1, 0.2):
        progress("Downloading", fraction)
    progress("Reading", None)
    progress("", None)
    assert out.getvalue() == "Downloading 10%\nReading\n"


def test_progress_that_nobody_reads_ends_no_work():
    class Gone(io.StringIO):
        def flush(self):
            raise BrokenPipeError

    progress_printer(Gone())("Downloading", 0.1)


def test_what_a_command_found_goes_out_in_utf8_or_into_nothing(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr("sys.stderr", None)
    use_utf8()
    assert put_out("α") == 0 and raw.getvalue() == "α\n".encode()
    print("said into nothing", file=sys.stderr)
