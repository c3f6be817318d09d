"""What the bench says of invented measurements: statistics, tables and verdicts."""

import json

import pytest

from core.bench_report import (
    PEER,
    PLAIN,
    Case,
    Options,
    Parts,
    Passes,
    Report,
    Sample,
    Speculation,
    Spread,
    as_json,
    as_text,
    assisted_name,
    best_assisted,
    case_figures,
    parts,
    rates,
    shown,
    speculation,
    speedups,
    spread,
    table,
    verdict,
)
from core.metrics import summarize
from tests.core.builders import rounds_of


def sample(repeat, tokens, seconds, *words):
    return Sample(repeat, "p", 10, tokens, seconds, 0.5, 0.75, seconds + 0.5, tuple(rounds_of(*words)))


def test_spread_is_median_and_range_of_what_is_known():
    assert spread([3.0, None, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert spread([None]) is None and spread([]) is None


def test_figures_for_people():
    assert shown(None) == "–"
    assert shown(0.125, ".1%") == "12.5%"
    assert shown(Spread(2.0, 1.0, 3.0), ".2f") == "2.00 (1.00..3.00)"
    assert shown(Spread(2.0, 2.0, 2.0)) == "2.0"


def test_table_lines_up():
    assert (
        table(["", "ms"], [["one row", "1.0"], ["x", "10.25"]])
        == "            ms\none row    1.0\nx        10.25"
    )


def test_a_rate_is_all_tokens_over_all_seconds_of_a_repeat():
    samples = [sample(0, 10, 1.0), sample(1, 10, 2.0), sample(0, 30, 1.0), sample(1, 0, 2.0)]
    assert rates(samples) == [20.0, 2.5]
    assert rates([sample(0, 0, 0.0)]) == [None]


def test_speedups_compare_within_a_repeat():
    """The machine was twice as slow in the second repeat: the ratio does not show it."""
    fast, slow = [sample(0, 30, 1.0), sample(1, 30, 2.0)], [sample(0, 10, 1.0), sample(1, 10, 2.0)]
    assert speedups(fast, slow) == Spread(3.0, 3.0, 3.0)


def test_the_peer_s_best_k_is_chosen_case_by_case():
    case = Case("code", 0.0, PLAIN)
    samples = {
        case: [sample(0, 10, 1.0), sample(1, 10, 2.0)],
        Case("code", 0.0, assisted_name(2)): [sample(0, 4, 1.0), sample(1, 2, 1.0)],
        Case("code", 0.0, assisted_name(4)): [sample(0, 5, 1.0), sample(1, 2.5, 1.0)],
        Case("prose", 0.0, assisted_name(8)): [sample(0, 50, 1.0), sample(1, 50, 1.0)],
    }
    assert best_assisted(samples, case) is samples[Case("code", 0.0, assisted_name(4))]
    assert case_figures(samples, case).times_assisted == Spread(2.0, 2.0, 2.0)
    assert best_assisted({case: samples[case]}, case) is None


def test_parts_are_of_rounds_that_aimed_at_k():
    rounds = rounds_of("aaxr", "ab")  # three drafts, one draft; the builder's times
    assert parts(rounds, 3) == Parts(0.25, 0.5, 0.125)
    assert parts(rounds, 2) is None


def test_speculation_puts_prediction_beside_measurement():
    samples = {
        Case("code", 0.0, PLAIN): [sample(0, 4, 2.5, "p", "p", "p", "p")],
        Case("code", 0.0, "K = 2"): [sample(0, 4, 1.75, "axr", "xdr", "aab")],
    }
    found = speculation(samples, Case("code", 0.0, "K = 2"), 2)
    # a_1 = 2/3, a_2 = 1/2: E = 1 + 2/3 + 1/3; a plain round takes 0.625 s, a drafting one 0.875 s.
    assert found.expected == pytest.approx(2.0)
    assert found.expected_alpha == pytest.approx(1 + 0.75 + 0.75**2)
    assert found.predicted == pytest.approx(2.0 * 0.625 / 0.875)
    assert found.measured.median == pytest.approx(2.5 / 1.75)


def found(k, measured):
    """What was found with K = ``k``, but for the figures that a verdict does not ask for."""
    return Speculation(Case("code", 0.0, f"K = {k}"), k, summarize([]), None, None, None, measured)


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


def test_the_verdict_takes_the_best_k():
    several = [found(k, Spread(m, m, m)) for k, m in ((2, 0.9), (4, 1.3), (8, 1.1))]
    assert "pays off at temperature 0 (times plain at K = 4: 1.30)" in verdict("code", several)


def a_report():
    machine = dict.fromkeys(
        "processor cores system torch torch_threads torch_cpu_capability transformers python".split(), "?"
    )
    pair = dict.fromkeys("target draft quantization draft_quantization device exactness_note".split())
    one = Spread(0.01, 0.01, 0.01)
    return Report(
        machine,
        None,
        None,
        pair,
        Options(k=(2,), prompts=1, max_new_tokens=8, repeats=2, temperatures=(0.0,), against=PEER),
        {
            Case(domain, 0.0, how): samples
            for domain in ("code", "prose")
            for how, samples in {
                PLAIN: [sample(1, 4, 2.5, *"pppp"), sample(2, 4, 2.5, *"pppp")],
                "K = 2": [sample(1, 6, 1.75, "aab", "aab"), sample(2, 6, 2.0, "aab", "aab")],
                PEER: [sample(1, 4, 5.0), sample(2, 4, 5.0)],
            }.items()
        },
        Passes(10, (one,), one, one),
    )


def test_tables_and_json_tell_the_same_figures():
    report = a_report()
    text = as_text(report)
    told = json.loads(json.dumps(as_json(report), allow_nan=False))
    plain, drafting, peer = told["cases"][:3]
    assert [case["how"] for case in told["cases"]] == [PLAIN, "K = 2", PEER] * 2
    assert drafting["times_plain"]["median"] == pytest.approx((2.5 / 1.75 + 2.5 / 2) / 2 * 6 / 4)
    assert plain["times_transformers"]["median"] == 2 and peer["times_transformers"]["median"] == 1
    assert drafting["usual_round"] == {"draft": 0.25, "target": 0.5, "outside": 0.125}
    assert peer["usual_round"] is peer["outside_share"] is None
    assert [each["repeat"] for each in drafting["samples"]] == [1, 2]
    speed = text.split("\n\n")[1].splitlines()[2:]
    for line, case in zip(speed, told["cases"], strict=True):
        figures = (case["tokens_per_second"], case["times_plain"], case["times_transformers"])
        for figure, form in zip(figures, (".1f", ".2f", ".2f"), strict=True):
            assert format(figure["median"], form) in line
    assert "250.00" in text and "14.3%" in text  # a usual round's draft in ms, and what lies outside passes
    assert told["verdicts"] == text.splitlines()[-2:]
