"""The bench: its options, and one tiny real run. No speed is judged."""

import json
import re
import threading

import pytest

from core.bench import __main__ as bench
from core.bench import machine as bench_machine
from core.bench import run as bench_run
from core.bench.__main__ import main, parse_options
from core.bench.measured import AUTO, PLAIN, TRANSFORMERS, Way
from core.bench.run import BenchError
from core.machine import heartbeat
from core.machine.progress import silent
from core.records import Settings
from core.settings import SettingsError
from tests.core.models_on_disk import write_model

# --- Options -----------------------------------------------------------------------------------------------


def options(*arguments):
    return parse_options(bench._parser().parse_args(arguments))


def test_lists_are_repeated_flags_or_words_with_commas():
    assert options("--k", "2,4", "--k", "4,auto").k == (2, 4, AUTO)
    assert options().k == (Settings().num_draft_tokens,)
    assert options("--temperature", "0", "1", "0.0").temperatures == (0.0, 1.0)
    assert options("--against", "transformers,llama.cpp").against == ("transformers", "llama.cpp")
    assert options().ways == [Way(Settings().num_draft_tokens)]
    names = [way.name for way in options("--k", "2,auto", "--verifier", "token,block").ways]
    assert names == ["K = 2", "K auto", "K = 2, block", "K auto, block"]


@pytest.mark.parametrize(
    "arguments", [["--k", "0"], ["--k", "4,x"], ["--prompts", "0"], ["--prompts", "999"], ["--repeats", "0"],
                  ["--conversation", "-1"], ["--session", "-1"], ["--temperature", "9"],
                  ["--max-new-tokens", "0"], ["--verifier", "tree"], ["--against", "vllm"]],
)  # fmt: skip
def test_what_cannot_be_measured_is_refused_before_loading(arguments, capsys):
    with pytest.raises((BenchError, SettingsError)):
        options(*arguments)
    assert main(arguments, load=None) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_peer_that_is_not_installed_is_named_before_loading(monkeypatch, capsys):
    monkeypatch.setitem(bench_run.LIBRARIES, "llama.cpp", ("no_such_module", "llama-cpp-python"))
    assert main(["--against", "llama.cpp"], load=None) == 2
    assert "pip install llama-cpp-python" in capsys.readouterr().err


def test_an_unknown_pair_is_one_sentence(capsys):
    assert main(["--pair", "no-such-pair"], load=None) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("tokens", ["120", "99999999"])
def test_a_conversation_that_does_not_fit_is_refused_before_anything_is_measured(tmp_path, tokens, capsys):
    target = write_model(tmp_path / "target", "llama", 1)
    assert main(["--target", str(target), "--conversation", tokens]) == 2
    said = capsys.readouterr()
    assert "do not fit" in said.err and "room for 128" in said.err and "Measuring" not in said.err


def test_synthetic_is_another_measurement(monkeypatch):
    asked = []
    monkeypatch.setattr(
        bench.bench_synthetic, "run", lambda *given, **named: asked.append((given, named)) or 3
    )
    assert main(["--device", "cuda", "--synthetic", "--json", "out"], load=None) == 3
    assert asked == [(("cuda",), {"json": "out"})]


# --- A real run --------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """Few and short measurements of everything that has a fixed length."""
    monkeypatch.setattr(bench, "PASS_REPEATS", 2)
    monkeypatch.setattr(bench, "FEWEST_ROWS_TIMED", 3)
    monkeypatch.setattr(bench_run, "WARM_UP_TOKENS", 1)
    monkeypatch.setattr(bench_run, "SESSION_TOKENS", 2)
    monkeypatch.setattr(bench_run, "ASSISTED_K", (2,))
    monkeypatch.setattr(bench_machine, "BUFFER_BYTES", 1 << 20)


