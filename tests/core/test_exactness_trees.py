"""Rule 14 for EAGLE and Medusa, chains and trees: on the engine, the drafters and the decoder the app runs.

The law of a first round is computed exactly, from each outcome of each draw, and continued by the target
alone; whole replies are sampled, K changing in the middle of them, and held against the target's own by a
G-test. One tiny random target and drafts unlike it: over three ids, p and q differ at every prefix.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import cache

import pytest
import torch

from core.engine.loop import Engine
from core.figures.costs import Costs
from core.pairs.pair import Pair
from core.records import Fate, Settings
from core.verify.sampling import distributions
from tests.core.branches import constant, every_branch
from tests.core.test_exactness import g_test, joint
from tests.core.toy_drafts import TOYS, toy_drafts_pair

VOCABULARY = 3
pytestmark = pytest.mark.usefixtures("remembered")
PROMPT = [0, 1]
FILTERS = dict(temperature=1.5, top_k=2, top_p=0.98)
LENGTH = 4


@cache
def pair_of(name: str, head_ids: tuple[int, ...] | None = None) -> Pair:
    return toy_drafts_pair(name, VOCABULARY, head_ids=head_ids)


@cache
def target_logits(ids: tuple[int, ...]) -> torch.Tensor:
    target = pair_of("eagle").target
    with torch.inference_mode():
        return target.next_logits(ids, target.new_cache())


def p_after(ids: tuple[int, ...], settings: Settings) -> dict[int, float]:
    p, _ = distributions(target_logits(ids), settings, ids)
    return {token_id: p.at(token_id) for token_id in range(VOCABULARY) if p.at(token_id)}


def continued(law: dict[tuple[int, ...], float], settings: Settings, length: int) -> dict:
    """Replies of ``length`` ids where the target alone goes on from what was emitted."""
    whole: dict[tuple[int, ...], float] = Counter()
    stack = list(law.items())
    while stack:
        ids, share = stack.pop()
        if len(ids) == length:
            whole[ids] += share
        else:
            stack += [((*ids, x), share * p) for x, p in p_after((*PROMPT, *ids), settings).items()]
    return whole


ROUNDS = {
    "chain": Settings(temperature=1.0, num_draft_tokens=2),
    "chain, filters": Settings(**FILTERS, num_draft_tokens=2),
    "tree": Settings(temperature=1.0, num_draft_tokens=2, tree_width=2),
    "tree, filters": Settings(**FILTERS, num_draft_tokens=2, tree_width=2),
    "tree, penalty": Settings(temperature=1.2, repetition_penalty=1.5, num_draft_tokens=2, tree_width=2),
    "tree of all ids": Settings(temperature=1.0, num_draft_tokens=1, tree_width=3),
    "greedy tree": Settings(temperature=0, num_draft_tokens=2, tree_width=2),
}


@pytest.mark.parametrize("head_ids", [None, (0, 2)], ids=["whole head", "trimmed head"])
@pytest.mark.parametrize("name", TOYS)
@pytest.mark.parametrize("case", ROUNDS)
def test_every_outcome_of_every_draw_of_a_round(case, name, head_ids, monkeypatch):
    pair, fates = pair_of(name, head_ids), set()
    settings = dataclasses.replace(ROUNDS[case], max_new_tokens=3)

    def run() -> tuple[int, ...]:
        engine = Engine(pair, uniforms=lambda seed: constant, batched=False)
        generation = engine.generate(PROMPT, settings)
        round_ = next(generation)
        generation.close()
        assert round_.drafted
        fates.update(token.fate for token in round_.tokens)
        return tuple(token.id for token in round_.tokens if token.emitted)

    law = every_branch(monkeypatch, run)
    found, wanted = continued(law, settings, 3), continued({(): 1.0}, settings, 3)
    assert found.keys() <= wanted.keys(), "a reply the target cannot write"
    for ids, probability in wanted.items():
        assert found.get(ids, 0.0) == pytest.approx(probability, abs=1e-5), ids
    if settings.temperature:
        assert fates >= {Fate.ACCEPTED, Fate.REJECTED, Fate.BONUS}


REPLIES = {
    "tree": Settings(temperature=1.0, num_draft_tokens=3, tree_width=2),
    "tree, filters": Settings(**FILTERS, num_draft_tokens=2, tree_width=2),
    "chain, block": Settings(temperature=1.0, num_draft_tokens=3, verifier="block"),
    "chain, auto K": Settings(temperature=1.0, num_draft_tokens=3, auto_draft_tokens=True),
    "tree, auto K": Settings(temperature=1.0, num_draft_tokens=3, auto_draft_tokens=True, tree_width=2),
}


BOTH_WAYS = [(case, False, 300) for case in REPLIES]
BOTH_WAYS += [(case, True, 80) for case in REPLIES if "tree" in case]


@pytest.mark.parametrize("name", TOYS)
@pytest.mark.parametrize("case, batched, replies", BOTH_WAYS)
def test_sampled_replies(case, name, batched, replies):
    """Fewer of the batched way, which is held against the other figure by figure."""
    # Costs that make another K the best choice at one acceptance or another.
    pair = dataclasses.replace(pair_of(name), costs=Costs(draft=0.05, verify=(1.0, 1.4, 1.45, 1.9)))
    engine, counts, ks = Engine(pair, batched=batched), Counter(), set()
    settings = REPLIES[case]
    for seed in range(replies):
        settings = dataclasses.replace(settings, seed=seed, max_new_tokens=LENGTH)
        if seed % 2:  # the second reply with this seed is the one that counts
            list(engine.generate(PROMPT, settings))
        generation = engine.generate(PROMPT, settings)
        ks.update(round_.num_draft_tokens for round_ in generation)
        counts[generation.reply.token_ids] += 1
    assert len(ks) > 1, "K changes, at the end of a reply at least"
    expected = joint(lambda ids: target_logits(ids), settings, LENGTH, VOCABULARY)
    assert g_test(counts, expected, replies) > 1e-3


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("name", TOYS)
def test_greedy_replies_are_the_targets_own(name, width):
    pair = toy_drafts_pair(name)
    for start in range(2):
        settings = Settings(temperature=0, max_new_tokens=40, num_draft_tokens=0)
        plain, speculative = Engine(pair).generate([start, 5], settings), []
        list(plain)
        for k in (1, 4):
            changed = dataclasses.replace(settings, num_draft_tokens=k, tree_width=width)
            speculative.append(generation := Engine(pair).generate([start, 5], changed))
            list(generation)
        assert {generation.reply.token_ids for generation in speculative} == {plain.reply.token_ids}


def test_drafts_are_sometimes_right_and_sometimes_wrong():
    """Else the tests above would say little about either."""
    for name in TOYS:
        pair, fates = toy_drafts_pair(name), Counter()
        for seed in range(10):
            settings = Settings(temperature=1.0, num_draft_tokens=3, max_new_tokens=30, seed=seed)
            for round_ in Engine(pair).generate([1, 2], settings):
                fates.update(token.fate for token in round_.tokens)
        assert fates[Fate.ACCEPTED] > 10 and fates[Fate.REJECTED] > 10, (name, fates)
