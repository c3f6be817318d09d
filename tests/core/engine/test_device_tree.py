"""Trees on tensors of fixed shape: candidates, verdicts and draws are those of ``core.verify.tree``."""

from __future__ import annotations

import math
import random

import pytest
import torch

from core.engine import device_rule, device_tree
from core.records import Fate, Settings
from core.verify.sampling import BadLogitsError, distributions
from core.verify.tree import along_branch, siblings, verify_tree

SETTINGS = {
    "sampled": Settings(temperature=1.0),
    "greedy": Settings(temperature=0),
    "one id": Settings(temperature=1.0, top_k=1),
    "filters": Settings(temperature=0.8, top_k=4, top_p=0.9),
    "min-p": Settings(temperature=1.3, min_p=0.2),
}


class Draws:
    """Numbers from [0, 1), and how many of them were asked for."""

    def __init__(self, numbers: list[float]):
        self.numbers, self.used = numbers, 0

    def __call__(self) -> float:
        self.used += 1
        return self.numbers[self.used - 1]


def some_logits(chance: random.Random, size: int) -> torch.Tensor:
    """Of every kind: few values, so that many are equal; masked ids; nothing that could be drawn."""
    row = torch.tensor([chance.choice([0.0, 1.0, 2.0, chance.gauss(0, 2)]) for _ in range(size)])
    if chance.random() < 0.3:
        row[[index for index in range(size) if chance.random() < 0.6]] = -math.inf
    if chance.random() < 0.06:
        row[chance.randrange(size)] = chance.choice([math.nan, math.inf])
    return row


def on_device(settings, rows, width, draws, head):
    """``core.verify.tree.along_branch`` by ``siblings``; ``rows`` are the draft's, one a position."""
    ids, qs, filled, drawn, usable = [], [], [], torch.tensor(0), torch.tensor(True)
    for row in rows:
        whole = device_rule.distributions(row[None], settings)
        taken = draws.gather(0, drawn + torch.arange(width))
        found = device_tree.siblings(whole, width, taken, settings.temperature == 0)
        usable = usable & whole.usable[0]
        drawn = drawn + found.drawn * usable
        ids.append(head[found.ids])
        qs.append(found.q)
        filled.append(found.filled & usable)
    return torch.cat(ids), torch.cat(qs), torch.cat(filled), drawn


def assert_alike(settings: Settings, chance: random.Random) -> list[str]:
    """A random tree both ways; what came up in it."""
    count, width, size = chance.randint(1, 6), chance.randint(2, 4), chance.randint(2, 9)
    head = torch.tensor(sorted(chance.sample(range(size), chance.randint(1, size))))
    of_draft = [some_logits(chance, len(head)) for _ in range(count)]
    of_target = torch.stack([some_logits(chance, size) for _ in range(1 + count * width)])
    most = count * width + count + width
    numbers = [chance.choice([0.0, 0.999999, chance.random()]) for _ in range(most)]
    draws, device_draws = Draws(numbers), torch.tensor(numbers, dtype=torch.float64)

    depths = iter(of_draft)
    proposals = along_branch(lambda _: next(depths), [0], count, settings, draws, head, width)
    taken = draws.used
    ids, q, filled, drawn = on_device(settings, of_draft, width, device_draws, head)
    places = filled.nonzero()[:, 0].tolist()  # of the proposals
    assert ids[filled].tolist() == [proposal.id for proposal in proposals]
    assert drawn.item() == taken
    wide = q.new_zeros(len(q), size).index_copy_(1, head, q)
    for place, proposal in zip(places, proposals, strict=True):
        torch.testing.assert_close(wide[place], proposal.q.over(torch.arange(size)), atol=1e-6, rtol=0)
        assert place // width == (0 if proposal.parent is None else places[proposal.parent] // width + 1)

    p = device_rule.distributions(of_target, settings)
    found = device_tree.judge_tree(p, wide, ids, filled, device_draws, drawn, width)
    row_of = [0, *(place + 1 for place in places)]

    def target(row):
        return distributions(of_target[row_of[row]], settings, [])[0]

    try:
        outcomes = list(verify_tree(target, proposals, draws))
    except BadLogitsError:
        assert not p.usable[found.row]
        return ["bad"]
    assert p.usable[found.row]
    last = outcomes[-1]
    assert (found.own.item(), found.row.item()) == (last.id, row_of[last.row])
    assert found.own_p.item() == pytest.approx(last.p, abs=1e-6)
    assert found.own_q.item() == pytest.approx(last.q or 0.0, abs=1e-6)
    for outcome in outcomes[:-1]:
        place = row_of[outcome.index + 1] - 1
        for figure in ("p", "q", "u", "overlap"):
            wanted = getattr(outcome, figure)
            assert getattr(found, figure)[place].item() == pytest.approx(wanted, abs=1e-6), figure
    kept = [outcome for outcome in outcomes if outcome.fate is Fate.ACCEPTED]
    later = ["a sibling kept"] if any(places[outcome.index] % width for outcome in kept) else []
    return [outcome.fate.value for outcome in outcomes] + later


