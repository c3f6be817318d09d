"""Rounds whose drafts are a tree: fates, parents and places, what is kept, how replies end inside one."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch

from core.drafters.ngram import NgramDrafter
from core.drafters.recycling import RecyclingDrafter
from core.engine.loop import Engine
from core.records import Fate, Settings
from core.verify.sampling import Distribution, Proposal
from tests.core.builders import assert_identities
from tests.core.toy_drafts import toy_drafts_pair
from tests.core.toys import path, toy_pair

PROMPT = [0, 1]
GREEDY = [2, 3, 4, 5, 6, 7, 8, 9]  # cdefghij
# Index, id and parent: x with y behind it; c with q and d behind it, z behind d; k.
TREE = [(23, None), (24, 0), (2, None), (16, 2), (3, 2), (25, 4), (10, None)]


@dataclasses.dataclass
class Nothing:
    length: int = 0
    nbytes: int = 0

    def crop(self, length: int) -> None: ...

    def fork(self, length: int) -> Nothing:
        return Nothing()


class Scripted:
    """Proposes ``TREE`` as one-hots in the first round, cut at ``count``; then ``more``, a tree as well."""

    name, context_length = "scripted", 64

    def short(self, state):
        return "no_match"

    def __init__(self, tree, more=()):
        self.trees = [tree, more]
        self.asked = []

    def new_state(self):
        return Nothing()

    def prefill(self, ids, state, cache, stop=None): ...

    def observe(self, ids, logits, state):
        self.seen = ids, logits

    def proposer(self, state):
        return self.name

    def draft(self, ids, count, settings, uniform, state, cache):
        self.asked.append((list(ids), count, settings.tree_width, cache.length))
        tree = self.trees[min(len(self.asked) - 1, 1)]
        soft = Distribution(torch.full((26,), 1 / 26))
        found, depths = [], []
        for token_id, parent in tree:
            depths.append(0 if parent is None else depths[parent] + 1)
            q = Distribution(torch.ones(1), torch.tensor([token_id]))
            if depths[-1] < count:
                found.append(Proposal(token_id, q, soft, parent))
        return found


def run(tree=TREE, more=(), target=None, eos=None, end_ids=(), **changes):
    pair = toy_pair(target or path(GREEDY, 26, 2), path(GREEDY, 26, 2), eos=eos, extra_end_ids=end_ids)
    pair.drafter = Scripted(tree, more)
    values = dict(temperature=0, num_draft_tokens=3, max_new_tokens=8, tree_width=3)
    generation = Engine(pair, batched=False).generate(PROMPT, Settings(**values | changes))
    return list(generation), generation.reply, pair


def told(round_) -> list[tuple]:
    return [(t.index, t.id, t.fate.value, t.position, t.parent, t.emitted_index) for t in round_.tokens]


def test_a_round_says_what_became_of_every_node():
    rounds, reply, pair = run()
    assert told(rounds[0]) == [
        (0, 23, "rejected", 0, None, None),
        (1, 24, "discarded", 1, 0, None),
        (2, 2, "accepted", 0, None, 0),
        (3, 16, "rejected", 1, 2, None),
        (4, 3, "accepted", 1, 2, 1),
        (5, 25, "rejected", 2, 4, None),
        (6, 10, "discarded", 0, None, None),
        (7, 4, "resampled", 2, 4, 2),
    ]
    assert (rounds[0].num_draft_tokens, rounds[0].num_draft_tokens_reason) == (3, "fixed")
    assert (rounds[0].drafter, rounds[0].text, rounds[0].context_tokens) == ("scripted", "cde", 5)
    assert rounds[1].num_draft_tokens_reason == "no_match" and rounds[1].drafter is None
    assert list(reply.token_ids) == GREEDY
    # Every tested node has figures, the others the q they were proposed with.
    for token in rounds[0].tokens:
        tested = token.fate in (Fate.ACCEPTED, Fate.REJECTED)
        assert (token.u is not None) == (token.overlap is not None) == tested
        assert bool(token.top_q) == (token.fate is not Fate.DISCARDED)
        assert token.q == (0 if token.fate is Fate.RESAMPLED else 1)
        assert (token.p is None) == (token.fate is Fate.DISCARDED)


def test_branches_that_lose_are_read_from_where_they_stood():
    texts = [token.text for token in run()[0][0].tokens]
    assert texts == ["x", "y", "c", "q", "d", "z", "k", "e"]


def test_identities_hold_of_every_round():
    for tree in (TREE, [(2, None), (3, None)], [(9, None), (9, 0), (8, None)], [(2, None), (3, 0), (4, 1)]):
        for changes in ({}, dict(max_new_tokens=2), dict(stop=("d",))):
            rounds, reply, _ = run(tree, tree, **changes)
            for round_ in rounds:
                count = {fate.value: sum(t.fate is fate for t in round_.tokens) for fate in Fate}
                assert_identities(count | dict(drafted=round_.drafted, emitted=round_.emitted))
            assert len(reply.token_ids) == sum(round_.emitted for round_ in rounds)


def test_a_branch_accepted_whole_brings_the_bonus():
    rounds, reply, _ = run([(9, None), (2, None), (8, 1), (3, 1), (4, 3)])
    assert [(t.id, t.fate.value, t.parent) for t in rounds[0].tokens if t.emitted] == [
        (2, "accepted", None),
        (3, "accepted", 1),
        (4, "accepted", 3),
        (5, "bonus", 4),
    ]
    assert list(reply.token_ids) == GREEDY


def test_the_target_goes_on_from_the_branch_that_was_kept():
    """Its cache holds the accepted branch alone: what a toy target says depends on every id it holds."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(26, 64, generator=generator)

    def target(ids):
        return torch.stack([weights[:, (7 * n + i) % 64] for n, i in enumerate(ids)]).sum(0)

    plain = run([], target=target)[1].token_ids
    for seed in range(8):
        chance = random.Random(seed)
        tree = []
        for index in range(12):
            parent = chance.choice([None, *range(index)])
            depth = 0 if parent is None else tree[parent][2] + 1
            right = plain[depth] if depth < len(plain) else 0
            tree.append((chance.choice([right, chance.randrange(26)]), parent, depth))
        rounds, reply, pair = run([node[:2] for node in tree], target=target, num_draft_tokens=6)
        assert reply.token_ids == plain
        # The next draft is asked with the target's cache at all but the last id.
        assert all(length == len(ids) - 1 for ids, _, _, length in pair.drafter.asked)


