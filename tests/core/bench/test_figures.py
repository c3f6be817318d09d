"""What invented measurements come to: rates, ratios, acceptance, choices of K and verdicts."""

import dataclasses

import pytest

from core.bench.figures import (
    Speculation,
    case_figures,
    chosen_k,
    parts,
    rates,
    rival,
    speculation,
    speedups,
    usual_k,
    verdict,
    verification,
)
from core.bench.measured import PLAIN, Case, Parts, Sample, Spread, Way, spread
from core.figures.metrics import summarize
from tests.core.builders import rounds_of


def sample(repeat, tokens, seconds, *words, prompt="p", **changes):
    rounds = tuple(rounds_of(*words, **changes))
    return Sample(repeat, prompt, 10, tokens, seconds, 0.5, 0.75, seconds + 0.5, rounds)


def test_spread_is_median_and_range_of_what_is_known():
    assert spread([3.0, None, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert spread([None]) is None and spread([]) is None


def test_a_rate_is_all_tokens_over_all_seconds_of_a_repeat():
    samples = [sample(0, 10, 1.0), sample(1, 10, 2.0), sample(0, 30, 1.0), sample(1, 0, 2.0)]
    assert rates(samples) == [20.0, 2.5]
    assert rates([sample(0, 0, 0.0)]) == [None]


def test_speedups_compare_within_a_repeat():
    """The machine was twice as slow in the second repeat: the ratio does not show it."""
    fast, slow = [sample(0, 30, 1.0), sample(1, 30, 2.0)], [sample(0, 10, 1.0), sample(1, 10, 2.0)]
    assert speedups(fast, slow) == Spread(3.0, 3.0, 3.0)


def test_each_rival_is_its_fastest_way_in_the_same_case():
    case = Case("code", 0.0, PLAIN)
    by_how = {
        PLAIN: [sample(0, 10, 1.0), sample(1, 10, 2.0)],
        "transformers": [sample(0, 2, 1.0), sample(1, 1, 1.0)],
        "transformers, K = 2": [sample(0, 4, 1.0), sample(1, 2, 1.0)],
        "transformers, K = 4": [sample(0, 5, 1.0), sample(1, 2.5, 1.0)],
        "llama.cpp": [sample(0, 20, 1.0), sample(1, 10, 1.0)],
        "llama.cpp, lookup": [sample(0, 40, 1.0), sample(1, 20, 1.0)],
        "flashspec": [sample(0, 1, 1.0), sample(1, 1, 1.0)],
        "flashspec, K = 4": [sample(0, 2.5, 1.0), sample(1, 1.25, 1.0)],
    }
    samples = {Case("code", 0.0, how): found for how, found in by_how.items()}
    samples[Case("prose", 0.0, "transformers, K = 8")] = [sample(0, 50, 1.0), sample(1, 50, 1.0)]
    samples[Case("code", 0.8, "transformers, K = 8")] = [sample(0, 50, 1.0), sample(1, 50, 1.0)]
    assert rival(samples, case, "assisted") is by_how["transformers, K = 4"]
    times = {name: found.median for name, found in case_figures(samples, case).times.items()}
    assert times == {
        "plain": 1.0,
        "transformers": 5.0,
        "assisted": 2.0,
        "llama.cpp": 0.5,
        "lookup": 0.25,
        "flashspec": 4.0,
    }
    assert list(case_figures({case: samples[case]}, case).times) == ["plain"]


def test_parts_are_of_rounds_that_aimed_at_k():
    rounds = rounds_of("aaxr", "ab")  # three drafts, one draft; the builder's times
    assert parts(rounds, 3) == Parts(3, 0.25, 0.5, 0.125)
    assert parts(rounds, 2) is None
    assert usual_k(rounds) == 3 and usual_k(rounds_of("ab", "ab", "aab")) == 1 and usual_k([]) == 0


def test_speculation_puts_prediction_beside_measurement():
    samples = {
        Case("code", 0.0, PLAIN): [sample(0, 4, 2.5, "p", "p", "p", "p")],
        Case("code", 0.0, "K = 2"): [sample(0, 4, 1.75, "axr", "xdr", "aab")],
    }
    found = speculation(samples, Case("code", 0.0, "K = 2"), Way(2))
    # a_1 = 2/3, a_2 = 1/2: E = 1 + 2/3 + 1/3; a plain round takes 0.625 s, a drafting one 0.875 s.
    assert found.expected == pytest.approx(2.0)
    assert found.expected_alpha == pytest.approx(1 + 0.75 + 0.75**2)
    assert found.predicted == pytest.approx(2.0 * 0.625 / 0.875)
    assert found.measured.median == pytest.approx(2.5 / 1.75)


def test_automatic_k_is_told_by_how_often_each_was_chosen():
    automatic = rounds_of("aab", "axr", "p", "aab", num_draft_tokens_reason="auto")
    cut_short = rounds_of("ab", num_draft_tokens_reason="length")
    assert chosen_k([*automatic, *cut_short]) == {0: 0.25, 2: 0.75}
    way = Way(8, auto=True)
    case = Case("code", 0.0, way.name)
    samples = {
        Case("code", 0.0, PLAIN): [sample(0, 4, 2.5, "p", "p", "p", "p")],
        case: [sample(0, 4, 2.0, "aab", "p", num_draft_tokens_reason="auto")],
    }
    found = speculation(samples, case, way)
    assert way.name == "K auto" and found.chosen == {0: 0.5, 2: 0.5}
    assert found.expected is found.predicted is None and found.measured.median == pytest.approx(1.25)


def verified(temperature):
    """Three replies, two repeats, K = 2; block verification keeps one draft more in every first round."""
    token, block = Way(2), Way(2, verifier="block")
    case = Case("prose", temperature, token.name)
    words = [("aab", "xdr"), ("axr", "axr"), ("xdr", "xdr")]
    more = [("aab", "axr"), ("aab", "axr"), ("axr", "xdr")]
    samples = {
        dataclasses.replace(case, how=way.name): [
            sample(repeat, 4, 1.0, *of_reply, "xr", prompt=str(n))  # the last round: room for one draft
            for repeat in (1, 2)
            for n, of_reply in enumerate(replies)
        ]
        for way, replies in ((token, words), (block, more))
    }
    return verification(samples, case, token, block)


def test_accepted_lengths_of_the_verifiers_are_of_full_rounds():
    found = verified(0.8)
    assert found.token.mean == pytest.approx(4 / 6) and found.block.mean == pytest.approx(7 / 6)
    assert found.quotient == pytest.approx(7 / 4)
    for value, (low, high) in (
        (found.token.mean, found.token.interval),
        (found.block.mean, found.block.interval),
        (found.quotient, found.quotient_interval),
    ):
        assert low < value < high
    assert found.token.replies == 6
    # At temperature 0 a repeat of a prompt is the same reply once more, which proves nothing.
    assert verified(0.0).token.replies == 3


def found(k, measured):
    """What was found with K = ``k``, but for the figures that a verdict does not ask for."""
    way = Way(k)
    return Speculation(Case("code", 0.0, way.name), way, summarize([]), None, None, None, measured)


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        (Spread(1.5, 1.2, 1.9), "pays off"),
        (Spread(0.8, 0.7, 0.9), "does not pay off"),
        (Spread(1.1, 0.9, 1.2), "makes no sure difference"),
        (None, "is not known"),
    ],
)
def test_the_verdict_follows_the_range(measured, says):
    assert verdict("code", [found(4, measured)]).startswith(f"On code, speculation {says} at temperature 0")


def test_the_verdict_takes_the_best_way():
    several = [found(k, Spread(m, m, m)) for k, m in ((2, 0.9), (4, 1.3), (8, 1.1))]
    assert "pays off at temperature 0 (times plain at K = 4: 1.30)" in verdict("code", several)
