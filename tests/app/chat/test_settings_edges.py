"""Every setting at its smallest and largest value, just inside and just outside: what asks and what writes.

The same values go through ``core.settings``, the page's panel, ``/chat`` and the terminal, and what was taken
writes a reply, step by step and on the device's way, with figures that are numbers.
"""

from __future__ import annotations

import json
import math
from dataclasses import fields
from math import inf, nan, nextafter

import gradio as gr
import pytest

from app import api
from app.chat.conversation import Refused
from app.chat.settings_panel import read_settings
from core.engine.loop import Engine
from core.generate import parse_request
from core.record.json_lines import json_line, round_row
from core.records import Settings
from core.settings import (
    LOSSY,
    MAX_DRAFT_TOKENS,
    MAX_NEW_TOKENS,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    MAX_TREE_WIDTH,
    MIN_REPETITION_PENALTY,
    SettingsError,
    parse_settings,
)
from tests.core.toys import table, toy_pair

LEAST = 5e-324  # the smallest number above 0


def between(low, high):
    """Inside and outside a range of real numbers."""
    inside = [low, nextafter(low, high), nextafter(high, low), high]
    return inside, [nextafter(low, -inf), nextafter(high, inf), nan, inf, -inf]


def whole(low, high):
    return [low, low + 1, high - 1, high], [low - 1, high + 1, low + 0.5]


