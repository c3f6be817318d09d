"""Trees: the candidates for a position, and the exact law of what verification emits."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import permutations

import pytest
import torch

from core.records import Fate, Settings
from core.verify.sampling import Distribution, Proposal, distributions, verify_tokenwise
from core.verify.tree import siblings, verify_tree
from tests.core.branches import constant, every_branch

VOCABULARY = 4
Ids = tuple[int, ...]


def of(*parts: float, ids: Sequence[int] | None = None) -> Distribution:
    weights = torch.tensor(parts, dtype=torch.float32)
    return Distribution(weights / weights.sum(), None if ids is None else torch.tensor(ids))


def one_hot(token_id: int) -> Distribution:
    return of(1, ids=[token_id])


def target_of(ids: Ids) -> Distribution:
    """Another distribution after each beginning, some of them with ids that cannot follow."""
    generator = random.Random(sum((x + 1) * 7**n for n, x in enumerate(ids)))
    parts = [generator.random() for _ in range(VOCABULARY)]
    parts[sum(ids) % VOCABULARY] = 0.0 if len(ids) == 1 else parts[0]
    return of(*parts)


def draft_of(ids: Ids) -> Distribution:
    """Unlike the target's; where the last id is 2, over part of the vocabulary."""
    generator = random.Random(99 + sum((x + 1) * 5**n for n, x in enumerate(ids)))
    if ids[-1:] == (2,):
        return of(generator.random(), generator.random(), ids=[1, 3])
    return of(*(generator.random() for _ in range(VOCABULARY)))


def path(proposals: Sequence[Proposal], row: int) -> Ids:
    ids, index = (), row - 1 if row else None
    while index is not None:
        ids, index = (proposals[index].id, *ids), proposals[index].parent
    return ids


def emitted(proposals: Sequence[Proposal]) -> Ids:
    outcomes = verify_tree(lambda row: target_of(path(proposals, row)), proposals, constant)
    return tuple(outcome.id for outcome in outcomes if outcome.fate is not Fate.REJECTED)


def continued(law: dict[Ids, float], depth: int) -> dict[Ids, float]:
    """What comes of it where the target alone goes on to ``depth`` ids; longer ones are cut there."""
    whole: dict[Ids, float] = Counter()
    stack = list(law.items())
    while stack:
        ids, share = stack.pop()
        if len(ids) >= depth:
            whole[ids[:depth]] += share
        else:
            p = target_of(ids)
            stack += [((*ids, x), share * p.at(x)) for x in range(VOCABULARY) if p.at(x)]
    return whole


def assert_exact(law: dict[Ids, float], depth: int) -> None:
    found, wanted = continued(law, depth), continued({(): 1.0}, depth)
    assert found.keys() <= wanted.keys(), "something the target cannot write"
    for ids, probability in wanted.items():
        assert found.get(ids, 0.0) == pytest.approx(probability, abs=1e-6), ids


def grown(width: int, depth: int, grows: Callable[[list[Proposal]], int]) -> list[Proposal]:
    """A tree of candidates drawn from ``draft_of``; ``grows`` says which of a position's goes on."""
    proposals: list[Proposal] = []
    ids, parent = (), None
    for _ in range(depth):
        q = draft_of(ids)
        found = siblings(q, q, width, constant, parent)
        chosen = grows(found)
        parent = len(proposals) + chosen
        proposals += found
        ids += (found[chosen].id,)
    return proposals


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_candidates_drawn_without_replacement_at_one_position(width, monkeypatch):
    assert_exact(every_branch(monkeypatch, lambda: emitted(grown(width, 1, lambda found: 0))), 1)


@pytest.mark.parametrize(
    "grows",
    [
        lambda found: 0,
        lambda found: len(found) - 1,
        # What is drawn may decide what goes on: the draws behind it are new ones.
        lambda found: max(range(len(found)), key=lambda i: found[0].q.at(found[i].id)),
    ],
    ids=["first", "last", "likeliest"],
)
def test_a_sampled_tree_two_deep(grows, monkeypatch):
    law = every_branch(monkeypatch, lambda: emitted(grown(2, 2, grows)))
    assert {len(ids) for ids in law} == {1, 2, 3}
    assert_exact(law, 3)


def test_children_under_every_node(monkeypatch):
    def run() -> Ids:
        proposals = siblings(q := draft_of(()), q, 2, constant)
        for parent in range(2):
            q = draft_of((proposals[parent].id,))
            proposals += siblings(q, q, 2, constant, parent)
        return emitted(proposals)

    assert_exact(every_branch(monkeypatch, run), 3)


def test_candidates_drawn_with_replacement(monkeypatch):
    """Each from the whole q, the same id twice perhaps."""

    def run() -> Ids:
        q = draft_of(())
        return emitted([siblings(q, q, 1, constant)[0] for _ in range(3)])

    assert_exact(every_branch(monkeypatch, run), 1)


def test_one_hots_tried_in_any_order(monkeypatch):
    for count in range(1, VOCABULARY + 1):
        for ids in permutations(range(VOCABULARY), count):
            proposals = [Proposal(x, one_hot(x), one_hot(x)) for x in ids]
            proposals.append(Proposal(1, one_hot(1), one_hot(1), 0))
            assert_exact(every_branch(monkeypatch, lambda p=proposals: emitted(p)), 2)


def test_what_is_not_exact_is_told(monkeypatch):
    """Candidates whose q is not what they were drawn from: the tests above would notice."""

    def run() -> Ids:
        q = draft_of(())
        found = siblings(q, q, 2, constant)
        return emitted([found[0], Proposal(found[1].id, q, q)])

    with pytest.raises(AssertionError):
        assert_exact(every_branch(monkeypatch, run), 1)


