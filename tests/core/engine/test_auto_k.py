"""Auto K: chooses by costs and the reply's own acceptance, and the reply stays exact."""

from __future__ import annotations

import dataclasses

import pytest

from core.engine.auto_k import MOST, PROBE_AFTER, AutoK, usual_k
from core.engine.loop import Engine
from core.figures.costs import Costs
from core.figures.metrics import expected_tokens
from core.records import Fate, Settings, Token
from tests.core.toys import path, table, toy_pair

FREE = Costs(draft=0.0, verify=(1.0,) * 9)
STEEP = Costs(draft=0.1, verify=(1.0, 1.1, 1.2, 1.3, 2.3, 2.4, 2.5, 2.6, 2.7))
DEAR = Costs(draft=1.0, verify=(1.0,) * 9)


def draft(position: int, overlap: float, domain: str = "prose") -> Token:
    return Token(position, 1, "x", Fate.ACCEPTED, position, overlap=overlap, domain=domain)


def learned(costs: Costs, overlaps, rounds: int = 60, prior: float = 0.5) -> AutoK:
    auto = AutoK(costs, prior)
    for _ in range(rounds):
        auto.observe([draft(i, overlap) for i, overlap in enumerate(overlaps)])
    return auto


@pytest.mark.parametrize("costs", [FREE, STEEP, DEAR])
@pytest.mark.parametrize("a", [0.1, 0.4, 0.6, 0.8, 0.95])
def test_it_finds_the_best_k_for_a_steady_acceptance(costs, a):
    best = max(range(9), key=lambda k: expected_tokens(a, k) / (k * costs.draft + costs.verify[k]))
    assert learned(costs, [a] * 8).choose("prose", 16) == best


@pytest.mark.parametrize(
    ("device", "costs", "k", "auto", "expected"),
    [
        ("cpu", FREE, None, None, (3, False)),
        ("cuda", FREE, None, None, (MOST, True)),
        ("cuda", None, None, None, (3, False)),  # nothing was measured
        ("cuda", FREE, 5, None, (5, False)),  # somebody's own K
        ("cuda", FREE, 0, None, (0, False)),
        ("cuda", FREE, None, False, (3, False)),
        ("cuda", FREE, 5, True, (5, True)),
        ("cpu", FREE, None, True, (3, True)),
    ],
)
def test_what_is_usual_depends_on_the_device_and_gives_way(device, costs, k, auto, expected):
    assert usual_k(device, costs, k, auto) == expected


def test_positions_differ():
    auto = learned(STEEP, [0.95, 0.95, 0.05, 0.9])
    assert auto.choose("prose", 8) == 2
    assert auto.acceptance("prose", 3) == pytest.approx([0.9, 0.9, 0.25], abs=0.1)


def test_domains_are_apart_and_begin_from_the_prior():
    auto = learned(DEAR, [0.05] * 3)
    assert auto.choose("prose", 8) == 0
    assert auto.acceptance("code", 2) == [0.5, 0.5]
    for _ in range(60):
        auto.observe([draft(0, 0.99, "code")])
    assert auto.acceptance("code", 1)[0] > 0.9 > 0.2 > auto.acceptance("prose", 1)[0]


def test_it_forgets_what_was_long_ago():
    auto = learned(STEEP, [0.05] * 4)
    for _ in range(60):
        auto.observe([draft(i, 0.95) for i in range(4)])
    assert auto.acceptance("prose", 1)[0] > 0.8


def test_the_limit_holds_and_a_limit_of_nothing_is_nothing():
    auto = learned(FREE, [0.9] * 8)
    assert [auto.choose("prose", most) for most in (0, 1, 3, 16)] == [0, 1, 3, 8]


def test_after_many_plain_rounds_one_draft_is_tried():
    auto = learned(DEAR, [0.1])
    plain = [Token(0, 1, "x", Fate.PLAIN, 0, domain="prose")]
    for _ in range(PROBE_AFTER):
        assert auto.choose("prose", 8) == 0
        auto.observe(plain)
    assert auto.choose("prose", 8) == 1 and auto.choose("prose", 0) == 0
    auto.observe([draft(0, 0.1)])
    assert auto.choose("prose", 8) == 0


