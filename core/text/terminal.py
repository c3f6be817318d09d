"""A reply in a terminal: every token in the mark of its fate, streamed as the rounds come.

Marks are SGR attributes (ECMA-48); colour repeats what they say, so that they read the same where
``NO_COLOR`` takes the colour away. Model text goes through ``printable``: it cannot move the
cursor, ring the bell or retitle the window. Also how every command speaks: in UTF-8, and on standard output
that may be closed, full or read no more. Knows the records, no engine and no command line.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections import deque
from collections.abc import Callable
from typing import TextIO

from core.records import Fate, Reply, Round, Token

# Attribute and colour of each fate. Accepted text, the bulk of a reply, is the one without attribute.
MARKS: dict[Fate, tuple[str, str]] = {
    Fate.ACCEPTED: ("", "32"),  # green
    Fate.REJECTED: ("9", "31"),  # struck through, red
    Fate.DISCARDED: ("2;9", ""),  # struck through and faint
    Fate.RESAMPLED: ("4", "34"),  # underlined, blue
    Fate.BONUS: ("1", "33"),  # bold, yellow
    Fate.PLAIN: ("3", ""),  # italic
}

MEANINGS: dict[Fate, str] = {
    Fate.ACCEPTED: "drafted and kept",
    Fate.REJECTED: "drafted and not kept",
    Fate.DISCARDED: "drafted and never tested",
    Fate.RESAMPLED: "the target's correction",
    Fate.BONUS: "the target's free token",
    Fate.PLAIN: "the target alone",
}

BROKEN_PIPE = 141  # the exit status where the reader of standard output went away, as a shell has it

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def use_utf8() -> None:
    """Standard output and error in UTF-8 whatever the locale says; into nothing where a shell closed them."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")
        stream.reconfigure(encoding="utf-8", errors="replace")
        setattr(sys, name, stream)


def put_out(text: str) -> int:
    """Prints what a command has found and gives its exit status.

    That is ``BROKEN_PIPE`` where nobody reads any more; 1, with a sentence, where standard output cannot be
    written.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        let_go_of_output()
        return BROKEN_PIPE
    except OSError as error:
        return not_written(error)
    return 0


def not_written(error: OSError) -> int:
    """Says that standard output cannot be written; an exit status."""
    let_go_of_output()
    print(f"Standard output cannot be written: {(error.strerror or str(error)).lower()}.", file=sys.stderr)
    return 1


def let_go_of_output() -> None:
    """Python flushes standard output once more at its end: let that go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def printable(text: str) -> str:
    """``text`` with every C0 and C1 control but newline and tab replaced by a sign one can see."""
    return _CONTROLS.sub(_sign, text)


def _sign(control: re.Match[str]) -> str:
    code = ord(control[0])
    if code < 0x20:
        return chr(0x2400 + code)  # Unicode's control pictures: ␛ for escape
    return "␡" if code == 0x7F else f"⟨{code:02X}⟩"


def mark(text: str, fate: Fate, colour: bool = True) -> str:
    """``text`` in the mark of ``fate``, line by line: a mark open at a line's end would run to the margin."""
    attribute, hue = MARKS[fate]
    codes = ";".join(code for code in (attribute, hue if colour else "") if code)
    if not codes:
        return text
    return "\n".join(f"\x1b[{codes}m{line}\x1b[0m" if line else "" for line in text.split("\n"))


def legend(colour: bool = True, discarded: bool = False) -> str:
    """One line that shows each mark and says what it means."""
    fates = [fate for fate in Fate if discarded or fate is not Fate.DISCARDED]
    return "  ".join(f"{mark(fate.value, fate, colour)} {MEANINGS[fate]}" for fate in fates)


