"""Rounds with trees on the device: the same figures as step by step, for every drafter that makes trees."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import pytest
import torch

from core.bench.synthetic_traffic import Watch
from core.drafters.auto import AutoDrafter
from core.drafters.early_exit import EarlyExitDrafter
from core.drafters.recycling import RecyclingDrafter
from core.engine.loop import Engine
from core.pairs.pair import Pair
from core.records import Fate, Settings
from tests.core.engine.test_batched import SETTINGS, Letters, assert_alike, play
from tests.core.toy_drafts import toy_drafts_pair
from tests.core.toys import table, toy_pair

REPEATING = [1, 2, 3, 4, 5, 6, 1, 2, 4, 3, 5, 6, 1, 2]
LONG = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4]  # a repeat that auto looks up


def recycling_on_toys(seed: int = 0, auto: bool = False) -> Pair:
    target = table(seed, 12, 2.0)
    pair = toy_pair(target, target, eos=9 if seed == 3 else None)
    pair.drafter = RecyclingDrafter(64)
    if auto:
        pair.drafter = AutoDrafter(pair.drafter, 64)
    return pair


def on_the_decoder(drafter: str) -> Pair:
    """Whose cache is brought together behind a branch that stands."""
    pair = toy_drafts_pair("medusa" if drafter == "medusa" else "eagle")
    if drafter == "recycling":
        pair.drafter = RecyclingDrafter(pair.target.context_length)
    elif drafter == "auto":
        pair.drafter = AutoDrafter(pair.drafter, pair.target.context_length)
    elif drafter == "early-exit":
        pair.drafter = EarlyExitDrafter(pair.target, layers=2)
    return pair


DRAFTERS = ("recycling", "eagle", "medusa")
SHAPES = [(1, 2), (2, 4), (3, 3), (5, 2), (6, 4)]  # K and width


@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "no drafts"])
@pytest.mark.parametrize("auto", [False, True], ids=["recycling", "auto"])
def test_recycled_trees_under_every_filter(auto, name, verifier):
    """``auto`` looks up chains between the trees, which a block rule judges as blocks."""
    settings = dataclasses.replace(SETTINGS[name], verifier=verifier, max_new_tokens=20)
    fates: Counter = Counter()
    for seed, (k, width) in enumerate(SHAPES):
        changed = dataclasses.replace(settings, seed=seed, num_draft_tokens=k, tree_width=width)
        tokens = assert_alike(recycling_on_toys(seed, auto), changed, REPEATING)
        fates.update(token.fate for token in tokens)
        fates["later sibling"] += sum(
            token.fate is Fate.ACCEPTED and token.index % width > 0 for token in tokens
        )
    assert {Fate.REJECTED, Fate.ACCEPTED, Fate.RESAMPLED} <= fates.keys()
    assert fates["later sibling"] or settings.temperature == 0 or settings.top_k == 1


@pytest.mark.parametrize("name", ["plain sampling", "all", "greedy"])
@pytest.mark.parametrize("drafter", [*DRAFTERS, "auto", "early-exit"])
def test_trees_and_chains_on_the_decoder(drafter, name):
    pair, fates, parents, by = on_the_decoder(drafter), Counter(), set(), set()
    for seed, (k, width) in enumerate([*SHAPES, (3, 1), (6, 1)]):
        settings = dataclasses.replace(
            SETTINGS[name], seed=seed, num_draft_tokens=k, tree_width=width, max_new_tokens=10
        )
        settings = dataclasses.replace(settings, verifier=("token", "block")[seed % 2])
        # Products over other numbers of rows round otherwise.
        tokens = assert_alike(pair, settings, LONG, close=1e-5)
        fates.update(token.fate for token in tokens)
        parents |= {(k, width, token.parent) for token in tokens if token.drafted}
        by |= {round_.drafter for round_ in play(pair, settings, True, LONG)[0]}
    wanted = {Fate.REJECTED, Fate.ACCEPTED} if settings.temperature else {Fate.REJECTED}
    assert wanted <= fates.keys()  # random heads are never what the target thinks likeliest
    assert {(5, 2, 2), (3, 1, 1)} <= parents or drafter == "early-exit"  # which makes chains
    assert by - {None} == ({"ngram", "eagle"} if drafter == "auto" else {drafter})


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_prompt_of_one_id_of_which_the_target_has_read_nothing(drafter):
    """Medusa has nothing to look at then, and recycling no table: a tree of no positions is a plain round."""
    settings = Settings(temperature=1.0, num_draft_tokens=3, tree_width=3, max_new_tokens=6)
    tokens = assert_alike(on_the_decoder(drafter), settings, [3], close=1e-5)
    assert (tokens[0].fate is Fate.PLAIN) == (drafter != "eagle")


@pytest.mark.parametrize("drafter", ["eagle", "medusa"])
def test_bad_rows_of_a_draft_end_drafting_alike(drafter):
    pair, reasons = on_the_decoder(drafter), set()
    owner, name = (pair.drafter._model, "head") if drafter == "eagle" else (pair.drafter, "_score")
    scored = getattr(owner, name)
    # Where they are is for the row to say, however many are scored at once.
    setattr(owner, name, lambda x: scored(x).masked_fill(x[:, :1] < -0.4, math.nan))
    for seed, (k, width) in enumerate([*SHAPES, (4, 1)]):
        settings = Settings(
            temperature=1.0, seed=seed, num_draft_tokens=k, tree_width=width, max_new_tokens=10
        )
        assert_alike(pair, settings, close=1e-5)
        rounds, _ = play(pair, settings, True)
        reasons |= {(round_.num_draft_tokens_reason, round_.drafted > 0) for round_ in rounds}
    short = pair.drafter.short(None)
    assert {(short, True), (short, False)} <= reasons


@pytest.mark.parametrize("reason", ["stop_string", "length", "eos_token"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_replies_end_alike_in_the_middle_of_a_tree(drafter, reason):
    """And what was read goes on in the next reply, with a tree of another width."""
    changes = dict(stop=("a", "e", "q", "t", "u")) if reason == "stop_string" else {}
    pair, settings = on_the_decoder(drafter), Settings(temperature=1.0, max_new_tokens=11, **changes)
    if reason == "eos_token":
        pair = dataclasses.replace(pair, end_ids=frozenset({3, 7, 11}))
    settings = dataclasses.replace(settings, num_draft_tokens=4, tree_width=3)
    engines = [Engine(pair, batched=batched) for batched in (True, False)]
    ids, reasons = [1, 2], set()
    for turn in range(3):
        changed, said = dataclasses.replace(settings, seed=turn, tree_width=(3, 1, 2)[turn]), []
        for engine in engines:
            rounds = list(generation := engine.generate(ids, changed))
            reply = generation.reply
            tokens = [(token.id, token.fate) for round_ in rounds for token in round_.tokens]
            said.append((reply.token_ids, reply.finish_reason, reply.error, reply.reused_tokens, tokens))
        assert said[0] == said[1], turn
        reasons.add(reply.finish_reason)
        ids = [*ids, *reply.token_ids, 3]
    assert reason in reasons


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_tree_becomes_a_chain_near_the_end_of_the_context(drafter):
    pair = on_the_decoder(drafter)
    prompt = [i % 7 for i in range(pair.target.context_length - 20)]
    settings = Settings(temperature=1.0, num_draft_tokens=3, tree_width=4, max_new_tokens=64, seed=3)
    tokens = assert_alike(pair, settings, prompt, close=1e-5)
    assert sum(token.emitted_index is not None for token in tokens) == 20


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_rows_of_the_target_end_a_reply_alike(bad):
    """On the way of the first candidates, behind a later one, or where nobody gets to."""
    ends: Counter = Counter()
    for seed in range(8):
        clean = table(seed, 12, 2.0)

        def target(ids, clean=clean):
            logits = clean(ids).clone()
            if len(ids) > 18 and ids[-1] in (2, 7):
                logits[:] = bad if bad == -math.inf else logits
                logits[2] = bad
            return logits

        pair = dataclasses.replace(toy_pair(target, target), drafter=RecyclingDrafter(64))
        settings = Settings(temperature=1.3, num_draft_tokens=3, tree_width=3, max_new_tokens=30, seed=seed)
        assert_alike(pair, settings, REPEATING)
        _, reply = play(pair, settings, True, REPEATING)
        ends[reply.finish_reason] += 1
    assert ends["error"] > 2


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_round_that_memory_broke_off_is_played_again_with_its_draws(drafter):
    pair = on_the_decoder(drafter)
    settings = Settings(temperature=1.0, num_draft_tokens=4, tree_width=3, max_new_tokens=16)
    wanted = play(pair, settings, True, REPEATING)[1].token_ids
    whole, calls = pair.target.device_tree_logits, []

    def short_of_memory(ids, parents, cache):
        calls.append(len(ids))
        found = whole(ids, parents, cache)
        if len(calls) in (2, 5):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return found

    pair.target.device_tree_logits = short_of_memory
    assert play(pair, settings, True, REPEATING)[1].token_ids == wanted
    assert len(calls) > 5


@pytest.mark.parametrize("name", ["plain sampling", "all", "greedy, penalty"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_one_transfer_a_round(drafter, name):
    """In one pass behind a mask, as on a card."""
    pair = on_the_decoder(drafter)
    pair.target._query_block = 1
    pair.tokenizer = Letters()
    settings = dataclasses.replace(SETTINGS[name], num_draft_tokens=3, tree_width=3, max_new_tokens=16)
    generation = Engine(pair, batched=True).generate([1, 2, 3, 1, 2], settings)
    rounds = [next(generation)]  # warms the models up
    with Watch().watching() as watch:
        rounds += generation
    assert any(round_.drafted > 3 for round_ in rounds[1:])
    assert watch.waits == Counter(tolist=len(rounds) - 1)
