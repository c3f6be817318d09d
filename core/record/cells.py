"""Cells of a CSV file that mean the same in every spreadsheet, and how they are read back.

A spreadsheet reads text that looks like a formula, a number, a date or a truth value as one, by the rules of
its country: "MAR1" and "1/2" become dates, "00123" and "1E5" numbers, " True" a truth value. ``as_text`` puts
one apostrophe in front of such text, and ``original`` takes it away. Which text that is, is decided more
broadly than any one spreadsheet does, for an apostrophe too many is taken away like any other: numbers among
names of months and days of any language (``core.record.cell_words``), in other scripts among few words.

Numbers stay numbers. Where a country writes decimals with a comma, its spreadsheets take 1.5 for a date, and
lists are separated by semicolons: ``Form`` holds what may be chosen.

Knows text and numbers; nothing of the record.
"""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import dataclass

from core.record.cell_words import NAMES

DELIMITERS = {"comma": ",", "semicolon": ";", "tab": "\t"}
DECIMALS = {"point": ".", "comma": ","}


@dataclass(frozen=True, slots=True)
class Form:
    """``delimiter`` is one of ``DELIMITERS``, ``decimal`` of ``DECIMALS``. Else ValueError, a sentence."""

    delimiter: str = "comma"
    decimal: str = "point"

    def __post_init__(self) -> None:
        if self.delimiter not in DELIMITERS:
            raise ValueError(f"The delimiter is one of {', '.join(DELIMITERS)}, not {self.delimiter!r}.")
        if self.decimal not in DECIMALS:
            raise ValueError(f"The decimal sign is one of {', '.join(DECIMALS)}, not {self.decimal!r}.")
        if self.delimiter == self.decimal:
            raise ValueError("A comma cannot part both cells and decimals: choose another delimiter.")

    def cell(self, value: object) -> object:
        """What is written for a value: numbers as numbers, lists as JSON text, nothing for None and ()."""
        if isinstance(value, str):
            return as_text(value)
        if isinstance(value, (tuple, list)):
            return as_text(json.dumps(value, ensure_ascii=False)) if value else None
        if isinstance(value, float) and self.decimal != "point":
            return repr(float(value)).replace(".", DECIMALS[self.decimal])
        return value


def as_text(text: str) -> str:
    """``text`` with an apostrophe in front where a spreadsheet might take it for anything but text."""
    return f"'{text}" if _FORMULA.match(text) or _is_value(_AROUND.sub("", text)) else text


def original(cell: str) -> str:
    """The text that ``as_text`` made ``cell`` of."""
    return cell[1:] if cell.startswith("'") and as_text(cell[1:]) == cell else cell


# All of these are closed under one more apostrophe in front, which is what makes them reversible.
_FORMULA = re.compile(r"""[\s\ufeff"']*[=+\-@＝＋－＠]|["']*[\t\r\n]""")
_AROUND = re.compile(r"""^[\s\ufeff"']+|[\s\ufeff"']+$""")

_LETTERS = re.compile(r"[^\W\d_]+")
_REST = re.compile(r"[\d\s.,;:/\\\-+%‰()'’`´_°·٫٬،׳״$٪−–、，．：／]*")
_ERROR = re.compile(r"#\w+(/\w+)?[!?]?$")  # #N/A, #REF!, #NAME?, #BEZUG!
_LOCAL_TIME = re.compile(r"\d{4}-\d\d?-\d\d?t\d\d?:\d\d?(:\d\d?([.,]\d+)?)?z?$")  # with a zone it is text
_LETTER_DAY = re.compile(r"[a-z][\s.,]+\d+([-/.] ?\d+){2}")  # H 2020-05-05, Monday in Hungarian
_MOST_LETTERS = 40  # what has more is read as text
_MOST_WORDS = 4  # of other scripts

# What the names of months and days begin with, and what stands beside times and amounts, without accents.
_WORDS = re.compile(
    "jan|feb|fev|mar|mrz|mae|mrt|maa|apr|avr|abr|may|mai|maj|mag|mei|jun|jui|giu|jul|lug|aug|aou|ago|sep|set"
    "|oct|okt|out|ott|nov|dec|dez|des|dic|ene|gen|sty|lut|kwi|cze|lip|sie|wrz|paz|lis|gru|oca|sub|nis|haz"
    "|tem|agu|eyl|eki|kas|ara|led|uno|bre|dub|kve|cer|srp|zar|rij|pro|tam|hel|huh|tou|kes|hei|elo|syy|lok"
    "|jou|mon|tue|wed|thu|fri|sat|sun|(?:am|pm|de|del|vorm|nachm|kr|zl|kc|ft|lei|rs|chf|rp|eur|usd|gbp)$"
)
_BEHIND_A_DIGIT = frozenset("aphed")  # 5 a (a time), 12h30, 1E5
_TRUTH = frozenset(
    "true false wahr falsch vrai faux verdadero falso vero verdadeiro waar onwaar prawda falsz sant falskt "
    "sand falsk tosi epatosi pravda nepravda igaz hamis adevarat fals dogru yanlis истина ложь".split()
)
# Letters that are no others with an accent.
_WITHOUT_STROKE = str.maketrans("ıłøđħßæœðþə", "ilodhsaaote")
_ROMAN = frozenset("i ii iii iv v vi vii viii ix x xi xii".split())  # months in Czech, Croatian and others


def _plain(text: str) -> str:
    """``text`` in small letters without accents and signs of no width, any currency's sign as "$"."""
    if text.isascii():
        return text.lower()
    parts = unicodedata.normalize("NFKD", text.lower())
    kinds = ((c, unicodedata.category(c)) for c in parts)
    return "".join(
        "$" if kind == "Sc" else c for c, kind in kinds if kind not in ("Mn", "Mc", "Cf")
    ).translate(_WITHOUT_STROKE)


def _is_value(text: str) -> bool:
    """Whether text, without white space and quotes around it, may be a number, a date, a time, a truth value
    or an error to a spreadsheet somewhere."""
    if sum(map(str.isalpha, text)) > _MOST_LETTERS:
        return False
    text = _plain(text)
    if not any(map(str.isdecimal, text)):
        return text in _TRUTH or bool(_ERROR.match(text))
    if _ERROR.match(text) or _LOCAL_TIME.match(text):
        return True
    words = list(_LETTERS.finditer(text))
    if sum(not word[0].isascii() for word in words) > _MOST_WORDS:
        return False
    return all(map(_may_stand_in_a_value, words)) and bool(_REST.fullmatch(_LETTERS.sub("", text)))


def _may_stand_in_a_value(word: re.Match[str]) -> bool:
    text, (start, end) = word.string, word.span()
    if not word[0].isascii() or _WORDS.match(word[0]):
        return True
    if word[0] in _BEHIND_A_DIGIT and text[:start].rstrip()[-1:].isdecimal():
        return True
    touches = text[:start][-1:].isdecimal() or text[end : end + 1].isdecimal()
    if word[0] in _ROMAN and not touches and text[:start].rstrip(" .-/")[-1:].isdecimal():  # 5. IV. 2020
        return True
    if word[0] in NAMES and (len(word[0]) > 2 or not touches):
        return True
    return text.startswith("r$", start) or bool(_LETTER_DAY.match(text, start))
