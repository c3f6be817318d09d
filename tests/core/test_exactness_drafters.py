"""Rule 14 for the drafters without training: the tests of ``test_exactness`` on the drafters themselves."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch

from core.drafters.auto import AutoDrafter
from core.drafters.early_exit import EarlyExitDrafter
from core.drafters.ngram import NgramDrafter
from core.drafters.recycling import RecyclingDrafter
from core.engine import Engine
from core.records import EMITTED, Fate, Settings
from tests.core.test_exactness import LENGTH, failing, g_test, joint
from tests.core.tiny import as_decoder, tiny_llama
from tests.core.toys import table, toy_pair

PROMPT = [0, 1, 2, 0, 1, 1, 2, 0, 1]  # which repeats itself: a lookup finds something
FILTERS = dict(temperature=0.9, top_k=2, top_p=0.95)


def _engine(drafter) -> Engine:
    pair = toy_pair(table(1, 3, 1.2), table(2, 3, 1.2))
    made = {
        "ngram": lambda: NgramDrafter(64),
        "recycling": lambda: RecyclingDrafter(64),
        "auto": lambda: AutoDrafter(pair.drafter),
        "auto, recycling": lambda: AutoDrafter(RecyclingDrafter(64)),
        "auto, failing": lambda: AutoDrafter(
            toy_pair(table(1, 3), failing(table(2, 3, 1.2), {len(PROMPT) + 1})).drafter
        ),
    }[drafter]()
    return Engine(dataclasses.replace(pair, drafter=made), batched=False)


CASES = {
    "ngram": ("ngram", Settings(temperature=1.0)),
    "ngram, filters": ("ngram", Settings(**FILTERS)),
    "ngram, block": ("ngram", Settings(temperature=1.0, verifier="block")),
    "ngram, penalty": ("ngram", Settings(temperature=1.0, repetition_penalty=1.6)),
    "recycling": ("recycling", Settings(temperature=1.0)),
    "recycling, tree": ("recycling", Settings(temperature=1.0, tree_width=2)),
    "recycling, wide tree": ("recycling", Settings(temperature=0.8, num_draft_tokens=2, tree_width=3)),
    "recycling, tree, filters": ("recycling", Settings(**FILTERS, tree_width=2)),
    "recycling, tree, penalty": (
        "recycling",
        Settings(temperature=1.0, repetition_penalty=1.6, tree_width=2),
    ),
    "auto": ("auto", Settings(temperature=1.0)),
    "auto, filters": ("auto", Settings(**FILTERS)),
    "auto, recycling, tree": ("auto, recycling", Settings(temperature=1.0, tree_width=2)),
    "auto, K changes": ("auto, failing", Settings(temperature=1.0)),
}


@pytest.mark.parametrize("name", CASES)
def test_sampled_replies(name):
    drafter, settings = CASES[name]
    engine, counts, fates, by, replies = _engine(drafter), Counter(), Counter(), set(), 700
    for seed in range(replies):
        settings = dataclasses.replace(settings, seed=seed, max_new_tokens=LENGTH)
        generation = engine.generate(PROMPT, settings)
        rounds = list(generation)
        for round_ in rounds:
            by.add(round_.drafter)
            assert (round_.drafter is None) == (round_.drafted == 0)
            fates.update(token.fate for token in round_.tokens)
        emitted = tuple(t.id for r in rounds for t in r.tokens if t.fate in EMITTED)
        assert emitted == generation.reply.token_ids
        counts[emitted] += 1
    expected = joint(table(1, 3, 1.2), settings, LENGTH, 3, prompt=PROMPT)
    assert g_test(counts, expected, replies) > 1e-3
    assert fates[Fate.ACCEPTED] and fates[Fate.REJECTED]
    if drafter.startswith("auto"):
        assert by >= {"ngram", "recycling" if "recycling" in drafter else "model"}


@pytest.mark.parametrize("filters", [dict(temperature=1.0), FILTERS])
def test_early_exit(filters):
    """On a real decoder, whose cache the drafter shares."""
    model = as_decoder(tiny_llama(5, vocabulary=4, layers=3))
    drafter = EarlyExitDrafter(model, layers=1)
    pair = dataclasses.replace(toy_pair(table(1, 4), table(1, 4)), target=model, drafter=drafter)
    engine, counts, fates, replies = Engine(pair, batched=False), Counter(), Counter(), 800
    settings = Settings(**filters, num_draft_tokens=2, max_new_tokens=3)
    for seed in range(replies):
        generation = engine.generate([0, 1, 2], dataclasses.replace(settings, seed=seed))
        fates.update(token.fate for round_ in generation for token in round_.tokens)
        counts[generation.reply.token_ids] += 1

    @torch.inference_mode()
    def logits_of(ids):
        return model.logits(ids, model.new_cache())[-1]

    expected = joint(logits_of, settings, 3, 4, prompt=[0, 1, 2])
    assert g_test(counts, expected, replies) > 1e-3
    assert fates[Fate.ACCEPTED] and fates[Fate.REJECTED]
