"""Medusa's heads draft what their file says, from the state of the last position the target has read."""

from __future__ import annotations

import pytest
import torch

from core.records import Settings
from core.verify.sampling import distributions
from tests.core.test_drafters_eagle import HEAD, SAMPLED, drafted, some_ids
from tests.core.toy_drafts import HEADS, medusa_tensors, plain_medusa, rows_of, toy_medusa, toy_target


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_chain_is_what_the_file_says(count):
    target = toy_target()
    drafter, ids = toy_medusa(target, HEAD), some_ids(9)
    logits = plain_medusa(target, medusa_tensors(target), ids, rows_of(target, HEAD))
    proposals = drafted(drafter, target, ids, count)
    assert len(proposals) == min(count, HEADS)
    for depth, proposal in enumerate(proposals):
        prefix = ids + [p.id for p in proposals[:depth]]
        q, _ = distributions(logits[depth], SAMPLED, prefix, torch.tensor(HEAD))
        assert proposal.q.ids.tolist() == q.ids.tolist()
        assert proposal.parent == (depth - 1 if depth else None)
        assert torch.allclose(proposal.q.probabilities, q.probabilities, atol=1e-5)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_tree_has_its_width_at_each_position_of_the_first_branch(temperature):
    target = toy_target()
    settings = Settings(temperature=temperature, tree_width=2)
    tree = drafted(toy_medusa(target, HEAD), target, some_ids(9), 3, settings)
    assert [p.parent for p in tree] == [None, None, 0, 0, 2, 2]
    for first in (0, 2, 4):
        assert tree[first].id != tree[first + 1].id
        assert tree[first + 1].q.at(tree[first].id) == 0


def test_nothing_is_drafted_where_the_target_has_read_nothing():
    target = toy_target()
    assert drafted(toy_medusa(target, HEAD), target, [3], 3) == []


def test_it_keeps_nothing_of_its_own():
    drafter = toy_medusa(target := toy_target(), HEAD)
    state = drafter.new_state()
    drafter.prefill(some_ids(9), state, target.new_cache())
    state.crop(4)
    assert state.fork(3).length == state.length == state.nbytes == 0
