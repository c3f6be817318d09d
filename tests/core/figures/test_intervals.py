"""The cluster bootstrap against simulations whose truth is known, and where it must say nothing."""

from __future__ import annotations

import numpy as np
import pytest

from core.figures.intervals import quotient_interval, ratio_interval

TRUTH = 0.6  # of ``simulate``: the mean of Beta(6, 4), replies' lengths being independent of their rates


def simulate(rng: np.random.Generator, clusters: int) -> tuple[np.ndarray, np.ndarray]:
    """Accepted and drafted tokens of replies: a rate of each reply's own, lengths from 20 to 199."""
    drafted = rng.integers(20, 200, clusters)
    return rng.binomial(drafted, rng.beta(6, 4, clusters)), drafted


def covered(clusters: int, samples: int = 500) -> tuple[float, float]:
    """How often the truth lies in the interval, and in the one that takes tokens for independent."""
    rng = np.random.default_rng(1)
    ours = tokens = 0
    for seed in range(samples):
        accepted, drafted = simulate(rng, clusters)
        low, high = ratio_interval(accepted, drafted, resamples=600, seed=seed)
        ours += low <= TRUTH <= high
        rate = accepted.sum() / drafted.sum()
        tokens += abs(rate - TRUTH) <= 1.96 * np.sqrt(rate * (1 - rate) / drafted.sum())
    return ours / samples, tokens / samples


def test_it_covers_the_truth_as_often_as_it_says_and_counting_tokens_does_not():
    ours, tokens = covered(25)
    assert 0.91 <= ours <= 0.97
    assert tokens < 0.6


def test_few_clusters_cover_less_which_is_why_the_page_warns():
    assert 0.74 <= covered(5, 300)[0] <= 0.88


def test_the_plain_ratio_is_in_the_middle():
    accepted, drafted = simulate(np.random.default_rng(3), 60)
    low, high = ratio_interval(accepted, drafted)
    ratio = accepted.sum() / drafted.sum()
    assert low < ratio < high
    assert (low + high) / 2 == pytest.approx(ratio, abs=0.005)
    narrow = ratio_interval(accepted, drafted, level=0.5)
    assert low < narrow[0] < ratio < narrow[1] < high


def test_the_same_figures_give_the_same_interval():
    accepted, drafted = simulate(np.random.default_rng(4), 12)
    assert ratio_interval(accepted, drafted) == ratio_interval(list(accepted), list(drafted))
    assert ratio_interval(accepted, drafted) != ratio_interval(accepted, drafted, seed=1)


def test_it_is_the_same_however_many_draws_are_held_at_a_time(monkeypatch):
    accepted, drafted = simulate(np.random.default_rng(5), 40)
    whole = ratio_interval(accepted, drafted)
    monkeypatch.setattr("core.figures.intervals._DRAWS_AT_ONCE", 40 * 30)
    assert ratio_interval(accepted, drafted) == pytest.approx(whole, abs=0.02)


def test_two_clusters_span_their_two_ratios():
    assert ratio_interval([1, 3], [4, 4]) == (0.25, 0.75)


@pytest.mark.parametrize(
    ("numerators", "denominators"),
    [([], []), ([3], [4]), ([3, 0], [4, 0]), ([0, 0], [0, 0]), ([2, 3], [2, 3]), ([1, 2, 3], [3, 6, 9])],
    ids=["none", "one", "one with a denominator", "all empty", "always 1", "the same ratio"],
)
def test_no_interval_is_claimed_where_there_is_none(numerators, denominators):
    assert ratio_interval(numerators, denominators) is None


def test_samples_without_a_denominator_are_dropped():
    # Of two replies with drafts among six, a ninth of all samples draws neither: 0/0 is no rate of 0.
    low, high = ratio_interval([2, 3, 0, 0, 0, 0], [4, 4, 0, 0, 0, 0])
    assert (low, high) == (0.5, 0.75)


def test_a_quotient_of_two_ratios():
    rng = np.random.default_rng(6)
    seconds = rng.uniform(1, 3, 40), rng.uniform(1, 3, 30)
    fast = seconds[0] * rng.normal(40, 3, 40), seconds[0]
    slow = seconds[1] * rng.normal(20, 1, 30), seconds[1]
    low, high = quotient_interval(fast, slow)
    assert low < (fast[0].sum() / fast[1].sum()) / (slow[0].sum() / slow[1].sum()) < high
    assert 1.9 < low < 2 < high < 2.1
    turned = quotient_interval(slow, fast)
    assert turned == pytest.approx((1 / high, 1 / low), abs=0.01)


def test_a_quotient_needs_two_clusters_on_both_sides_and_something_below():
    some = ([3, 5], [1, 1])
    assert quotient_interval(some, ([3], [1])) is None
    assert quotient_interval(([3], [1]), some) is None
    assert quotient_interval(some, ([0, 0], [1, 1])) is None


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="one numerator and one denominator"):
        ratio_interval([1, 2], [1])
    with pytest.raises(ValueError, match="between 0 and 1, not 95"):
        ratio_interval([1, 2], [2, 2], level=95)
