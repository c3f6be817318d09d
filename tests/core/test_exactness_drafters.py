"""Rule 14 for the drafters without training: the tests of ``test_exactness`` on the drafters themselves."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import product

import pytest
import torch

from core.drafters.auto import AutoDrafter
from core.drafters.early_exit import EarlyExitDrafter
from core.drafters.ngram import NgramDrafter
from core.drafters.recycling import RecyclingDrafter
from core.engine.loop import Engine
from core.figures.costs import Costs
from core.records import EMITTED, Fate, Settings
from core.text.chat import encode_chat
from tests.core.test_exactness import LENGTH, enumerate_replies, failing, g_test, joint
from tests.core.tiny import as_decoder, tiny_llama
from tests.core.toys import table, toy_pair

pytestmark = pytest.mark.usefixtures("remembered")
PROMPT = [0, 1, 2, 0, 1, 1, 2, 0, 1]  # which repeats itself: a lookup finds something
FILTERS = dict(temperature=0.9, top_k=2, top_p=0.95)


def _engine(drafter, batched) -> Engine:
    pair = toy_pair(table(1, 3, 1.2), table(2, 3, 1.2))
    pair.target.vocabulary = 3
    made = {
        "ngram": lambda: NgramDrafter(64),
        "recycling": lambda: RecyclingDrafter(64),
        "auto": lambda: AutoDrafter(pair.drafter, 64),
        "auto, recycling": lambda: AutoDrafter(RecyclingDrafter(64), 64),
        "auto, failing": lambda: AutoDrafter(
            toy_pair(table(1, 3), failing(table(2, 3, 1.2), {len(PROMPT) + 1})).drafter, 64
        ),
    }[drafter]()
    # Costs that make K = 0 and others the best choice at one acceptance or another.
    costs = Costs(draft=0.05, verify=(1.0, 1.45, 1.63, 1.9))
    return Engine(dataclasses.replace(pair, drafter=made, costs=costs), batched=batched)


CASES = {
    "ngram": ("ngram", Settings(temperature=1.0)),
    "ngram, filters": ("ngram", Settings(**FILTERS)),
    "ngram, block": ("ngram", Settings(temperature=1.0, verifier="block")),
    "ngram, penalty": ("ngram", Settings(temperature=1.0, repetition_penalty=1.6)),
    "ngram, auto K": ("ngram", Settings(temperature=1.0, auto_draft_tokens=True)),
    "recycling": ("recycling", Settings(temperature=1.0)),
    "recycling, block": ("recycling", Settings(temperature=1.0, verifier="block")),
    "recycling, tree, auto K": (
        "recycling",
        Settings(temperature=1.0, tree_width=2, auto_draft_tokens=True),
    ),
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


BOTH_WAYS = [(name, False, 700) for name in CASES] + [(name, True, 100) for name in CASES if "tree" in name]


@pytest.mark.parametrize("name, batched, replies", BOTH_WAYS)
def test_sampled_replies(name, batched, replies):
    """Fewer of the batched way, which is held against the other figure by figure."""
    drafter, settings = CASES[name]
    # The first reply of an engine, and the second with the same seed: what the first left must not matter.
    counts, fates, by = (Counter(), Counter()), Counter(), set()
    chosen: set[int] = set()
    for seed, nth in product(range(replies), range(2)):
        engine = engine if nth else _engine(drafter, batched)  # noqa: F821
        settings = dataclasses.replace(settings, seed=seed, max_new_tokens=LENGTH)
        generation = engine.generate(PROMPT, settings)
        rounds = list(generation)
        for round_ in rounds:
            by.add(round_.drafter)
            if round_.num_draft_tokens_reason == "auto":
                chosen.add(round_.num_draft_tokens)
            assert (round_.drafter is None) == (round_.drafted == 0)
            fates.update(token.fate for token in round_.tokens)
        emitted = tuple(t.id for r in rounds for t in r.tokens if t.fate in EMITTED)
        assert emitted == generation.reply.token_ids
        counts[nth][emitted] += 1
    expected = joint(table(1, 3, 1.2), settings, LENGTH, 3, prompt=PROMPT)
    assert all(g_test(found, expected, replies) > 1e-3 for found in counts)
    assert fates[Fate.ACCEPTED] and fates[Fate.REJECTED]
    assert len(chosen) > 1 or not settings.auto_draft_tokens
    if drafter.startswith("auto"):
        assert by >= {"ngram", "recycling" if "recycling" in drafter else "model"}


def test_every_combination_of_draws_of_a_tree_on_the_device():
    """Two candidates a position, what a refused one leaves being halves: the law of replies, exactly."""
    after = [torch.tensor([0.5, 0.25, 0.25]).roll(shift).log() for shift in (1, 0, 2)]

    def target(ids):
        return after[ids[-1]]

    settings = Settings(temperature=1.0, num_draft_tokens=2, tree_width=2, max_new_tokens=3)
    pair, fates = toy_pair(target, target), Counter()
    pair.target.vocabulary = 3
    pair.drafter = RecyclingDrafter(64)

    def run(uniform) -> tuple[int, ...]:
        generation = Engine(pair, uniforms=lambda _: uniform, batched=True).generate([0, 2], settings)
        fates.update((token.fate, token.index) for round_ in generation for token in round_.tokens)
        return generation.reply.token_ids

    found = enumerate_replies(run)
    expected = joint(target, settings, 3, 3, prompt=[0, 2])
    assert found.keys() == expected.keys()
    for ids, probability in expected.items():
        assert float(found[ids]) == pytest.approx(probability, abs=1e-6), ids
    assert {(Fate.ACCEPTED, 0), (Fate.ACCEPTED, 1), (Fate.REJECTED, 0), (Fate.REJECTED, 1)} <= fates.keys()


@pytest.mark.parametrize("batched, replies", [(False, 800), (True, 200)])
@pytest.mark.parametrize("filters", [dict(temperature=1.0), FILTERS])
def test_early_exit(filters, batched, replies):
    """On a real decoder, whose cache the drafter shares."""
    model = as_decoder(tiny_llama(5, vocabulary=4, layers=3))
    drafter = EarlyExitDrafter(model, layers=1)
    pair = dataclasses.replace(toy_pair(table(1, 4), table(1, 4)), target=model, drafter=drafter)
    engine, counts, fates = Engine(pair, batched=batched), Counter(), Counter()
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


@pytest.mark.parametrize(
    "drafter, width", [("ngram", 1), ("recycling", 1), ("recycling", 2), ("early-exit", 1), ("auto", 1)]
)
def test_greedy_speculative_equals_plain_on_the_embedded_pair(embedded_pair, drafter, width):
    question = "Repeat this line three times: the red fox runs over the old bridge at night."
    ids = encode_chat(embedded_pair.tokenizer, [{"role": "user", "content": question}])
    settings = Settings(temperature=0, num_draft_tokens=3, max_new_tokens=40, tree_width=width)
    engine = Engine(embedded_pair, cache_bytes=0)
    plain = engine.generate(ids, dataclasses.replace(settings, num_draft_tokens=0))
    list(plain)
    generation = engine.generate(ids, settings, drafter=drafter)
    rounds = list(generation)
    assert generation.reply.token_ids == plain.reply.token_ids
    assert any(round_.drafted for round_ in rounds)
    if drafter != "early-exit":  # which says little on a target that was not trained for it
        assert any(round_.count(Fate.ACCEPTED) for round_ in rounds)