class PlainWriter:
    """Writes the reply's visible text and nothing else, for files and pipes."""

    def __init__(self, out: TextIO):
        self._out = out
        self._shown = 0  # characters of the reply
        self._last = ""

    def round(self, round_: Round) -> None:
        """Writes what became safe to show."""
        self._shown += len(round_.text)
        self._write(round_.text)

    def end(self, reply: Reply) -> None:
        """Writes what of the reply was not safe to show before, and ends the line."""
        self._write(reply.visible_text[self._shown :])
        if self._last and not self._last.endswith("\n"):
            self._write("\n")

    def _write(self, text: str) -> None:
        if text:
            self._last = text
            self._out.write(printable(text))
            self._out.flush()


class RedlineWriter:
    """Writes every token in its mark; a rejected one stands, struck through, before its replacement.

    A token waits until its text is safe to show: it might be the beginning of a stop string. A token
    without text shows its label. ``plain_marked`` is off for replies without drafts, where there is
    nothing to tell plain tokens from.
    """

    def __init__(self, out: TextIO, *, colour: bool, discarded: bool, plain_marked: bool):
        self._out = out
        self._colour = colour
        self._discarded = discarded
        self._plain_marked = plain_marked
        self._waiting: deque[Token] = deque()
        self._safe = 0  # characters of the reply that may be shown
        self._shown = 0  # characters of the tokens that were
        self._line_open = False

    def round(self, round_: Round) -> None:
        """Takes a round's tokens and writes those that became safe."""
        self._waiting.extend(_reading_order(round_))
        self._safe += len(round_.text)
        self._release()
        self._out.flush()

    def end(self, reply: Reply) -> None:
        """Writes what of the reply was not safe to show before, and ends the line."""
        self._safe = reply.visible_chars
        self._release()
        if self._shown < self._safe:  # of a token that a stop string cuts, or of the reply's tail
            cut = self._waiting[0] if self._waiting else None
            self._write(reply.visible_text[self._shown :], cut and self._mark_of(cut))
        if self._line_open:
            self._write("\n", None)
        self._out.flush()

    def _release(self) -> None:
        while self._waiting:
            token = self._waiting[0]
            after = self._shown + (len(token.text) if token.emitted else 0)
            if after > self._safe:
                break
            self._waiting.popleft()
            self._shown = after
            self._show(token)

    def _show(self, token: Token) -> None:
        if token.fate is Fate.DISCARDED and not self._discarded:
            return
        text = token.text or token.label or ""
        if not token.emitted:
            text = text.replace("\n", "↵").replace("\t", "⇥")  # must not break the line: it is not there
        elif token.fate in (Fate.RESAMPLED, Fate.BONUS) and not text.strip("\n"):
            text = "↵" + text  # line breaks alone would not show their mark
        self._write(text, self._mark_of(token))

    def _mark_of(self, token: Token) -> Fate | None:
        return None if token.fate is Fate.PLAIN and not self._plain_marked else token.fate

    def _write(self, text: str, fate: Fate | None) -> None:
        if text:
            self._line_open = not text.endswith("\n")
            text = printable(text)
            self._out.write(mark(text, fate, self._colour) if fate else text)


def _reading_order(round_: Round) -> list[Token]:
    """Accepted tokens, then rejected ones, what the target put in their place, and discarded ones last."""
    last = (Fate.RESAMPLED, Fate.DISCARDED)
    return sorted(round_.tokens, key=lambda token: last.index(token.fate) + 1 if token.fate in last else 0)


def progress_printer(out: TextIO) -> Callable[[str, float | None], None]:
    """A loader's ``progress``: one line rewritten in place on a terminal, elsewhere a line a sentence, with
    how far it was then.

    Call it with an empty sentence when all is loaded, which clears the line on a terminal. Work goes on where
    nobody can be told of it any more.
    """
    in_place = out.isatty()
    previous = ""

    def progress(sentence: str, fraction: float | None) -> None:
        nonlocal previous
        with contextlib.suppress(OSError):
            percent = "" if fraction is None else f" {fraction:.0%}"
            if in_place:
                out.write(f"\r\x1b[K{sentence}{percent}")
            elif sentence and sentence != previous:
                out.write(f"{sentence}{percent}\n")
            previous = sentence
            out.flush()

    return progress