def test_an_end_of_text_inside_a_tree_ends_the_round_there():
    tree = [(2, None), (3, 0), (25, 1), (4, 2), (9, 1)]
    end = path([2, 3, 25], 26, 2)
    rounds, reply, _ = run(tree, target=end, eos=25, num_draft_tokens=4)
    assert [t.fate.value for t in rounds[0].tokens] == ["accepted"] * 3 + ["discarded"] * 2
    assert (reply.finish_reason, reply.text) == ("eos_token", "cd")


def test_a_stop_string_inside_a_tree_leaves_the_rest_untested():
    rounds, reply, _ = run([(9, None), (2, None), (3, 1), (4, 2)], stop=("d",))
    assert [t.fate.value for t in rounds[0].tokens] == ["rejected", "accepted", "accepted", "discarded"]
    assert reply.finish_reason == "stop_string" and reply.text[: reply.visible_chars] == "c"


def test_length_limits_how_deep_a_tree_may_be():
    rounds, reply, pair = run(max_new_tokens=2)
    assert pair.drafter.asked[0][1] == 1 and rounds[0].num_draft_tokens_reason == "length"
    assert len(reply.token_ids) == 2


def test_a_bad_row_of_a_tree_ends_the_reply_and_keeps_what_was_emitted():
    def target(ids):
        logits = path(GREEDY, 26, 2)(ids)
        return logits * math.nan if ids[2:] == (2, 3) else logits

    rounds, reply, _ = run(target=target)
    assert [t.fate.value for t in rounds[0].tokens if t.index in (2, 4, 5)] == ["accepted"] * 2 + [
        "discarded"
    ]
    assert reply.finish_reason == "error" and "unusable numbers" in reply.error
    assert list(reply.token_ids) == [2, 3]


def test_a_bad_row_nobody_reaches_does_no_harm():
    def target(ids):
        return path(GREEDY, 26, 2)(ids) * (math.nan if 23 in ids else 1)

    assert list(run(target=target)[1].token_ids) == GREEDY


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_a_tree_is_judged_token_by_token_under_every_exact_rule(verifier):
    assert told(run(verifier=verifier)[0][0]) == told(run()[0][0])


@pytest.mark.parametrize("drafter, by_block", [(RecyclingDrafter(64), False), (NgramDrafter(64), True)])
def test_a_tree_that_comes_out_as_a_chain_is_judged_as_a_tree(drafter, by_block):
    """What was asked for decides, not what was found: before a round it is known on a card, too."""
    pair = toy_pair(path(GREEDY, 26, 5), path(GREEDY, 26, 5))
    pair.drafter = drafter
    settings = Settings(temperature=1.0, tree_width=2, verifier="block", max_new_tokens=4)
    generation = Engine(pair, batched=False).generate([2, 3, 4, 2, 3], settings)
    tokens = next(generation).tokens
    generation.close()
    assert [token.parent for token in tokens[:2]] == [None, 0]
    assert (tokens[0].h is not None) == by_block


def test_a_lossy_rule_asks_for_a_chain():
    _, _, pair = run([(2, None), (3, 0)], verifier="greedy", temperature=1.0)
    assert {width for _, _, width, _ in pair.drafter.asked} == {1}


def test_what_a_drafter_observes_is_the_block_with_its_rows():
    _, _, pair = run(max_new_tokens=4)
    ids, logits = pair.drafter.seen
    assert len(ids) == len(logits)


@pytest.mark.parametrize("room, width", [(7, 3), (6, 1), (5, 1)])
def test_a_tree_needs_a_place_for_each_node_and_one_for_the_last_id(room, width):
    """Two positions of three candidates and the last committed id, which is read with them: seven."""
    pair = toy_pair(path(GREEDY, 26, 2), path(GREEDY, 26, 2), context_length=len(PROMPT) - 1 + room)
    pair.drafter = Scripted([])  # it is how much is asked of it that counts
    settings = Settings(temperature=0, num_draft_tokens=2, max_new_tokens=3, tree_width=3)
    next(generation := Engine(pair, batched=False).generate(PROMPT, settings))
    generation.close()
    assert pair.drafter.asked[0][1:3] == (2, width)


@pytest.mark.parametrize("name", ["eagle", "medusa"])
def test_a_tree_that_no_longer_fits_the_context_becomes_a_chain(name):
    """Every node takes a place until the round is over: a wide tree near the end had none."""
    pair = toy_drafts_pair(name)
    limit = pair.target.context_length
    settings = Settings(temperature=1.0, num_draft_tokens=3, tree_width=4, max_new_tokens=64, seed=3)
    generation = Engine(pair, batched=False).generate([i % 26 for i in range(limit - 20)], settings)
    rounds = list(generation)
    assert generation.reply.error is None and generation.reply.finish_reason == "length"
    assert rounds[0].drafted > 3 and rounds[-1].context_tokens == limit
    assert all(r.drafted <= r.num_draft_tokens for r in rounds if limit - r.context_tokens < 8)
