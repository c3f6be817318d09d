"""How the bench tells invented measurements: tables for people and the same figures as JSON."""

import dataclasses
import json

import pytest

from core.bench.measured import (
    PLAIN,
    TRANSFORMERS,
    Case,
    FollowUp,
    Limit,
    Options,
    Parts,
    Passes,
    Session,
    Spread,
    Way,
    shown,
)
from core.bench.report import Report, as_json, as_text, table
from core.figures.costs import Costs
from tests.core.bench.test_figures import sample


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


def test_the_limit_is_bytes_over_bandwidth():
    limit = Limit(target_bytes=100, draft_bytes=10, memory_bytes=4000, memory=1000.0, resident=2000.0)
    assert limit.target_share(0.5) == pytest.approx(0.2) and limit.draft_share(0.1) == pytest.approx(0.1)
    assert limit.round_share(Parts(0, 0.0, 0.4, 0.1)) == pytest.approx(0.2)
    assert limit.round_share(Parts(3, 0.1, 0.4, 0.15)) == pytest.approx(0.13 / 0.65)
    alone = dataclasses.replace(limit, draft_bytes=None)
    assert alone.draft_share(0.1) is None and alone.round_share(Parts(3, 0.1, 0.4, 0.15)) is None


def a_report(**changes):
    names = "processor cores card system torch torch_threads torch_cpu_capability transformers python"
    machine = dict.fromkeys(names.split(), "?")
    pair = dict.fromkeys("target draft quantization draft_quantization device exactness_note".split(), "")
    one = Spread(0.01, 0.01, 0.01)
    ways = (Way(2), Way(8, auto=True), Way(2, verifier="block"))
    values = dict(
        machine=machine,
        load_start=None,
        load_end=(0.5, 0.25, 0.125),
        pair=pair | {"draft": "tiny"},
        options=Options(k=(2, "auto"), prompts=1, max_new_tokens=8, repeats=2, temperatures=(0.0,)),
        ways=ways,
        samples={
            Case(domain, 0.0, how): samples
            for domain in ("code", "prose")
            for how, samples in {
                PLAIN: [sample(1, 4, 2.5, *"pppp"), sample(2, 4, 2.5, *"pppp")],
                "K = 2": [sample(1, 6, 1.75, "aab", "aab"), sample(2, 6, 2.0, "aab", "aab")],
                "K auto": [sample(n, 6, 2.0, "aab", "ab", num_draft_tokens_reason="auto") for n in (1, 2)],
                "K = 2, block": [sample(n, 6, 2.0, "aab", "axr") for n in (1, 2)],
                TRANSFORMERS: [sample(1, 4, 5.0), sample(2, 4, 5.0)],
            }.items()
        },
        passes=Passes(10, (one,), one, one),
        limit=Limit(20_000_000, 5_000_000, 1_000_000_000, 10e9, 20e9),
        costs=Costs(0.002, (0.01, 0.0125), 0.001),
    )
    return Report(**values | changes)


def test_tables_and_json_tell_the_same_figures():
    report = a_report()
    text = as_text(report)
    told = json.loads(json.dumps(as_json(report), allow_nan=False))
    plain, drafting, _, _, peer = told["cases"][:5]
    hows = [PLAIN, "K = 2", "K auto", "K = 2, block", TRANSFORMERS]
    assert [case["how"] for case in told["cases"]] == hows * 2
    assert drafting["times"]["plain"]["median"] == pytest.approx((2.5 / 1.75 + 2.5 / 2) / 2 * 6 / 4)
    assert plain["times"]["transformers"]["median"] == 2 and peer["times"]["transformers"]["median"] == 1
    assert drafting["usual_round"] == {"k": 2, "draft": 0.25, "target": 0.5, "outside": 0.125}
    assert peer["usual_round"] is peer["outside_share"] is peer["limit_share"] is None
    assert drafting["limit_share"] == pytest.approx(0.003 / 0.875)
    assert [each["repeat"] for each in drafting["samples"]] == [1, 2]
    speed = text.split("\n\n")[1].splitlines()
    assert speed[1].split("  ")[-1].strip() == "× transformers"
    for line, case in zip(speed[2:], told["cases"], strict=True):
        assert format(case["tokens_per_second"]["median"], ".1f") in line
        for name in ("plain", "transformers"):
            assert format(case["times"][name]["median"], ".2f") in line
    assert "250.00" in text and "14.3%" in text  # a usual round's draft in ms, and what lies outside passes
    assert told["verdicts"] == text.splitlines()[-2:]


def test_what_was_chosen_and_how_verifiers_did_have_tables():
    told, text = as_json(a_report()), as_text(a_report())
    automatic = next(s for s in told["speculation"] if s["way"]["auto"])
    assert automatic["chosen"] == {1: 0.5, 2: 0.5}
    assert told["costs"]["verify"] == (0.01, 0.0125)
    auto_table = next(part for part in text.split("\n\n") if part.startswith("Automatic K"))
    assert auto_table.splitlines()[2].split()[-2:] == ["50%", "50%"]
    assert "1 to 2 rows, 10.0, 12.5; draft step 2.0; the rest of a round 1.0" in auto_table
    verifiers = next(part for part in text.split("\n\n") if part.startswith("Verifiers"))
    assert verifiers.splitlines()[2].split()[-4:] == ["1", "2.000", "1.500", "0.750"]
    assert "too narrow" in verifiers
    assert [found["block"]["mean"] for found in told["verification"]] == [1.5, 1.5]


def test_limit_memory_and_follow_up_are_told_where_they_were_measured():
    text = as_text(a_report())
    assert "a target pass reads 20.0 MB, a draft step 5.0 MB" in text
    assert "a target pass takes 2.00 ms at least" in text
    assert "20%" in text.split("Single passes")[1].splitlines()[2]  # 2 of 10 ms
    assert "session" not in text and "follow-up" not in text
    two, eight = Spread(0.2, 0.2, 0.2), Spread(0.8, 0.8, 0.8)
    report = a_report(
        session=Session(200, 8, 1_000_000_000, 1_020_000_000, 1_030_000_000),
        follow_up=FollowUp(4000, 20, eight, two, Spread(0.25, 0.25, 0.25)),
    )
    assert "A session of 200 replies, resident memory: 1000 MB before" in as_text(report)
    assert "1020 MB after (+2.0%), at most 1030 MB between" in as_text(report)
    assert "0.250" in as_text(report)
    assert as_json(report)["session"]["growth"] == pytest.approx(0.02)


def test_a_pair_without_a_draft_has_no_speculation_to_report():
    plain = {case: samples for case, samples in a_report().samples.items() if case.how == PLAIN}
    one = Spread(0.01, 0.01, 0.01)
    alone = a_report(
        samples=plain,
        ways=(),
        pair=a_report().pair | {"draft": ""},
        passes=Passes(10, (one,), None, None),
        limit=Limit(20_000_000, None, 1_000_000_000, 10e9, 20e9),
        notes=("llama.cpp cannot run this pair (no).",),
    )
    text = as_text(alone)
    assert "Speculation" not in text and "draft model" not in text and "no draft" in text
    assert "llama.cpp cannot run this pair (no)." in text
    assert as_json(alone)["verdicts"] == []