@pytest.mark.parametrize("costs", [FREE, STEEP, DEAR])
@pytest.mark.parametrize("a", [0.1, 0.6, 0.95])
def test_the_chosen_k_is_the_one_that_promises_most(costs, a):
    promised = [costs.speedup(a, [k]) for k in range(9)]
    assert promised[0] == 1 and promised[3] == pytest.approx(expected_tokens(a, 3) / costs.round_seconds(3))
    assert learned(costs, [a] * 8, rounds=400).choose("prose", 8) == promised.index(max(promised))


def test_the_prediction_over_changing_ks_weighs_rounds_by_their_time():
    costs = Costs(draft=0.5, verify=(1.0, 1.5, 3.0), overhead=1.0)
    # Rounds of 2, 3, 3 and 5 s promise 1, 1.5, 1.5 and 1.75 tokens; a plain round takes 2 s.
    assert costs.speedup(0.5, [0, 1, 1, 2]) == pytest.approx(5.75 * 2 / 13)
    assert costs.speedup([0.5, None], [0, 1]) == pytest.approx(2.5 * 2 / 5)
    for acceptance, ks in (([0.5, None], [2]), (None, [1]), (0.5, [3]), (0.5, [])):
        assert costs.speedup(acceptance, ks) is None


# --- In the engine -----------------------------------------------------------------------------------------

AUTO = Settings(temperature=1.0, num_draft_tokens=8, auto_draft_tokens=True, max_new_tokens=60)


def run(pair, settings):
    generation = Engine(pair).generate([0, 1], settings)
    return list(generation), generation.reply


def test_a_draft_that_is_always_right_is_asked_for_more_and_one_that_never_is_for_nothing():
    ids = [i % 5 for i in range(80)]
    always = toy_pair(path(ids, 9, 2), path(ids, 9, 2), context_length=99, draft_context_length=99)
    always.costs = Costs(draft=0.02, verify=(1.0,) * 9)
    rounds, _ = run(always, dataclasses.replace(AUTO, temperature=0))
    assert rounds[4].num_draft_tokens == 8 and {r.num_draft_tokens_reason for r in rounds[:5]} == {"auto"}
    never = toy_pair(path(ids, 9, 2), path([8] * 80, 9, 2), context_length=99, draft_context_length=99)
    never.costs = STEEP
    rounds, reply = run(never, dataclasses.replace(AUTO, temperature=0))
    assert [r.num_draft_tokens for r in rounds[-20:-1]].count(0) > 17
    plain = [t for r in rounds for t in r.tokens if t.fate is Fate.PLAIN]
    assert plain and list(reply.token_ids) == ids[:60]


def test_the_same_seed_gives_the_same_reply_and_the_same_ks():
    def once():
        pair = toy_pair(table(1, 5), table(2, 5))
        pair.costs = STEEP
        rounds, reply = run(pair, dataclasses.replace(AUTO, seed=5, max_new_tokens=50))
        return [r.num_draft_tokens for r in rounds], reply.token_ids

    first = once()
    assert first == once() and len(set(first[0])) > 1


def test_k_is_cut_by_the_length_limit_and_says_so():
    ids = [i % 5 for i in range(80)]
    pair = toy_pair(path(ids, 9, 2), path(ids, 9, 2), context_length=99, draft_context_length=99)
    pair.costs = FREE
    rounds, reply = run(pair, dataclasses.replace(AUTO, temperature=0, max_new_tokens=30))
    assert len(reply.token_ids) == 30
    assert (rounds[0].num_draft_tokens, rounds[0].num_draft_tokens_reason) == (8, "auto")
    assert rounds[-1].num_draft_tokens_reason == "length"


def test_without_measured_costs_k_is_as_set():
    rounds, _ = run(toy_pair(table(1, 5), table(2, 5)), dataclasses.replace(AUTO, num_draft_tokens=2))
    assert {(r.num_draft_tokens, r.num_draft_tokens_reason) for r in rounds[:-3]} == {(2, "fixed")}
