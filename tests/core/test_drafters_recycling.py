"""Token recycling where a tree cannot be scored: no target for it, or no room behind the text."""

from __future__ import annotations

import dataclasses
import random

import pytest

from core.drafters.recycling import RecyclingDrafter
from core.drafters.untrained import makers
from core.engine.loop import Engine
from core.engine.rounds import is_chain
from core.models.transformers_decoder import TransformersDecoder
from core.records import Settings
from tests.core.tiny import as_decoder, tiny_llama
from tests.core.toys import table, toy_pair

VOCABULARY = 7


def ids_of(count: int) -> list[int]:
    return random.Random(count).choices(range(VOCABULARY), k=count)


def rounds_of(target, drafter, prompt: list[int], settings: Settings) -> list:
    pair = toy_pair(table(1, VOCABULARY), table(1, VOCABULARY))
    generation = Engine(dataclasses.replace(pair, target=target, drafter=drafter)).generate(prompt, settings)
    rounds = list(generation)
    assert generation.reply.error is None
    assert generation.reply.finish_reason == "length"
    return rounds


@pytest.mark.parametrize("context", [256, 300])  # a whole block of keys, and one that ends inside a block
def test_a_tree_stays_within_the_context(context):
    target = as_decoder(tiny_llama(1, vocabulary=VOCABULARY, context=context))
    drafter, width, k = RecyclingDrafter(context), 4, 8
    settings = Settings(temperature=1.0, num_draft_tokens=k, max_new_tokens=200, tree_width=width)
    rounds = rounds_of(target, drafter, ids_of(context - 60), settings)
    assert rounds[-1].context_tokens == context
    before = [r.context_tokens - r.emitted for r in rounds]
    for start, round_ in zip(before, rounds, strict=True):
        assert start + round_.drafted <= context
    assert any(r.drafted > k for r in rounds), "no tree was drafted where there was room"
    assert any(
        0 < r.drafted <= k and start + k * width > context for start, r in zip(before, rounds, strict=True)
    )


def test_a_target_that_scores_no_trees_is_given_chains():
    target = TransformersDecoder(tiny_llama(1, vocabulary=VOCABULARY))
    found = makers(target, toy_pair(table(1, 4), table(1, 4)).info, None)
    settings = Settings(temperature=1.0, num_draft_tokens=3, max_new_tokens=20, tree_width=3)
    for name in ("recycling", "auto"):
        rounds = rounds_of(target, found[name]().drafter, ids_of(9), settings)
        assert any(r.drafted == 3 for r in rounds)
        assert all(is_chain([t for t in r.tokens if t.drafted]) for r in rounds)


def test_a_seed_gives_the_same_rounds_whatever_other_text_was_written_before():
    def engine() -> Engine:
        pair = toy_pair(table(1, VOCABULARY), table(1, VOCABULARY))
        return Engine(dataclasses.replace(pair, drafter=RecyclingDrafter(64)))

    def written(engine: Engine, prompt: list[int]) -> list[list[tuple]]:
        settings = Settings(temperature=1.0, num_draft_tokens=3, max_new_tokens=20, tree_width=2, seed=5)
        rounds = list(engine.generate(prompt, settings))
        return [[(token.id, token.fate, token.u) for token in round_.tokens] for round_ in rounds]

    first, second = engine(), engine()
    assert any(len(tokens) > 4 for tokens in written(first, [1, 2, 3, 1]))  # a tree
    assert written(first, [4, 5, 4, 6]) == written(second, [4, 5, 4, 6])