def test_a_tiny_run_reports_everything(tmp_path, small, capsys):
    """Through the real loader and transformers itself, on models that were written a moment ago."""
    target, draft = (
        write_model(tmp_path / name, "llama", seed, max_position_embeddings=1024, num_hidden_layers=1)
        for seed, name in enumerate(("target", "draft"))
    )
    out = tmp_path / "bench.json"
    arguments = "--k 3,auto --verifier token,block --prompts 1 --max-new-tokens 4 --repeats 1"
    arguments += " --temperature 0.8 --against transformers --conversation 300 --session 2"
    arguments += (
        f" --device cpu --quantize none --draft-quantize none --target {target} --draft {draft} --json {out}"
    )
    assert main(arguments.split()) == 0
    said, told = capsys.readouterr()
    for how in (PLAIN, "K auto, block", TRANSFORMERS):
        assert f"Warming up: {how}\n" in told and f"Measuring replies: {how} " in told
    for words in ("On code, speculation", "On prose, speculation", "target, 4 rows", "draft step", "prefill"):
        assert words in said
    for words in ("caches kept", "Automatic K", "Verifiers", "Reading weights", "A session of 2 replies"):
        assert words in said
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["machine"]["torch_threads"] >= 1 and report["notes"] == []
    ways = {"K = 3", "K auto", "K = 3, block", "K auto, block"}
    assisted = {f"{TRANSFORMERS}, K = 2"}
    assert {case["how"] for case in report["cases"]} == {PLAIN, TRANSFORMERS} | ways | assisted
    for case in report["cases"]:
        (measured,) = case["samples"]
        assert 0 < measured["ttft_seconds"] <= measured["seconds"]
        if case["how"] in ways | {PLAIN}:
            assert measured["figures"]["emitted"] == measured["tokens"]
            assert 0 < case["outside_share"]["median"] < 1
        else:
            assert measured["figures"] is None
    assert len(report["passes"]["target"]) == 9  # automatic K may take eight drafts
    assert 0 < report["limit"]["draft_bytes"] and 0 < report["limit"]["memory"]
    follow_up = report["follow_up"]
    assert 300 < follow_up["prompt_tokens"] < 1024 and 0 < follow_up["new_tokens"] < 300
    assert follow_up["share"]["median"] == pytest.approx(
        follow_up["warm_seconds"]["median"] / follow_up["cold_seconds"]["median"]
    )
    assert report["session"]["replies"] == 2 and report["session"]["before"] > 1e6
    assert [found["way"]["auto"] for found in report["speculation"][:2]] == [False, True]
    assert len(report["verification"]) == 4


def test_a_peer_that_fails_is_a_note_and_ends_no_bench():
    def broken(*given):
        raise ValueError("this vocabulary is too wide\nand more")

    runs = {"good": lambda *given: None, "bad": broken}
    good, notes = bench_run.usable(runs, (None, []), options("--temperature", "0"), silent)
    assert list(good) == ["good"]
    assert notes == ["bad cannot run this pair (this vocabulary is too wide)."]


def test_a_report_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "bench", lambda *given: None)
    monkeypatch.setattr(bench, "as_text", lambda report: "the table\n")
    monkeypatch.setattr(bench, "as_json", lambda report: {})
    assert main(["--json", str(tmp_path)], load=lambda spec, progress: None) == 2
    said = capsys.readouterr()
    assert f"{tmp_path} cannot be written: " in said.err
    assert said.out == "the table\n"  # what was measured is not lost with the file


def test_what_takes_long_is_said_again_with_its_time(monkeypatch, capsys):
    """Peers being loaded and prompts being read say nothing of their own for minutes."""
    monkeypatch.setattr(heartbeat, "EVERY", 1)
    spoken = threading.Event()
    printer = bench.progress_printer

    def listening(out):
        tell = printer(out)

        def progress(sentence, fraction):
            tell(sentence, fraction)
            if "so far" in sentence:
                spoken.set()

        return progress

    def slow(options, pair, spec, say):
        say("Reading the same weights with transformers", None)
        assert spoken.wait(10)
        raise BenchError("enough")

    monkeypatch.setattr(bench, "progress_printer", listening)
    monkeypatch.setattr(bench, "bench", slow)
    assert main([], load=lambda spec, progress: None) == 2
    assert re.search(r"the same weights with transformers, \d+ s so far\n", capsys.readouterr().err)
