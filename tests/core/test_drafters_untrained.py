"""Drafters without training: what they propose, what they keep, and where they have nothing to say."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from core.drafters.auto import LONG_MATCH, AutoDrafter
from core.drafters.base import Drafting
from core.drafters.early_exit import EarlyExitDrafter
from core.drafters.names import DRAFTERS
from core.drafters.ngram import LEAST_MATCH, Lookup, NgramDrafter
from core.drafters.recycling import RecyclingDrafter, Table
from core.drafters.suffix import SuffixAutomaton
from core.drafters.untrained import makers
from core.engine.loop import Engine
from core.figures.metrics import summarize
from core.records import Fate, Settings
from core.text.detokenise import PromptError
from tests.core.tiny import as_decoder, held, tiny_llama
from tests.core.toys import path, table, toy_pair


def longest_repeat(ids: list[int]) -> int:
    """The length of the longest ending of ``ids`` that occurs before, by looking everywhere."""
    for length in range(len(ids) - 1, 0, -1):
        ending = ids[-length:]
        if any(ids[i : i + length] == ending for i in range(len(ids) - length)):
            return length
    return 0


@pytest.mark.parametrize("letters", [1, 2, 3, 6])
def test_the_automaton_finds_the_longest_repeat(letters):
    draw = random.Random(letters)
    for _ in range(30):
        automaton, ids = SuffixAutomaton(), []
        for _ in range(40):
            ids.append(draw.randrange(letters))
            automaton.extend(ids[-1:])
            length, end = automaton.match
            assert length == longest_repeat(ids)
            assert end < len(ids) and (not length or ids[end - length : end] == ids[-length:])


def test_what_followed_a_repeat_is_proposed_as_certain():
    drafter = NgramDrafter(64)
    ids = [5, 6, 7, 8, 9, 5, 6, 7]
    proposals = drafter.draft(ids, 3, Settings(), lambda: 0.5, drafter.new_state(), None)
    assert [p.id for p in proposals] == [8, 9, 5]
    assert [p.parent for p in proposals] == [None, 0, 1]
    assert all(p.q.at(p.id) == 1.0 for p in proposals)


def test_a_repeat_that_reaches_the_end_goes_on_repeating():
    drafter = NgramDrafter(64)
    proposals = drafter.draft([9, 1, 2, 1, 2], 5, Settings(), lambda: 0.5, drafter.new_state(), None)
    assert [p.id for p in proposals] == [1, 2, 1, 2, 1]


def test_one_common_id_is_no_match():
    drafter = NgramDrafter(64)
    assert LEAST_MATCH == 2
    assert drafter.draft([1, 2, 3, 1], 3, Settings(), lambda: 0.5, drafter.new_state(), None) == []


def test_a_lookup_that_was_cropped_or_forked_is_one_built_anew():
    ids = [random.Random(1).randrange(3) for _ in range(60)]
    state = Lookup(ids)
    fork = state.fork(30)
    state.crop(41)
    state.crop(99)
    state.read(ids[:50])
    fork.read(ids[:50])
    fresh = Lookup(ids[:50])
    assert state.length == fork.length == 50
    assert state.continuation(4) == fork.continuation(4) == fresh.continuation(4)
    assert state.automaton.match[0] == fresh.automaton.match[0]


def test_successors_are_the_targets_likeliest_and_are_refreshed():
    drafter, state = RecyclingDrafter(64), Table()
    drafter.prefill([1, 2, 1, 3], state, None)
    assert state.successors == {1: [3, 2], 2: [1]}
    drafter.observe([1, 3], torch.tensor([[0.0, 1.0, 5.0, 2.0], [9.0, 0.0, 1.0, 2.0]]), state)
    assert state.successors[1] == [2, 3, 1, 0] and state.successors[3] == [0, 3, 2, 1]

    def drafted(**settings):
        return drafter.draft([0, 1], 3, Settings(**settings), lambda: 0.5, state, None)

    assert [p.id for p in drafted()] == [2, 1, 2]
    tree = drafted(tree_width=2)
    assert [(p.id, p.parent) for p in tree] == [(2, None), (3, None), (1, 0), (2, 2), (3, 2)]
    fork = state.fork(1)
    drafter.observe([1], torch.tensor([[9.0, 1.0, 5.0, 2.0]]), state)
    assert fork.successors[1] == [2, 3, 1, 0]


def test_early_exit_leaves_the_targets_cache_as_it_was():
    model = as_decoder(tiny_llama(1, layers=3))
    drafter, ids = EarlyExitDrafter(model), [3, 1, 4, 1, 5]
    assert drafter.layers == 1
    cache = model.new_cache()
    with torch.inference_mode():
        model.prefill(ids[:-1], cache)
        before = held(cache, 4)
        proposals = drafter.draft(ids, 3, Settings(temperature=0.8), lambda: 0.5, drafter.new_state(), cache)
        assert cache.length == 4 and torch.equal(held(cache, 4), before)
        rows = model.logits([5, *(p.id for p in proposals)], cache)
        fresh = model.new_cache()
        torch.testing.assert_close(rows, model.logits([*ids, *(p.id for p in proposals)], fresh)[4:])
    assert len(proposals) == 3


def test_early_exit_with_all_layers_is_the_target():
    model = as_decoder(tiny_llama(1, vocabulary=20, layers=2))
    pair = dataclasses.replace(
        toy_pair(table(1, 4), table(1, 4)), target=model, drafter=EarlyExitDrafter(model, layers=2)
    )
    settings = Settings(temperature=0, num_draft_tokens=3, max_new_tokens=12)
    rounds = list(Engine(pair).generate([1, 2], settings))
    assert summarize(rounds).rejected == 0 and summarize(rounds).accepted == 9


def test_auto_trusts_a_long_repeat_and_asks_the_model_elsewhere():
    drafter = AutoDrafter(toy_pair(table(1, 9), table(1, 9)).drafter, 64)
    state, settings = drafter.new_state(), Settings(temperature=0)

    def by(ids):
        drafter.draft(ids, 2, settings, lambda: 0.5, state, None)
        return drafter.proposer(state)

    text = [1, 2, 3, 4, 5, 6, 7]
    assert by([*text, 0, *text[: LONG_MATCH - 1]]) == "model"
    assert by([*text, 0, *text[:LONG_MATCH]]) == "ngram"
    assert by([*text, 0, *text[:LONG_MATCH], 0]) == "model"


def test_a_round_without_a_match_is_a_plain_step_and_says_so():
    reply = [2, 3, 4, 2, 3, 4, 2, 3]
    pair = toy_pair(path(reply, 6, 2), table(1, 6))
    pair.drafter = NgramDrafter(64)
    settings = Settings(temperature=0, num_draft_tokens=2, max_new_tokens=8)
    rounds = list(Engine(pair).generate([0, 1], settings))
    first, *_ = rounds
    assert [t.fate for t in first.tokens] == [Fate.PLAIN] and first.drafter is None
    assert first.num_draft_tokens == 2 and first.num_draft_tokens_reason == "no_match"
    assert any(r.drafter == "ngram" and r.count(Fate.ACCEPTED) == 2 for r in rounds)
    assert [t.id for r in rounds for t in r.tokens if t.emitted] == reply


def test_any_pair_offers_them_by_name():
    pair = toy_pair(table(1, 4), table(1, 4))
    own = Drafting(pair.drafter, dict(draft="Toy", draft_fingerprint="f", drafter="model"), 0.7)
    pair.others = makers(pair.target, pair.info, own)
    assert pair.drafters == ("model", "ngram", "recycling", "auto", "plain")
    assert set(pair.drafters) < set(DRAFTERS)
    assert pair.drafting("ngram").info.draft == "n-gram lookup"
    assert pair.drafting("auto").acceptance == 0.7 and pair.drafting("auto") is pair.drafting("auto")
    assert pair.drafting("plain").drafter is None and pair.drafting(None) is pair
    alone = makers(as_decoder(tiny_llama(1)), pair.info, None)
    assert alone["auto"]().drafter.other.name == "recycling"
    assert alone["auto"]().acceptance == alone["recycling"]().acceptance > alone["early-exit"]().acceptance
    assert alone["early-exit"]().about["draft"] == "the target's first 1 layers"
    with pytest.raises(PromptError, match="no drafter 'eagle': choose one of model, ngram"):
        Engine(pair).generate([1], Settings(), drafter="eagle")


def test_a_conversation_may_change_its_drafter():
    pair = toy_pair(table(1, 5), table(2, 5))
    pair.others = makers(pair.target, pair.info, None)
    engine, ids = Engine(pair), [0, 1, 2, 0, 1]
    settings = Settings(temperature=0, num_draft_tokens=3, max_new_tokens=6)
    replies = set()
    for name in ("model", "ngram", "plain", "recycling", "model", "auto"):
        generation = engine.generate(ids, settings, drafter=name)
        list(generation)
        replies.add(generation.reply.token_ids)
        assert generation.reply.pair.drafter == name
    assert len(replies) == 1  # temperature 0: whoever drafts
