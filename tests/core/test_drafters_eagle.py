"""EAGLE drafts what its file says, with true features where there are any and its own elsewhere."""

from __future__ import annotations

import random

import pytest
import torch

from core.bench.run import time_passes
from core.engine.auto_k import MOST
from core.engine.calibration import measure
from core.records import Settings
from core.verify.sampling import distributions
from tests.core.tiny import held
from tests.core.toy_drafts import eagle_tensors, plain_eagle, rows_of, toy_drafts_pair, toy_eagle, toy_target

HEAD = list(range(0, 26, 2)) + [25]  # half of the vocabulary
SAMPLED = Settings(temperature=0.9, top_p=0.95, repetition_penalty=1.2)


def drafted(drafter, target, ids, count, settings=SAMPLED, seed=0, state=None, cache=None):
    """Proposals after ``ids``, of which all but the last are read by the target first."""
    cache = target.new_cache() if cache is None else cache
    state = drafter.new_state() if state is None else state
    with torch.inference_mode():
        target.prefill(ids[cache.length : -1], cache)
        return drafter.draft(ids, count, settings, random.Random(seed).random, state, cache)


def some_ids(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(26), k=count)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("length", [1, 2, 9, 40])
def test_a_chain_is_what_the_file_says(length, layers):
    target = toy_target()
    drafter, tensors = toy_eagle(target, HEAD, layers=layers), eagle_tensors(target, layers=layers)
    ids = some_ids(length)
    proposals = drafted(drafter, target, ids, 4)
    assert [proposal.parent for proposal in proposals] == [None, 0, 1, 2]
    chosen = [proposal.id for proposal in proposals]
    logits = plain_eagle(target, tensors, ids, chosen[:-1], rows_of(target, HEAD))
    for depth, proposal in enumerate(proposals):
        q, _ = distributions(logits[depth], SAMPLED, ids + chosen[:depth], torch.tensor(HEAD))
        assert proposal.q.ids.tolist() == q.ids.tolist() and proposal.id in HEAD
        assert torch.allclose(proposal.q.probabilities, q.probabilities, atol=1e-5)


def test_its_own_features_differ_from_the_targets():
    """Else the test above could not tell which were taken."""
    target = toy_target()
    tensors, head, ids = eagle_tensors(target), rows_of(target, HEAD), some_ids(9)
    ahead = plain_eagle(target, tensors, ids[:7], ids[7:], head)[-1]
    assert not torch.allclose(ahead, plain_eagle(target, tensors, ids, [], head)[0], atol=0.1)


@pytest.mark.parametrize("width", [1, 3])
def test_after_any_rounds_it_drafts_as_one_that_read_all_at_once(width):
    """What it read ahead of the target does not stay, whatever K, how much stood, or when nobody asked."""
    target = toy_target()
    drafter, ids = toy_eagle(target, HEAD), some_ids(60, seed=3)
    settings = Settings(temperature=0.8, tree_width=width)
    cache, state, generator = target.new_cache(), drafter.new_state(), random.Random(5)
    with torch.inference_mode():
        target.prefill(ids[:6], cache)
        drafter.prefill(ids[:6], state, cache)
    assert state.length == 6
    length = 7
    while length < 50:
        count = generator.choice([0, 1, 3, 5])
        if count:
            seen = drafted(drafter, target, ids[:length], count, settings, length, state, cache)
            fresh = drafted(drafter, target, ids[:length], count, settings, length)
            assert cache.length == length - 1 and state.length == length
            assert [p.id for p in seen] == [p.id for p in fresh]
            for a, b in zip(seen, fresh, strict=True):
                assert torch.allclose(a.q.probabilities, b.q.probabilities, atol=1e-5)
        length += generator.choice([1, 2, 4])
        state.crop(length - 1)  # as the engine does after each round


def test_a_long_prompt_is_read_in_chunks_and_may_be_stopped():
    target = toy_target(context=700)
    drafter, ids = toy_eagle(target, HEAD), some_ids(600)
    cache, state, asked = target.new_cache(), drafter.new_state(), []
    with torch.inference_mode():
        target.prefill(ids, cache)
        drafter.prefill(ids, state, cache, lambda: asked.append(1) or len(asked) > 1)
        assert state.length == 256
        drafter.prefill(ids, state, cache)
        assert state.length == 600
        parts = [drafter.new_state() for _ in range(2)]
        drafter.prefill(ids[:100], parts[0], cache)
        drafter.prefill(ids, parts[0], cache)
        assert torch.allclose(held(parts[0]), held(state), atol=1e-5)
        drafter.prefill([0] * 700, parts[1], cache)
    assert parts[1].length == 0, "nothing is drafted there"


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_tree_has_its_width_at_each_position_of_the_first_branch(temperature):
    target = toy_target()
    drafter, ids = toy_eagle(target, HEAD), some_ids(12)
    settings = Settings(temperature=temperature, tree_width=3)
    tree = drafted(drafter, target, ids, 3, settings)
    assert [p.parent for p in tree] == [None] * 3 + [0] * 3 + [3] * 3
    for first in (0, 3, 6):
        position = tree[first : first + 3]
        assert len({p.id for p in position}) == 3
        if temperature == 0:
            assert all(p.q.at(p.id) == 1 for p in position)
            assert [p.id for p in position] == [token for token, _ in position[0].soft.top(3)]
        else:
            assert position[1].q.at(position[0].id) == 0 < position[0].q.at(position[0].id)
    # Along the branch that goes on, it is what a chain of these tokens would have been.
    chain = [tree[0].id, tree[3].id]
    logits = plain_eagle(target, eagle_tensors(target), ids, chain, rows_of(target, HEAD))
    for depth, first in enumerate((0, 3, 6)):
        q, soft = distributions(logits[depth], settings, ids + chain[:depth], torch.tensor(HEAD))
        assert torch.allclose(tree[first].soft.probabilities, soft.probabilities, atol=1e-5)
        assert torch.allclose(tree[first].q.probabilities, q.probabilities, atol=1e-5)


def test_a_bad_row_ends_drafting_for_the_round_only():
    target = toy_target()
    drafter, ids = toy_eagle(target, HEAD), some_ids(10)
    cache, state = target.new_cache(), drafter.new_state()
    whole = drafter._model.head
    drafter._model.head = lambda x: whole(x) * float("nan")
    assert drafted(drafter, target, ids, 3, state=state, cache=cache) == []
    drafter._model.head = whole
    found = drafted(drafter, target, ids + [1], 3, state=state, cache=cache)
    assert [p.id for p in found] == [p.id for p in drafted(drafter, target, ids + [1], 3)]


@pytest.mark.parametrize("name", ["eagle", "medusa"])
def test_costs_and_the_bench_time_it_without_a_model_of_its_own(name):
    pair = toy_drafts_pair(name)
    passes = time_passes(pair, some_ids(20), max_rows=2, repeats=2)
    assert passes.draft is None and passes.draft_step.median > 0 and len(passes.target) == 2
    costs = measure(pair)
    assert costs.draft > 0 and len(costs.verify) == MOST + 1