def test_one_child_a_node_is_the_rule_of_a_chain_draw_for_draw():
    for seed in range(200):
        generator = random.Random(seed)
        uniform = generator.random
        proposals: list[Proposal] = []
        for depth in range(3):
            q = draft_of(path(proposals, depth))
            proposals += siblings(q, q, 1, uniform, depth - 1 if depth else None)
        state = generator.getstate()
        target = lambda row: target_of(path(proposals, row))  # noqa: E731, B023
        chain = list(verify_tokenwise(target, proposals, uniform))
        generator.setstate(state)
        tree = list(verify_tree(target, proposals, uniform))
        fields = ("id", "fate", "position", "p", "q", "u", "overlap")
        for a, b in zip(chain, tree, strict=True):
            assert [getattr(a, name) for name in fields] == [getattr(b, name) for name in fields]
            assert b.row == a.position


def test_an_outcome_says_which_proposal_it_is_of():
    """Root 0 and its sibling 2; the sibling is kept, then its first child refused and its second kept."""
    ids, parents = [0, 1, 2, 3, 1], [None, 0, None, 2, 2]
    proposals = [Proposal(x, one_hot(x), one_hot(x), p) for x, p in zip(ids, parents, strict=True)]
    rows = {0: one_hot(2), 3: one_hot(1), 5: one_hot(3)}
    outcomes = list(verify_tree(rows.__getitem__, proposals, constant))
    assert [(o.id, o.fate.value, o.position, o.index, o.row) for o in outcomes] == [
        (0, "rejected", 0, 0, 0),
        (2, "accepted", 0, 2, 0),
        (3, "rejected", 1, 3, 3),
        (1, "accepted", 1, 4, 3),
        (3, "bonus", 2, None, 5),
    ]


def test_the_overlap_of_a_candidate_is_with_what_its_elder_siblings_left():
    """p is (0.4, 0.3, 0.2, 0.1); a refused certain 0 leaves (0, 3, 2, 1) / 6, of which a draw from halves of
    1 and 2 keeps 1/2 + 1/3."""
    halves = of(1, 1, ids=[1, 2])
    proposals = [Proposal(0, one_hot(0), one_hot(0)), Proposal(1, halves, halves)]
    first, second, *_ = verify_tree(lambda row: of(4, 3, 2, 1), proposals, lambda: 0.999)
    assert (first.fate, first.overlap, first.p) == (Fate.REJECTED, pytest.approx(0.4), pytest.approx(0.4))
    assert (second.overlap, second.p) == (pytest.approx(5 / 6), pytest.approx(1 / 2))


def test_candidates_and_their_own_q(monkeypatch):
    """The law of a pair drawn without replacement; each one's q is that of its draw given the elder."""
    q = of(4, 2, 1, 1)

    def run() -> tuple:
        first, second = siblings(q, q, 2, constant, 7)
        assert first.q is q and first.parent == second.parent == 7
        assert second.q.at(first.id) == 0
        assert second.q.probabilities.sum().item() == pytest.approx(1)
        return first.id, second.id, round(second.q.at(second.id), 5)

    law = every_branch(monkeypatch, run)
    assert len(law) == VOCABULARY * (VOCABULARY - 1)
    for (a, b, q_b), share in law.items():
        assert q_b == pytest.approx(q.at(b) / (1 - q.at(a)), abs=1e-5)
        assert share == pytest.approx(q.at(a) * q_b, abs=1e-5)


def test_each_candidate_and_each_verdict_has_a_draw_of_its_own():
    """Draws are independent only if none serves twice; here each decides what the one before would not."""
    q = of(4, 2, 1, 1)
    found = siblings(q, q, 3, iter([0.1, 0.9, 0.1]).__next__)
    assert [proposal.id for proposal in found] == [0, 3, 1]  # what is left is (2, 1, 1) / 4, then (2, 1) / 3
    # 0 is refused of p, which is (4, 3, 2, 1) / 10, and 3 of what that left; then (3, 2) / 5 is drawn from.
    draws = iter([0.9, 0.9, 0.1])
    certain = [Proposal(x, one_hot(x), one_hot(x)) for x in (0, 3)]
    outcomes = list(verify_tree(lambda row: of(4, 3, 2, 1), certain, draws.__next__))
    assert [(o.id, o.fate.value) for o in outcomes] == [(0, "rejected"), (3, "rejected"), (1, "resampled")]
    assert next(draws, None) is None


def test_no_more_candidates_than_q_has_ids():
    q = of(1, 0, 3, 0)
    assert sorted(proposal.id for proposal in siblings(q, q, 4, constant)) == [0, 2]


def test_at_temperature_0_the_most_likely_ids_are_candidates():
    logits = torch.tensor([0.0, 3.0, -1.0, 2.0])
    head_ids = torch.tensor([5, 6, 7, 9])
    q, soft = distributions(logits, Settings(temperature=0), [], head_ids)
    found = siblings(q, soft, 3, constant, 2)
    assert [proposal.id for proposal in found] == [6, 9, 5]
    assert all(p.q.at(p.id) == 1 and p.soft is soft and p.parent == 2 for p in found)
    assert len(siblings(q, soft, 1, constant)) == 1


def test_one_id_left_by_a_filter_has_no_siblings():
    q, soft = distributions(torch.tensor([0.0, 3.0]), Settings(temperature=1, top_k=1), [])
    assert len(siblings(q, soft, 3, constant)) == 1
