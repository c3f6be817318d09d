"""Nothing outlives a conversation but what was committed in it: whatever an engine was asked before, and
however that ended, it then writes the reply that a fresh one writes, with every drafter (rule 7)."""

from __future__ import annotations

import dataclasses
import random
import threading

import pytest

from core.drafters.auto import AutoDrafter
from core.drafters.early_exit import EarlyExitDrafter
from core.drafters.names import DRAFTERS
from core.drafters.ngram import NgramDrafter
from core.drafters.recycling import RecyclingDrafter
from core.engine.loop import Engine
from core.pairs.pair import Pair
from core.records import Settings
from tests.core.toy_drafts import toy_drafts_pair
from tests.core.toys import table, toy_pair

CONTEXT = 200
PROMPT = [0, 1, 2, 0, 1, 1, 2, 0, 1, 3]
SETTINGS = Settings(temperature=1.0, num_draft_tokens=3, max_new_tokens=16, seed=5)


def toys(make=None) -> Pair:
    pair = toy_pair(table(1, 4, 1.2), table(2, 4, 1.2), context_length=CONTEXT, draft_context_length=CONTEXT)
    pair.target.vocabulary = 4
    return dataclasses.replace(pair, drafter=make(pair.drafter)) if make else pair


def trained(name: str, make=None) -> Pair:
    pair = toy_drafts_pair(name, 4)
    return dataclasses.replace(pair, drafter=make(pair)) if make else pair


# Each drafter, also as the one that ``auto`` asks.
PAIRS = {
    "model": toys,
    "eagle": lambda: trained("eagle"),
    "medusa": lambda: trained("medusa"),
    "early-exit": lambda: trained("eagle", lambda pair: EarlyExitDrafter(pair.target, 1)),
    "ngram": lambda: toys(lambda _: NgramDrafter(CONTEXT)),
    "recycling": lambda: toys(lambda _: RecyclingDrafter(CONTEXT)),
    "auto": lambda: toys(lambda model: AutoDrafter(model, CONTEXT)),
    "auto, eagle": lambda: trained("eagle", lambda pair: AutoDrafter(pair.drafter, CONTEXT)),
    "auto, recycling": lambda: toys(lambda _: AutoDrafter(RecyclingDrafter(CONTEXT), CONTEXT)),
    "plain": lambda: dataclasses.replace(toys(), drafter=None),
}


def test_no_drafter_is_left_out():
    assert {name.split(",")[0] for name in PAIRS} == set(DRAFTERS)


def told(engine: Engine, prompt: list[int], settings: Settings) -> list[list[tuple]]:
    """What a reply's rounds say, but for times and for the last bits of its probabilities."""
    generation = engine.generate(prompt, settings)
    rounds = [
        [(t.id, t.fate, t.u, t.parent, t.q and round(t.q, 4)) for t in round_.tokens] for round_ in generation
    ]
    assert generation.reply.error is None
    return rounds


ASKING = ("draft", "device_steps", "chain", "tree", "turn")  # how a drafter is asked, either way


def asked(engine: Engine, chance: random.Random, settings: Settings, prompt: list[int]) -> None:
    """One reply to something else or to the same, ended in one way or another."""
    text = [chance.randrange(4) for _ in range(chance.randrange(1, 60))]
    other = chance.choice([text, [*prompt, *text], [*prompt[:5], *text], prompt])
    seed = chance.choice([settings.seed, chance.randrange(100)])
    changed = dataclasses.replace(
        settings, seed=seed, num_draft_tokens=chance.choice([0, 2, 3]), max_new_tokens=chance.randrange(1, 24)
    )
    cancel, drafter = threading.Event(), engine.pair.drafter
    how, calls = chance.choice(["whole", "stopped", "left", "failed"]), []
    asking = [name for name in ASKING if hasattr(drafter, name)] if how == "failed" else []

    def failing(ask):
        def asked(*given):
            calls.append(given)
            if len(calls) > 2:
                raise RuntimeError("no more memory")
            return ask(*given)

        return asked

    for name in asking:
        setattr(drafter, name, failing(getattr(drafter, name)))
    generation = engine.generate(other, changed, cancel=cancel)
    for round_ in generation:
        if how == "stopped":
            cancel.set()
        if how == "left" and round_.index == 1:
            break
    generation.close()
    for name in asking:
        delattr(drafter, name)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("name", PAIRS)
def test_any_history_then_a_prompt_gives_a_fresh_engines_reply(name, width, batched, caplog):
    settings = dataclasses.replace(SETTINGS, tree_width=width)
    fresh = told(Engine(PAIRS[name](), batched=batched), PROMPT, settings)
    assert any(len(tokens) > 1 for tokens in fresh) or name == "plain"
    for case in range(1 if batched else 3):
        chance, engine = random.Random(case), Engine(PAIRS[name](), batched=batched)
        for _ in range(4):
            asked(engine, chance, settings, PROMPT)
        assert told(engine, PROMPT, settings) == fresh, case
        assert told(engine, PROMPT, settings) == fresh, case


@pytest.mark.parametrize("name", PAIRS)
def test_a_second_turn_is_what_a_fresh_engine_writes(name):
    """The history is the conversation itself: what it committed is in the prompt, and nothing else counts."""
    engine = Engine(PAIRS[name](), batched=False)
    generation = engine.generate(PROMPT, SETTINGS)
    list(generation)
    follow_up = [*PROMPT, *generation.reply.token_ids, 2, 0, 1]
    fresh = Engine(PAIRS[name](), batched=False)
    assert told(engine, follow_up, SETTINGS) == told(fresh, follow_up, SETTINGS)


@pytest.mark.parametrize("name", [name for name in PAIRS if name != "plain"])
def test_a_copied_state_is_one_of_its_own(name):
    """What is done with the copy leaves the other as it was."""
    pair = PAIRS[name]()
    engine = Engine(pair, batched=False)
    list(engine.generate(PROMPT * 3, SETTINGS))
    (kept,) = engine._kept._kept
    before, copy = vars_of(kept.state(pair.drafter)), kept.fork(len(PROMPT))
    pair.drafter.prefill([3, 3, 2, 3], state := copy.state(pair.drafter), copy.cache)
    if name.endswith("recycling"):
        rows = pair.target.logits([3, 2, 1], pair.target.new_cache())
        pair.drafter.observe([0, 1, 2], rows, state)
    assert vars_of(kept.state(pair.drafter)) == before


def vars_of(state: object) -> str:
    """All that a state holds, by value."""
    if not hasattr(state, "__dict__"):
        return repr(state.tolist() if hasattr(state, "tolist") else state)
    return repr({name: vars_of(value) for name, value in vars(state).items()})
