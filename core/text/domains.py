"""Which domain a token belongs to (code, prose, maths, structured, other), and whether it is monospaced.

A picked domain holds for every token. ``auto`` reads the reply as it streams, a character at a time, and
keeps only a few words of state, so that it costs microseconds a token and never looks back over the text:

- code: fenced blocks (three or more backticks or tildes, at any indentation, closed as CommonMark says),
  fence lines included, and code spans between backticks (a span ends with its line at the latest);
- structured: what stands in a fence whose info string names a data or markup format
  (``STRUCTURED_LANGUAGES``), Markdown table rows (lines that begin with a bar), and an object that opens with
  a brace at the beginning of a line, until its braces balance or a blank line comes;
- maths: ``$$..$$``, ``\\(..\\)``, ``\\[..\\]`` and the environments of ``MATHS_ENVIRONMENTS``, delimiters
  included; left open, it ends at a blank line or a fence;
- prose: everything else.

Deliberately not maths: single dollars, because prices are commoner than TeX in chat ("$3000 and $3000"). Not
code: indented blocks without a fence, because chat models indent lists. ``auto`` never says ``other``.

**Tokens that straddle a border.** A token belongs where its first visible character stands; a token of white
space only, where its first character stands; an empty one, where the next character would. A delimiter
belongs to what it delimits as far as it is known to be one by the end of the token: a token ``\\(`` is maths,
but of two tokens ``\\`` and ``(`` only the second is, because an answer depends on nothing that comes later.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence

from core.records import DOMAINS

CHOICES = ("auto", *DOMAINS)

STRUCTURED_LANGUAGES = frozenset(
    "json json5 jsonc jsonl ndjson yaml yml toml xml svg csv tsv html xhtml".split()
)
MATHS_ENVIRONMENTS = frozenset(
    "align aligned alignat array bmatrix cases displaymath eqnarray equation gather gathered math matrix "
    "multline pmatrix smallmatrix split vmatrix Bmatrix Vmatrix".split()
)

Label = tuple[str, bool]  # domain, monospaced

_PROSE: Label = ("prose", False)
_CODE: Label = ("code", True)
_MATHS: Label = ("maths", False)
_STRUCTURED: Label = ("structured", False)
_STRUCTURED_FENCE: Label = ("structured", True)

_LANGUAGE = re.compile(r"[\s{.]*([A-Za-z0-9]+)")
_LONGEST = 40  # characters kept of an info string or a \begin{...}: enough for every name known here


class _Reader:
    """The state of ``auto``: what is open at the end of the text read so far."""

    def __init__(self) -> None:
        self.line_blank = True  # nothing but white space on this line yet
        self.fence = 0  # length of the open fence, 0: none
        self.fence_char = ""
        self.fence_label = _CODE  # of the lines between the fence lines
        self.fence_line = ""  # "open": reading an info string; "close": a closing fence unless text follows
        self.info = ""
        self.span = 0  # number of backticks that opened the code span, 0: none
        self.maths = ""  # the delimiter that closes the open maths, "": none
        self.escape = ""  # a backslash and what followed it, while that may yet become a delimiter
        self.table_row = False
        self.braces = 0  # open braces of an object outside fences
        self.run = 0  # length of the run of backticks, tildes or dollars being read, 0: none
        self.run_char = ""
        self.run_starts_line = False
        self.joined = 0  # how many characters before the one just read share its label (one delimiter)

    def read(self, text: str) -> Label:
        """Reads on through ``text`` and returns the label of the token it makes up."""
        if not text:
            ahead = copy.copy(self)
            if ahead.run:
                ahead._end_run()
            return ahead._here()
        labels: list[Label] = []
        for char in text:
            labels.append(self._step(char))
            for back in range(1, min(self.joined, len(labels) - 1) + 1):
                labels[-1 - back] = labels[-1]
        visible = next((i for i, char in enumerate(text) if not char.isspace()), 0)
        return labels[visible]

    def _here(self) -> Label:
        """The label of an ordinary character at this place."""
        if self.fence:
            return _CODE if self.fence_line else self.fence_label
        if self.span:
            return _CODE
        if self.maths:
            return _MATHS
        if self.table_row or self.braces:
            return _STRUCTURED
        return _PROSE

    def _step(self, char: str) -> Label:
        self.joined = 0
        if self.run and char != self.run_char:
            self._end_run()
        if char == "\n":
            return self._end_line()
        if self.run or self._begins_run(char):
            if not self.run:
                self.run_char, self.run_starts_line = char, self.line_blank
            self.run += 1
            self.line_blank = False
            return self._run_label()
        if self.fence:
            return self._in_fence(char)
        if self.span:
            return _CODE
        return self._outside(char)

    def _begins_run(self, char: str) -> bool:
        if char not in "`~$":
            return False
        if self.fence_line == "open":
            if char == "`" == self.fence_char:
                # An info string holds no backtick: what looked like a fence was a long code span on one line.
                self.span, self.fence, self.fence_line = self.fence, 0, ""
                return True
            return False
        if self.fence:
            return self.line_blank and char == self.fence_char
        if char != "$" and self.line_blank:
            return True  # perhaps a fence: blocks go before spans and maths
        if char == "~" or (self.escape == "\\" and not self.span):
            return False
        if char == "`":
            return not self.maths
        return not self.span and self.maths in ("", "$$")

    def _run_label(self) -> Label:
        here = self._here()
        if self.fence:
            label = _CODE if self.run >= self.fence else here
        elif self.run_char == "$":
            label = _MATHS if self.run == 2 else here  # "$$$" is money
        elif self.run_starts_line and self.run >= 3:
            label = _CODE
        elif self.run_char == "`" and not self.maths:
            label = _CODE
        else:
            label = here
        self.joined = self.run - 1
        return label

    def _end_run(self) -> None:
        length, self.run = self.run, 0
        self.escape = ""
        if self.fence:
            if length >= self.fence:
                self.fence_line = "close"
        elif self.run_char == "$":
            if self.maths and length >= 2:
                self.maths = ""
            elif length == 2:
                self.maths = "$$"
        elif self.run_starts_line and length >= 3:
            self.fence, self.fence_char, self.fence_line, self.info = length, self.run_char, "open", ""
            self.span, self.maths, self.table_row, self.braces = 0, "", False, 0
        elif self.run_char == "`" and not self.maths:
            if self.span == length:
                self.span = 0
            elif not self.span:
                self.span = length

    def _end_line(self) -> Label:
        label = self._here()
        if self.fence_line == "open":
            language = _LANGUAGE.match(self.info)
            named = language is not None and language[1].lower() in STRUCTURED_LANGUAGES
            self.fence_label = _STRUCTURED_FENCE if named else _CODE
        elif self.fence_line == "close":
            self.fence = 0
        elif self.line_blank and not self.fence:
            self.maths, self.braces = "", 0
        self.fence_line, self.escape = "", ""
        self.span, self.table_row, self.line_blank = 0, False, True
        return label

    def _in_fence(self, char: str) -> Label:
        if self.fence_line == "open":
            if len(self.info) < _LONGEST:
                self.info += char
        elif not char.isspace():
            self.fence_line, self.line_blank = "", False
        return self._here()

    def _outside(self, char: str) -> Label:
        begins_line = self.line_blank and not char.isspace()
        if begins_line:
            self.line_blank = False
        if self.escape or char == "\\":
            label = self._escaped(char)
            if label is not None:
                return label
        if self.maths:
            return _MATHS
        if begins_line and char == "|":
            self.table_row = True
        if char == "{" and (self.braces or begins_line):
            self.braces += 1
        elif char == "}" and self.braces:
            self.braces -= 1
            return _STRUCTURED
        return self._here()

    def _escaped(self, char: str) -> Label | None:
        """Follows a backslash; returns a label once a delimiter of maths is complete, else None."""
        if char == "\\" and self.escape != "\\":
            self.escape = char
            return None
        self.escape += char
        sequence = self.escape
        opens = {"\\(": "\\)", "\\[": "\\]"}.get(sequence)
        environment = sequence[len("\\begin{") : -1].rstrip("*")
        if sequence.startswith("\\begin{") and char == "}" and environment in MATHS_ENVIRONMENTS:
            opens = sequence.replace("begin", "end", 1)
        if sequence == self.maths or (opens and not self.maths):
            self.maths = "" if self.maths else opens
            self.escape = ""
            self.joined = len(sequence) - 1
            return _MATHS
        closing = self.maths.startswith(sequence)
        opening = not self.maths and ("\\begin{".startswith(sequence) or sequence.startswith("\\begin{"))
        if not (closing or opening) or char == "}" or len(sequence) > _LONGEST:
            self.escape = ""
        return None


class DomainTracker:
    """Gives each token of one reply its domain and says whether it is set in monospace.

    ``choice`` is ``auto`` or one of ``records.DOMAINS``; a picked domain is every token's domain, and
    monospace still follows fences and code spans. Raises ValueError for any other choice.
    """

    def __init__(self, choice: str = "auto") -> None:
        if choice not in CHOICES:
            raise ValueError(f"Domain must be one of {', '.join(CHOICES)}, not {choice!r}.")
        self.choice = choice
        self._reader = _Reader()

    def push(self, text: str) -> Label:
        """(domain, monospaced) of a committed token whose text is ``text``; advances past it."""
        return self._picked(self._reader.read(text))

    def peek(self, texts: Sequence[str]) -> list[Label]:
        """The same for drafted tokens that follow each other after the committed text; does not advance."""
        reader = copy.copy(self._reader)
        return [self._picked(reader.read(text)) for text in texts]

    def _picked(self, label: Label) -> Label:
        return label if self.choice == "auto" else (self.choice, label[1])
