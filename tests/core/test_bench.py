"""The bench: its options, and one tiny real run. No speed is judged."""

import json

import pytest

from core import bench
from core.bench import BenchError, main, parse_options
from core.bench_report import PEER, PLAIN, assisted_name
from core.records import Settings
from core.settings import SettingsError

# --- Options -----------------------------------------------------------------------------------------------


def options(*arguments):
    return parse_options(bench._parser().parse_args(arguments))


def test_k_is_a_list_or_repeated():
    assert options("--k", "2,4", "--k", "4").k == (2, 4)
    assert options().k == (Settings().num_draft_tokens,)
    assert options("--temperature", "0", "1", "0.0").temperatures == (0.0, 1.0)


@pytest.mark.parametrize(
    "arguments", [["--k", "0"], ["--k", "4,x"], ["--prompts", "0"], ["--prompts", "999"], ["--repeats", "0"],
                  ["--conversation", "-1"], ["--temperature", "9"], ["--max-new-tokens", "0"]],
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
    monkeypatch.setattr(bench, "ASSISTED_K", (2,))
    out = tmp_path / "bench.json"
    arguments = "--k 1,3 --prompts 1 --max-new-tokens 6 --repeats 1 --temperature 0.8 --against transformers"
    arguments += " --conversation 300"
    assert main([*arguments.split(), "--json", str(out)], load=lambda progress: embedded_pair) == 0
    said = capsys.readouterr().out
    for words in ("On code, speculation", "On prose, speculation", "target, 4 rows", "draft step", "prefill"):
        assert words in said
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["machine"]["torch_threads"] >= 1
    assisted = {assisted_name(2)}
    assert {case["how"] for case in report["cases"]} == {PLAIN, "K = 1", "K = 3", PEER} | assisted
    for case in report["cases"]:
        (measured,) = case["samples"]
        assert measured["tokens"] > 0 or case["how"] in assisted  # all may have come with the first
        assert 0 < measured["ttft_seconds"] < measured["seconds"]
        assert case["times_assisted"] is None or case["times_assisted"]["median"] > 0
        if case["how"] in assisted:
            assert measured["figures"] is None
        elif case["how"] == PEER:
            assert measured["figures"] is None and case["times_transformers"]["median"] == 1
        else:
            assert (
                measured["figures"]["emitted"] == measured["tokens"]
                and 0 < case["outside_share"]["median"] < 1
            )
        if case["how"] == PLAIN:
            assert case["times_plain"]["median"] == 1 and measured["figures"]["alpha"] is None
    assert len(report["passes"]["target"]) == 4
    follow_up = report["follow_up"]
    assert 300 < follow_up["prompt_tokens"] and 5 < follow_up["new_tokens"] < 60
    assert follow_up["share"]["median"] == pytest.approx(
        follow_up["warm_seconds"]["median"] / follow_up["cold_seconds"]["median"]
    )
    assert "caches kept" in said
    assert [found["k"] for found in report["speculation"]] == [1, 3, 1, 3]


def test_a_report_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "bench", lambda *given: None)
    monkeypatch.setattr(bench, "as_text", lambda report: "")
    monkeypatch.setattr(bench, "as_json", lambda report: {})
    assert main(["--json", str(tmp_path)], load=lambda progress: None) == 2
    assert f"{tmp_path} cannot be written: " in capsys.readouterr().err
