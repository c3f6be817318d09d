"""Rules that are not exact: what they keep, how far they drift, and that the exactness test fails them."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch

from core.drafters.recycling import RecyclingDrafter
from core.engine.loop import Engine
from core.figures.metrics import summarize
from core.records import Fate, Settings
from core.settings import LOSSY, VERIFIERS, SettingsError, parse_settings
from core.verify.lossy import drift, kept_ids, lossy
from core.verify.sampling import Distribution, Proposal, distribution
from tests.core.test_exactness import LENGTH, g_test, joint
from tests.core.toys import table, toy_pair

pytestmark = pytest.mark.usefixtures("remembered")
PROMPT = [0, 1]


def spread(seed: int, size: int = 6, ids: list[int] | None = None) -> Distribution:
    p = torch.randn(size, generator=torch.Generator().manual_seed(seed)).mul(1.5).softmax(0)
    return Distribution(p) if ids is None else Distribution(p, torch.tensor(ids))


def written(rule: str, p: Distribution, q: Distribution, threshold: float | None, size: int) -> torch.Tensor:
    """What a token made by the rule is distributed as, id by id: (size,) float64."""
    out = torch.zeros(size, dtype=torch.float64)
    for x in range(size):
        if not q.at(x):
            continue
        first = next(lossy(rule, threshold)(lambda _: p, [Proposal(x, q, q)], lambda: 0.5))
        if first.fate is Fate.ACCEPTED:
            out[x] += q.at(x)
        else:
            out += q.at(x) * p.over(torch.arange(size)).double()
    return out


LOGITS = torch.randn(6, generator=torch.Generator().manual_seed(3))
PAIRS = {
    "whole": (spread(1), spread(2)),
    "trimmed q": (spread(1), spread(2, 3, [0, 2, 5])),
    "filtered p": (distribution(LOGITS, 1.0, top_k=2), spread(2)),
    "certain q": (spread(4), Distribution(torch.ones(1), torch.tensor([3]))),
    "apart": (Distribution(torch.ones(1), torch.tensor([1])), Distribution(torch.ones(1), torch.tensor([2]))),
    "same": (spread(1), spread(1)),
}


@pytest.mark.parametrize("rule", LOSSY)
@pytest.mark.parametrize("name", PAIRS)
def test_drift_is_the_total_variation_of_what_is_written(rule, name):
    p, q = PAIRS[name]
    for threshold in (None,) if LOSSY[rule] is None else (LOSSY[rule][0], LOSSY[rule][1], LOSSY[rule][2]):
        found = written(rule, p, q, threshold, 6)
        assert found.sum().item() == pytest.approx(1, abs=1e-6)
        expected = (found - p.over(torch.arange(6)).double()).abs().sum().item() / 2
        assert drift(rule, p, q, threshold) == pytest.approx(expected, abs=1e-6)


def test_what_each_rule_keeps():
    p = Distribution(torch.tensor([0.5, 0.25, 0.25, 0.0]))
    q = Distribution(torch.tensor([0.1, 0.55, 0.25, 0.1]))
    kept = {rule: kept_ids(rule, p, q, LOSSY[rule] and LOSSY[rule][0]).tolist() for rule in LOSSY}
    assert kept == {
        "greedy": [True, False, False, False],
        "threshold": [True, False, False, False],
        "draft-ratio": [False, True, True, True],
        "target-ratio": [True, False, True, False],
        # min(0.09, sqrt(0.09) * exp(-1.04)) = 0.09
        "typical": [True, True, True, False],
    }


def test_a_sure_target_lowers_the_bar_of_typical_acceptance_and_an_unsure_one_its_own_share():
    sure = Distribution(torch.tensor([0.98, 0.02]))
    assert kept_ids("typical", sure, sure, 0.09).tolist() == [True, False]
    unsure = Distribution(torch.full((100,), 0.01))  # sqrt(0.09) * exp(-4.6) = 0.003 < 0.01
    assert kept_ids("typical", unsure, unsure, 0.09).all()


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_the_exactness_test_passes_exact_rules_and_fails_every_lossy_one(verifier):
    """The very test of ``test_exactness``, on its own toys."""
    target, replies = table(1, 3, 1.2), 1000
    settings = parse_settings(temperature=1, max_new_tokens=LENGTH, seed=0, verifier=verifier)
    engine, counts, tested = Engine(toy_pair(target, table(2, 3, 1.2))), Counter(), []
    for seed in range(replies):
        generation = engine.generate(PROMPT, dataclasses.replace(settings, seed=seed))
        tested += [t for r in generation for t in r.tokens if t.fate in (Fate.ACCEPTED, Fate.REJECTED)]
        counts[generation.reply.token_ids] += 1
    value = g_test(counts, joint(target, settings, LENGTH, 3), replies)
    if settings.exact:
        assert value > 1e-3 and all(t.drift is None for t in tested)
    else:
        assert value < 1e-6
        assert all(t.drift is not None and t.u is None for t in tested)


def test_where_nothing_is_drafted_a_reply_is_exact_whatever_the_rule():
    assert not Settings(verifier="greedy").exact
    assert Settings(verifier="greedy", num_draft_tokens=0).exact


def test_drift_of_a_reply_is_the_mean_over_tested_tokens():
    settings = Settings(temperature=1.0, verifier="draft-ratio", max_new_tokens=12)
    rounds = list(Engine(toy_pair(table(1, 5), table(2, 5))).generate(PROMPT, settings))
    drifts = [t.drift for r in rounds for t in r.tokens if t.drift is not None]
    assert summarize(rounds).drift == pytest.approx(sum(drifts) / len(drifts)) and max(drifts) > 0.05


def test_a_lossy_rule_makes_chains_whatever_the_width():
    pair = toy_pair(table(1, 4), table(2, 4))
    pair.drafter = RecyclingDrafter(64)
    settings = Settings(temperature=1.0, verifier="threshold", tree_width=3, max_new_tokens=20)
    for round_ in Engine(pair).generate([0, 1, 2, 3, 0, 1], settings):
        parents = [t.parent for t in round_.tokens if t.drafted]
        assert parents == [None, 0, 1][: len(parents)]


def test_thresholds_have_limits_and_usual_values():
    assert parse_settings(seed=1, verifier="typical").acceptance_threshold == 0.09
    assert parse_settings(seed=1, verifier="greedy", acceptance_threshold=3).acceptance_threshold is None
    assert parse_settings(seed=1, verifier="token", acceptance_threshold=3).acceptance_threshold is None
    with pytest.raises(SettingsError, match="draft-ratio must be a number from 0.7 to 0.99, not 0.5"):
        parse_settings(seed=1, verifier="draft-ratio", acceptance_threshold=0.5)
