"""The bench: its statistics and tables on invented measurements, one tiny real run. No speed is judged."""

import dataclasses
import json

import pytest

from core import bench
from core.bench import (
    PEER,
    PLAIN,
    BenchError,
    Case,
    Sample,
    Spread,
    main,
    parse_options,
    parts,
    rates,
    shown,
    speculation,
    speedups,
    spread,
    table,
    verdict,
)
from core.settings import SettingsError
from tests.core.builders import rounds_of

CODE = Case("code", 0.0, "K = 4")


def sample(repeat, tokens, seconds, *words):
    return Sample(repeat, "p", 10, tokens, seconds, 0.5, 0.75, seconds + 0.5, tuple(rounds_of(*words)))


# --- Numbers -----------------------------------------------------------------------------------------------


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


def test_parts_are_of_rounds_that_aimed_at_k():
    rounds = rounds_of("aaxr", "ab")  # three drafts, one draft; the builder's times
    assert parts(rounds, 3) == bench.Parts(0.25, 0.5, 0.125)
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
    samples = {Case("code", 0.0, how): [sample(0, 1, 1.0, "p")] for how in (PLAIN, "K = 4")}
    found = speculation(samples, CODE, 4)
    assert verdict("code", [replaced(found, measured=measured)]).startswith(
        f"On code, speculation {says} at temperature 0"
    )


def test_the_verdict_takes_the_best_k():
    samples = {Case("code", 0.0, how): [sample(0, 1, 1.0, "p")] for how in (PLAIN, "K = 4")}
    found = speculation(samples, CODE, 4)
    several = [replaced(found, k=k, measured=Spread(m, m, m)) for k, m in ((2, 0.9), (4, 1.3), (8, 1.1))]
    assert "pays off at temperature 0 (times plain at K = 4: 1.30)" in verdict("code", several)


def replaced(found, **changes):
    return dataclasses.replace(found, **changes)


# --- Options -----------------------------------------------------------------------------------------------


def options(*arguments):
    return parse_options(bench._parser().parse_args(arguments))


def test_k_is_a_list_or_repeated():
    assert options("--k", "2,4", "--k", "4").k == (2, 4)
    assert options().k == (4,)
    assert options("--temperature", "0", "1", "0.0").temperatures == (0.0, 1.0)


@pytest.mark.parametrize(
    "arguments", [["--k", "0"], ["--k", "4,x"], ["--prompts", "0"], ["--prompts", "999"], ["--repeats", "0"],
                  ["--temperature", "9"], ["--max-new-tokens", "0"]],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused_before_loading(arguments, capsys):
    with pytest.raises((BenchError, SettingsError)):
        options(*arguments)
    assert main(arguments, load=None) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


# --- A real run --------------------------------------------------------------------------------------------


def test_a_tiny_run_reports_everything(embedded_pair, embedded_home, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("REDLINE_HOME", str(embedded_home))
    monkeypatch.setattr(bench, "PASS_REPEATS", 2)
    monkeypatch.setattr(bench, "FEWEST_ROWS_TIMED", 3)
    monkeypatch.setattr(bench, "WARM_UP_TOKENS", 1)
    out = tmp_path / "bench.json"
    arguments = "--k 1,3 --prompts 1 --max-new-tokens 5 --repeats 1 --temperature 0.8 --against transformers"
    assert main([*arguments.split(), "--json", str(out)], load=lambda progress: embedded_pair) == 0
    said = capsys.readouterr().out
    for words in ("On code, speculation", "On prose, speculation", "target, 4 rows", "draft step", "prefill"):
        assert words in said
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["machine"]["torch_threads"] >= 1
    assert {case["how"] for case in report["cases"]} == {PLAIN, "K = 1", "K = 3", PEER}
    for case in report["cases"]:
        (measured,) = case["samples"]
        assert measured["tokens"] > 0 and 0 < measured["ttft_seconds"] < measured["seconds"]
        if case["how"] == PEER:
            assert measured["figures"] is None and case["times_transformers"]["median"] == 1
        else:
            assert (
                measured["figures"]["emitted"] == measured["tokens"]
                and 0 < case["outside_share"]["median"] < 1
            )
        if case["how"] == PLAIN:
            assert case["times_plain"]["median"] == 1 and measured["figures"]["alpha"] is None
    assert len(report["passes"]["target"]) == 4
    assert [found["k"] for found in report["speculation"]] == [1, 3, 1, 3]