EDGES = {
    # Of float32: its smallest number, halves of it, its smallest normal one.
    "temperature": (between(0, 2)[0] + [1e-46, 1e-45, 2.0**-150, 2.0**-127, 2.0**-126], between(0, 2)[1]),
    "top_k": whole(0, 2**31 - 1),
    "top_p": (between(0, 1)[0] + [1e-46], between(0, 1)[1]),
    "min_p": (between(0, 1)[0] + [1e-46], between(0, 1)[1]),
    "repetition_penalty": between(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    "num_draft_tokens": whole(0, MAX_DRAFT_TOKENS),
    "max_new_tokens": whole(1, MAX_NEW_TOKENS),
    "tree_width": whole(1, MAX_TREE_WIDTH),
    "seed": ([0, 1, MAX_SEED - 1, MAX_SEED], [-2, MAX_SEED + 1, 0.5]),
}
STOPS = ([["x" * MAX_STOP_LENGTH] * MAX_STOPS, [chr(65 + i) for i in range(MAX_STOPS)]],)
STOPS += ([["x" * (MAX_STOP_LENGTH + 1)], [chr(65 + i) for i in range(MAX_STOPS + 1)]],)
INSIDE = [(name, value) for name, (inside, _) in EDGES.items() for value in inside]
OUTSIDE = [(name, value) for name, (_, outside) in EDGES.items() for value in outside]
INSIDE += [("stop", value) for value in STOPS[0]]
OUTSIDE += [("stop", value) for value in STOPS[1]]
RULES = [(rule, *limits[1:]) for rule, limits in LOSSY.items() if limits]
INSIDE += [("acceptance_threshold", (rule, v)) for rule, low, high in RULES for v in between(low, high)[0]]
OUTSIDE += [("acceptance_threshold", (rule, v)) for rule, low, high in RULES for v in between(low, high)[1]]

_PANEL = dict(
    speculate=True,
    drafter="",
    tree_width=1,
    num_draft_tokens=3,
    auto_draft_tokens=False,
    verifier="token",
    temperature=0.7,
    top_k=0,
    top_p=1,
    min_p=0,
    repetition_penalty=1,
    max_new_tokens=512,
    seed="1",
    stop="",
    domain="auto",
    record=True,
    lossy="",
    acceptance_threshold="",
)
_FLAGS = dict(num_draft_tokens="k", acceptance_threshold="threshold")


def checked(name, value):
    return parse_settings(**_given(name, value))


def _given(name, value):
    if name == "acceptance_threshold":
        return dict(seed=1, verifier=value[0], acceptance_threshold=value[1])
    return {"seed": 1, name: value}


def panel(name, value):
    if name == "acceptance_threshold":
        changes = dict(lossy=value[0], acceptance_threshold=value[1])
    else:
        changes = {name: "\n".join(value) if name == "stop" else value}
    return read_settings(**_PANEL | changes).settings


def chat(name, value):
    asked = []

    class Desk:
        def ask(self, conversation, question, settings, *others):
            asked.append(settings)
            raise Refused("Enough.")

    with pytest.raises(gr.Error) as refused:
        next(api.reply(Desk(), "Hello", None, "", _given(name, value), False))
    if not asked:
        raise SettingsError(refused.value.message)
    return asked[0]


def terminal(name, value):
    flag = f"--{_FLAGS.get(name, name).replace('_', '-')}"
    if name == "acceptance_threshold":
        given = ["--verifier", value[0], f"{flag}={value[1]!r}"]
    else:
        given = [f"{flag}={one}" for one in (value if name == "stop" else [repr(value)])]
    settings = parse_request(["--prompt", "Hello", *given]).settings
    unasked = {"max_new_tokens": 128} if name != "max_new_tokens" else {}
    assert all(getattr(settings, field) == usual for field, usual in unasked.items())
    return settings


WAYS = [checked, panel, chat, terminal]


@pytest.mark.parametrize("name, value", INSIDE)
def test_what_is_just_inside_is_taken_by_every_way_alike(name, value):
    meant = (
        value[1]
        if name == "acceptance_threshold"
        else tuple(dict.fromkeys(value))
        if name == "stop"
        else value
    )
    if name == "temperature" and value < 2.0**-126:
        meant = 0
    assert [getattr(way(name, value), name) for way in WAYS] == [meant] * len(WAYS)


@pytest.mark.parametrize("name, value", OUTSIDE)
def test_what_is_just_outside_is_refused_by_every_way_in_the_same_words(name, value):
    said = set()
    for way in WAYS:
        with pytest.raises(SettingsError) as refused:
            way(name, value)
        said.add(str(refused.value).split(", not ")[0])  # the terminal's values are text
    (sentence,) = said
    assert " must be a " in sentence or sentence.startswith("There may be up to ")


@pytest.mark.parametrize(
    "name, value, batched",
    # Lossy rules are judged step by step.
    [(*case, way) for case in INSIDE for way in (False, True)[: 1 + (case[0] != "acceptance_threshold")]],
)
def test_what_is_just_inside_writes_a_reply_of_numbers(name, value, batched):
    settings = checked(name, value)
    engine = Engine(toy_pair(table(1, 8), table(2, 8), context_length=12), batched=batched)
    for more in ({}, {"min_p": 0.05, "top_p": 0.9}, {"top_k": 3, "num_draft_tokens": 0}):
        own = {field.name: getattr(settings, field.name) for field in fields(Settings)}
        some = Settings(**own | {key: v for key, v in more.items() if key != name})
        generation = engine.generate([1, 2, 3], some)
        rounds = list(generation)
        assert generation.reply.error is None and generation.reply.token_ids
        for round_ in rounds:
            json.loads(json_line(round_row(round_)))
            for token in round_.tokens:
                figures = (token.p, token.q, token.u, token.overlap, token.entropy_p, token.entropy_q)
                assert all(math.isfinite(figure) for figure in figures if figure is not None)


@pytest.mark.parametrize("temperature", [1e-46, LEAST, 2.0**-150, 2.0**-149, 2.0**-127, -0.0])
@pytest.mark.parametrize("min_p", [0.0, 0.1])
def test_a_temperature_that_is_zero_in_float32_is_zero(temperature, min_p):
    """It wrote one id for ever with figures that were NaN; with min-p, an IndexError."""
    for batched in (False, True):
        engine = Engine(toy_pair(table(1, 8), table(2, 8)), batched=batched)
        replies = []
        for asked in (temperature, 0.0):
            settings = Settings(temperature=asked, min_p=min_p, max_new_tokens=20, seed=5)
            assert settings.temperature == 0 and math.copysign(1, settings.temperature) == 1
            generation = engine.generate([1, 2, 3], settings)
            rounds = [[(t.id, t.fate, t.p, t.q, t.overlap) for t in r.tokens] for r in generation]
            replies.append((generation.reply.token_ids, rounds))
        assert replies[0] == replies[1]
