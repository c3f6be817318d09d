"""Rounds and replies as lines of strict JSON, under the record's names.

One object a line: each round (``"type": "round"``), then the reply (``"type": "reply"``), with the field
names of ``core.records`` and ``core.figures.metrics``, which are the database's; undefined figures are null.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import TextIO

from core.figures.metrics import Figures, summarize
from core.record.plain import plain
from core.records import Fate, PairInfo, Reply, Round, Settings, Token, writes_exactly

# What a line of JSON cannot hold raw: characters a terminal acts on, and line separators that would split it.
_UNSAFE_IN_JSON = re.compile("[\x7f-\x9f\u2028\u2029]")


def round_row(round_: Round) -> dict[str, object]:
    """One round with the record's names, its counts, and its tokens inside."""
    row = {"type": "round", **_fields(round_, "tokens"), "drafted": round_.drafted}
    row.update({fate.value: round_.count(fate) for fate in Fate}, emitted=round_.emitted)
    return row | {"tokens": [_fields(token) for token in round_.tokens]}


def reply_row(reply: Reply, rounds: Sequence[Round], domain: str) -> dict[str, object]:
    """The reply, flat: text and ids, how it ended, its figures, its settings, and the pair that wrote it."""
    return {
        "type": "reply",
        **_fields(reply, "settings", "pair", "num_rounds"),  # the last is the figure called rounds
        "context_tokens": reply.prompt_tokens + len(reply.token_ids),
        **_fields(summarize(rounds)),
        **_fields(reply.settings),
        "exact": writes_exactly(reply.settings, reply.pair.drafter),
        "domain_choice": domain,
        **_fields(reply.pair),
    }


def _fields(record: Reply | Round | Token | Figures | Settings | PairInfo, *but: str) -> dict[str, object]:
    return {field.name: getattr(record, field.name) for field in fields(record) if field.name not in but}


def json_line(row: dict[str, object]) -> str:
    """One line of strict JSON in UTF-8 that no terminal takes for a command; NaN and infinities are null."""
    text = json.dumps(_strict(row), ensure_ascii=False, allow_nan=False)
    return _UNSAFE_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _strict(value: object) -> object:
    if isinstance(value, dict):
        return {key: _strict(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(inner) for inner in value]
    value = plain("A figure", value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


class JsonWriter:
    """Writes rounds and reply as JSON lines."""

    def __init__(self, out: TextIO, domain: str):
        self._out = out
        self._domain = domain
        self._rounds: list[Round] = []

    def round(self, round_: Round) -> None:
        self._rounds.append(round_)
        self._line(round_row(round_))

    def end(self, reply: Reply) -> None:
        self._line(reply_row(reply, self._rounds, self._domain))

    def _line(self, row: dict[str, object]) -> None:
        self._out.write(json_line(row) + "\n")
        self._out.flush()
