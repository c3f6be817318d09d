"""Chains of EAGLE, Medusa and early exit on the device: the same rounds as step by step, whatever happens.

On a real decoder, whose features and keys these drafters look at. Trees are in ``test_batched_trees.py``.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter

import pytest
import torch

from core.bench.synthetic_traffic import Watch
from core.drafters.auto import AutoDrafter
from core.drafters.early_exit import EarlyExitDrafter
from core.engine.batched import Batched
from core.engine.loop import Engine
from core.models.decoder import Decoder
from core.pairs.pair import Pair
from core.records import Fate, Settings
from tests.core.engine.test_batched import SETTINGS, Letters, assert_alike, play
from tests.core.engine.test_batched_trees import LONG
from tests.core.toy_drafts import toy_drafts_pair

DRAFTERS = ("eagle", "medusa", "early-exit")
CLOSE = 1e-5  # products over other numbers of rows round otherwise
SOME = [0, 2, 3, 5, 7, 8, 11, 12, 15, 17, 20, 21, 24, 25]  # ids of a trimmed head


def chains(drafter: str, head_ids=None, auto: bool = False) -> Pair:
    pair = toy_drafts_pair("medusa" if drafter == "medusa" else "eagle", head_ids=head_ids)
    if drafter == "early-exit":
        pair.drafter = EarlyExitDrafter(pair.target, layers=2)
    if auto:
        pair.drafter = AutoDrafter(pair.drafter, pair.target.context_length)
    return pair


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "no drafts"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_same_rounds_as_step_by_step(drafter, name):
    fates: Counter = Counter()
    for seed, (k, verifier) in enumerate([(1, "token"), (3, "block"), (2, "block"), (5, "token")]):
        settings = dataclasses.replace(
            SETTINGS[name], verifier=verifier, seed=seed, num_draft_tokens=k, max_new_tokens=8
        )
        tokens = assert_alike(chains(drafter, SOME if seed % 2 else None), settings, [1, 2, 3], CLOSE)
        fates.update(token.fate for token in tokens)
    assert {Fate.REJECTED, Fate.RESAMPLED} <= fates.keys()
    assert fates[Fate.ACCEPTED] or name != "plain sampling"  # a random draft is rarely right elsewhere


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_round_without_room_for_drafts(drafter, k):
    """As at the end of replies, with a head that has not all ids."""
    settings = Settings(temperature=1.0, num_draft_tokens=k, max_new_tokens=1)
    tokens = assert_alike(chains(drafter, SOME), settings, [1, 2, 3], CLOSE)
    assert [token.fate for token in tokens] == [Fate.PLAIN]


def test_medusa_is_short_beyond_its_heads():
    settings = Settings(temperature=1.0, num_draft_tokens=5, max_new_tokens=12)
    assert_alike(chains("medusa"), settings, [1, 2], CLOSE)
    round_ = play(chains("medusa"), settings, True, [1, 2])[0][0]
    assert (round_.drafted, round_.num_draft_tokens_reason) == (3, "no_match")


@pytest.mark.parametrize("name", ["plain sampling", "penalty", "greedy"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_auto_hands_over_to_each(drafter, name):
    """Rounds that were looked up stand between those of the drafter, which reads what they left."""
    pair, by = chains(drafter, auto=True), set()
    for seed, verifier in enumerate(("token", "block")):
        settings = dataclasses.replace(
            SETTINGS[name], verifier=verifier, seed=seed, num_draft_tokens=3, max_new_tokens=10
        )
        assert_alike(pair, settings, LONG, CLOSE)
        by |= {round_.drafter for round_ in play(pair, settings, True, LONG)[0]}
    assert by - {None} == {"ngram", drafter}


def spoilt(drafter: str, bad: float) -> Pair:
    """Some rows of the draft are of no use; the row says which, however many are scored at once."""
    pair = chains(drafter)
    if drafter == "early-exit":  # over the same cache, with a head of its own
        owner, name = copy.copy(pair.target), "head"
        pair.drafter = EarlyExitDrafter(owner, layers=2)
    else:
        owner, name = (pair.drafter._model, "head") if drafter == "eagle" else (pair.drafter, "_score")
    scored = getattr(owner, name)

    def some(x: torch.Tensor) -> torch.Tensor:
        rows = scored(x)
        here = rows.masked_fill(torch.ones_like(rows, dtype=torch.bool), -math.inf) if bad < 0 else rows
        here = here.index_fill(1, torch.tensor([4]), bad)
        return torch.where(x[:, :1] < -0.4, here, rows)

    setattr(owner, name, some)
    return pair


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_bad_rows_of_a_draft_end_drafting_alike(drafter, bad):
    pair, found = spoilt(drafter, bad), set()
    for seed, verifier in enumerate(("token", "block")):
        settings = Settings(
            temperature=1.0, seed=seed, verifier=verifier, num_draft_tokens=3, max_new_tokens=12
        )
        assert_alike(pair, settings, [1, 2, 3], CLOSE)
        rounds, reply = play(pair, settings, True, [1, 2, 3])
        assert reply.error is None and len(reply.token_ids) == settings.max_new_tokens
        found |= {(round_.num_draft_tokens_reason, round_.drafted > 0) for round_ in rounds}
    short = pair.drafter.short(None)
    assert {(short, True), (short, False)} <= found


@pytest.mark.parametrize("auto", [False, True], ids=["alone", "auto"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_replies_that_end_or_are_stopped_go_on_alike(drafter, auto):
    """Each reply goes on from kept caches: after an end in the middle of a block, after a stop, at another K,
    after rounds without drafts. What a rejected draft left must not be seen."""
    pair = chains(drafter, auto=auto)
    engines = [Engine(pair, batched=batched) for batched in (True, False)]
    ids, ended, fates = [1, 2], set(), Counter()
    for turn, k in enumerate((4, 2, 0, 2, 6, 3)):
        stop = ("a", "e", "q", "t", "u") if turn > 2 else ()
        settings = Settings(temperature=1.0, seed=turn, num_draft_tokens=k, max_new_tokens=12, stop=stop)
        said = []
        for engine in engines:
            generation = engine.generate(ids, settings)
            rounds = []
            for round_ in generation:
                rounds.append(round_)
                if turn == 1:
                    generation.close()
            tokens = [(token.id, token.fate, token.index) for round_ in rounds for token in round_.tokens]
            reply = generation.reply
            said.append((reply.token_ids, reply.finish_reason, reply.error, reply.reused_tokens, tokens))
        assert said[0] == said[1], turn
        fates.update(fate for _, fate, _ in tokens)
        ended.add(reply.finish_reason)
        assert not turn or reply.reused_tokens
        ids = [*ids, *reply.token_ids, 5]
    assert {"cancelled", "length", "stop_string"} <= ended
    assert {Fate.ACCEPTED, Fate.REJECTED} <= fates.keys()


@pytest.mark.parametrize("k", [3, 6])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_context_ends_alike(drafter, k):
    pair = chains(drafter)
    prompt = [i % 7 for i in range(pair.target.context_length - 15)]
    settings = Settings(temperature=1.0, num_draft_tokens=k, max_new_tokens=64, seed=3)
    tokens = assert_alike(pair, settings, prompt, CLOSE)
    assert sum(token.emitted_index is not None for token in tokens) == 15


def test_medusa_waits_until_the_target_has_read_something():
    settings = Settings(temperature=1.0, num_draft_tokens=2, max_new_tokens=8)
    assert_alike(chains("medusa"), settings, [1], CLOSE)
    rounds, _ = play(chains("medusa"), settings, True, [1])
    assert [round_.drafted for round_ in rounds[:2]] == [0, 2]


@pytest.mark.parametrize("auto", [False, True], ids=["alone", "auto"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_memory_that_ends_in_a_round_does_not_change_the_reply(drafter, auto, monkeypatch):
    """At any pass of target and draft, before it or when its keys have been written: the round is played
    again with the draws it had."""
    prompt = LONG if auto else [1, 2, 3]
    settings = Settings(temperature=1.0, num_draft_tokens=3, max_new_tokens=14, repetition_penalty=1.3)
    pair = chains(drafter, auto=auto)
    whole, calls = play(pair, settings, True, prompt)[1].token_ids, []
    forward = Decoder.forward

    def full_once(self, *given, **how):
        calls.append(len(calls))
        if calls[-1] == ends and not after:
            raise torch.OutOfMemoryError("CUDA out of memory")
        made = forward(self, *given, **how)
        if calls[-1] == ends:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made

    for ends, after in ((n, after) for n in range(6) for after in (False, True)):
        generation = Engine(pair, batched=True).generate(prompt, settings)
        next(generation)
        calls.clear()
        with monkeypatch.context() as patched:
            patched.setattr(Decoder, "forward", full_once)
            list(generation)
        assert len(calls) > ends
        assert (generation.reply.error, generation.reply.token_ids) == (None, whole), (ends, after)


@pytest.mark.parametrize("name", ["plain sampling", "all", "greedy, penalty"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_one_transfer_a_round(drafter, name):
    pair = chains(drafter, SOME)
    pair.tokenizer = Letters()
    settings = dataclasses.replace(SETTINGS[name], num_draft_tokens=3, max_new_tokens=12)
    generation = Engine(pair, batched=True).generate([1, 2, 3], settings)
    rounds = [next(generation)]  # warms the models up
    with Watch().watching() as watch:
        rounds += generation
    assert all(round_.drafted for round_ in rounds[1:-1])
    assert watch.waits == Counter(tolist=len(rounds) - 1)


@pytest.mark.parametrize("auto", [False, True], ids=["alone", "auto"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_card_plays_them_so(drafter, auto):
    pair = chains(drafter, auto=auto)
    assert not Batched.suits(pair)  # on a processor
    pair.target.device = torch.device("cuda")
    its = pair.drafter.other if auto else pair.drafter
    on_card = drafter != "eagle"  # whose layer is a model of its own, on the processor still
    assert Batched.suits(pair) == on_card
    for model in its.device_models:
        model.device = torch.device("cuda")
    assert Batched.suits(pair, "token") and Batched.suits(pair, "block")
    assert not Batched.suits(pair, "typical")