@pytest.mark.parametrize("name", SETTINGS)
def test_random_trees_are_drawn_and_judged_as_node_by_node(name):
    settings, chance = SETTINGS[name], random.Random(name)
    seen = {what for _ in range(160) for what in assert_alike(settings, chance)}
    wanted = {"accepted", "rejected", "resampled", "bonus", "plain", "bad", "a sibling kept"}
    assert wanted - seen <= ({"a sibling kept"} if settings.top_k == 1 else set())


def test_a_residual_without_mass_means_what_was_there():
    """Reached through rounding alone: the candidate's q a little above p all over, and a draw between."""
    p = torch.tensor([[0.25, 0.75], [1.0, 0.0], [1.0, 0.0]])
    rows = device_rule.Rows(p, p, torch.ones(3, dtype=torch.bool), p.amax(1))
    q = torch.tensor([[0.25001, 0.75001], [1.0, 0.0]])
    draws = torch.tensor([0.99999, 0.999, 0.9], dtype=torch.float64)
    found = device_tree.judge_tree(
        rows, q, torch.tensor([1, 0]), torch.tensor([True, True]), draws, torch.tensor(0), 2
    )
    # Both refused: first of p, then of p again, which leaves the second id alone.
    assert found.p.tolist() == pytest.approx([0.75, 0.25])
    assert (found.row.tolist(), found.own.tolist()) == ([0], [1])


def test_u_zero_keeps_nothing_impossible():
    p = torch.tensor([[0.0, 1.0]] * 3)
    rows = device_rule.Rows(p, p, torch.ones(3, dtype=torch.bool), p.amax(1))
    q = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    draws = torch.tensor([0.0, 0.5, 0.3], dtype=torch.float64)
    found = device_tree.judge_tree(
        rows, q, torch.tensor([0, 1]), torch.tensor([True, True]), draws, torch.tensor(0), 2
    )
    assert (found.row.tolist(), found.own.tolist()) == ([2], [1])


@pytest.mark.parametrize("logits, ids", [([0, 0, 0, 0], [0, 1, 2]), ([1, 2, 2, 1, 1], [1, 2, 0])])
def test_of_equal_candidates_the_lowest_come_first_either_way(logits, ids):
    """A pass on a card and one here propose the same tree."""
    settings, row = Settings(temperature=0), torch.tensor(logits, dtype=torch.float32)
    q, soft = distributions(row, settings, [])
    assert [proposal.id for proposal in siblings(q, soft, 3, lambda: 0.5)] == ids
    found = device_tree.siblings(
        device_rule.distributions(row[None], settings), 3, torch.zeros(3, dtype=torch.float64), True
    )
    assert found.ids.tolist() == ids and found.filled.all() and found.drawn.item() == 1
