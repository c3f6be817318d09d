"""The terminal twin: the page's reply on a command line, as text, in colour and as JSON."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from core.engine import calibration
from core.engine.loop import Engine
from core.figures.costs import Costs
from core.figures.metrics import FIGURE_NAMES
from core.generate import InputError, main, parse_request, read_messages
from core.models.errors import LoadError
from core.pairs.spec import PairSpec, embedded_spec
from core.record.json_lines import json_line, reply_row, round_row
from core.records import Fate, PairInfo, Settings, Token
from core.settings import SettingsError
from core.text.chat import fit_chat
from core.text.template import NO_TEMPLATE, PLAIN_STOP
from tests.core.builders import assert_identities, reply_of, round_of, rounds_of, token

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 12
ASK = ["--prompt", "Write a Python function that adds two numbers.", "--max-new-tokens", str(TOKENS)]


@pytest.fixture
def run(embedded_pair):
    """Runs the command with the embedded pair, already loaded."""
    return lambda *arguments: main(list(arguments), load=lambda spec, progress: embedded_pair)


def strict_json(line):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(line, parse_constant=refuse)


# --- The reply ---------------------------------------------------------------------------------------------


def test_json_gives_rounds_then_the_reply_and_the_identities_hold(run, capsys, embedded_pair):
    assert run(*ASK, "--json", "--seed", "3") == 0
    *rounds, reply = map(strict_json, capsys.readouterr().out.splitlines())
    assert {row["type"] for row in rounds} == {"round"} and reply["type"] == "reply"
    assert [row["index"] for row in rounds] == list(range(reply["rounds"]))
    for row in (*rounds, reply):
        assert_identities(row)
    for name in ("drafted", *(fate.value for fate in Fate), "emitted", "draft_seconds"):
        assert sum(row[name] for row in rounds) == pytest.approx(reply[name])
    for row in rounds:
        assert [token["index"] for token in row["tokens"]] == list(range(len(row["tokens"])))
        assert all(set(token) == {field.name for field in fields(Token)} for token in row["tokens"])
        for fate in Fate:
            assert sum(token["fate"] == fate.value for token in row["tokens"]) == row[fate.value]
    emitted = [t for row in rounds for t in row["tokens"] if t["emitted_index"] is not None]
    assert [t["id"] for t in emitted] == reply["token_ids"]
    assert [t["emitted_index"] for t in emitted] == list(range(TOKENS))
    assert "".join(row["text"] for row in rounds) == reply["text"][: reply["visible_chars"]]
    assert reply["emitted"] == TOKENS and reply["finish_reason"] == "length" and reply["seed"] == 3
    assert embedded_pair.tokenizer.decode(reply["token_ids"]) == reply["text"]


def test_it_is_the_engines_reply_to_the_pages_prompt(run, capsys, embedded_pair):
    """The same call by hand gives the same ids."""
    assert run(*ASK, "--json", "--system", "Be brief.", "--temperature", "0.9", "--top-p", "0.9") == 0
    reply = strict_json(capsys.readouterr().out.splitlines()[-1])
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASK[1]}]
    settings = Settings(temperature=0.9, top_p=0.9, max_new_tokens=TOKENS, seed=1)
    limit = embedded_pair.info.context_length - TOKENS
    ids = fit_chat(embedded_pair.tokenizer, messages, limit).ids
    generation = Engine(embedded_pair).generate(ids, settings)
    for _ in generation:
        pass
    assert reply["token_ids"] == list(generation.reply.token_ids)
    assert reply["prompt_tokens"] == len(ids)


def test_ct_01_without_a_template_it_says_so(run, capsys, monkeypatch, embedded_pair):
    monkeypatch.setattr(embedded_pair.tokenizer, "chat_template", None)
    assert run(*ASK, "--json", "--stop", "never", "--stop", PLAIN_STOP) == 0
    said = capsys.readouterr()
    assert NO_TEMPLATE in said.err
    assert strict_json(said.out.splitlines()[-1])["stop"] == ["never", PLAIN_STOP]


def test_a_pipe_gets_the_text_alone(run, capsys):
    arguments = [*ASK, "--temperature", "0"]
    assert run(*arguments) == 0
    said = capsys.readouterr()
    assert run(*arguments, "--json") == 0
    reply = strict_json(capsys.readouterr().out.splitlines()[-1])
    assert said.out == reply["text"].rstrip("\n") + "\n"
    figures = said.err.splitlines()[-1]
    assert f"{TOKENS} tokens in {reply['rounds']} rounds" in figures and "seed 1" in figures


@pytest.mark.parametrize("no_colour", ["", "1"])
def test_a_terminal_gets_marks(run, capsys, monkeypatch, no_colour):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", no_colour)
    assert run(*ASK) == 0
    said = capsys.readouterr()
    codes = {code for sgr in re.findall(r"\x1b\[([0-9;]*)m", said.out) for code in sgr.split(";")}
    assert "9" in codes and "4" in codes  # what was struck out, and what was put in its place
    assert bool(codes & {"31", "32", "33", "34"}) == (not no_colour)
    assert "rejected" in said.err  # the legend


def test_a_dumb_terminal_gets_the_text_alone(run, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    assert run(*ASK) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_plain_decoding_leaves_figures_of_drafts_undefined(run, capsys):
    assert run(*ASK, "--k", "0", "--json") == 0
    reply = strict_json(capsys.readouterr().out.splitlines()[-1])
    assert reply["plain"] == reply["rounds"] == TOKENS
    for name in ("draft_acceptance_rate", "alpha", "acceptance_per_position", "mean_acceptance_length"):
        assert reply[name] is None
    assert run(*ASK, "--k", "0") == 0
    assert "– of 0 drafts accepted" in capsys.readouterr().err


def test_k_may_be_chosen_automatically_and_drafts_judged_in_blocks(run, capsys, monkeypatch, embedded_pair):
    monkeypatch.setattr(embedded_pair, "costs", None)  # put back afterwards: the pair is everybody's
    monkeypatch.setattr(calibration, "measure", lambda pair, **how: Costs(0.001, (0.01,) * 9))
    assert run(*ASK, "--k", "auto", "--verifier", "block", "--json") == 0
    *rounds, reply = map(strict_json, capsys.readouterr().out.splitlines())
    assert rounds[0]["num_draft_tokens_reason"] == "auto" and 0 < rounds[0]["num_draft_tokens"] <= 8
    assert (reply["num_draft_tokens"], reply["auto_draft_tokens"], reply["verifier"]) == (8, True, "block")
    assert any(token["h"] is not None for row in rounds for token in row["tokens"])
    assert run(*ASK, "--k", "auto", "--verifier", "block") == 0
    said = capsys.readouterr().err
    mean = sum(row["drafted"] for row in rounds) / len(rounds)
    assert f"· K auto, mean {mean:.2f} · judged by block ·" in said and "Measuring what passes cost" in said


@pytest.mark.parametrize(
    ("arguments", "k", "auto"), [((), 8, True), (("--k", "2"), 2, False), (("--drafter", "plain"), 3, False)]
)
def test_on_a_card_k_is_automatic_unless_it_is_named(
    run, capsys, monkeypatch, embedded_pair, arguments, k, auto
):
    monkeypatch.setattr(embedded_pair, "info", replace(embedded_pair.info, device="cuda"))
    monkeypatch.setattr(embedded_pair, "costs", None)
    monkeypatch.setattr(embedded_pair, "_made", {})
    monkeypatch.setattr(calibration, "costs", lambda pair, say: Costs(0.001, (0.01,) * 9))
    assert run(*ASK, "--json", *arguments) == 0
    reply = strict_json(capsys.readouterr().out.splitlines()[-1])
    assert (reply["num_draft_tokens"], reply["auto_draft_tokens"]) == (k, auto)


def test_where_nothing_can_be_measured_k_is_fixed_and_says_so(run, capsys, monkeypatch, embedded_pair):
    def fail(pair):
        raise RuntimeError("no clock")

    monkeypatch.setattr(embedded_pair, "costs", None)
    monkeypatch.setattr(calibration, "measure", fail)
    assert run(*ASK, "--k", "auto", "--json") == 0
    said = capsys.readouterr()
    reply = strict_json(said.out.splitlines()[-1])
    assert "What passes cost could not be measured: K is fixed at 3." in said.err
    assert (reply["num_draft_tokens"], reply["auto_draft_tokens"]) == (3, False)


def test_a_stop_string_is_not_shown(run, capsys):
    assert run(*ASK, "--temperature", "0", "--stop", "nowhere", "--stop", "def") == 0
    said = capsys.readouterr()
    assert "def" not in said.out and "ended: stop_string" in said.err


class InterruptingOut(io.TextIOWrapper):
    """Standard output that presses Ctrl-C ``times`` times when first written to."""

    def __init__(self, times):
        super().__init__(io.BytesIO(), encoding="utf-8")
        self.times = times

    def write(self, text):
        while self.times:
            self.times -= 1
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


@pytest.mark.skipif(sys.platform == "win32", reason="os.kill sends no Ctrl-C on Windows")
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_keeps_what_was_said(run, monkeypatch, embedded_pair, times):
    out = InterruptingOut(times)
    monkeypatch.setattr(sys, "stdout", out)
    before = signal.getsignal(signal.SIGINT)
    assert run(*ASK, "--json") == 130
    assert signal.getsignal(signal.SIGINT) is before
    out.seek(0)
    *rounds, reply = map(strict_json, out.read().splitlines())
    assert reply["finish_reason"] == "cancelled"
    assert 0 < reply["emitted"] < TOKENS and reply["rounds"] >= len(rounds)


def test_ctrl_c_while_loading_is_quiet(capsys):
    def interrupted(spec, progress):
        raise KeyboardInterrupt

    assert main(ASK, load=interrupted) == 130
    assert capsys.readouterr().out == ""


def test_a_reader_that_goes_away_ends_it_quietly(run, monkeypatch, capfd):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert run(*ASK) == 141
    assert "Error" not in capfd.readouterr().err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
def test_a_full_disk_is_one_sentence(run, monkeypatch, capfd):
    with open("/dev/full", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert run(*ASK) == 1
    said = capfd.readouterr().err
    assert said.splitlines()[-1] == "Standard output cannot be written: no space left on device."
    assert "Traceback" not in said


def test_closed_standard_output_is_no_fault(run, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert run(*ASK) == 0


def test_a_failing_model_ends_the_reply_in_words(run, capsys, monkeypatch, embedded_pair):
    def fail(ids, cache):
        raise RuntimeError("out of \x1b[31mmemory")

    monkeypatch.setattr(embedded_pair.target, "logits", fail)
    assert run(*ASK, "--json") == 1
    said = capsys.readouterr()
    reply = strict_json(said.out)
    assert reply["finish_reason"] == "error" and reply["error"].startswith("The reply ended early")
    assert reply["ttft_seconds"] is None and reply["tokens_per_pass"] is None
    assert said.err.splitlines()[-1] == "The reply ended early: out of ␛[31mmemory."


def test_a_process_of_its_own_writes_utf8_whatever_the_locale(embedded_home):
    command = [
        sys.executable,
        "-m",
        "core.generate",
        *ASK[:2],
        "--max-new-tokens",
        "2",
        "--json",
        "--stop",
        "é→",
    ]
    environment = os.environ | {"REDLINE_HOME": str(embedded_home), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()
    lines = done.stdout.decode("utf-8").splitlines()
    assert strict_json(lines[-1])["stop"] == ["é→"] and "é→" in lines[-1]
    assert b"Traceback" not in done.stderr


# --- Rows --------------------------------------------------------------------------------------------------


def test_the_reply_row_is_flat_and_complete():
    rounds = rounds_of("aaxdr", "aab")
    reply = reply_of(rounds)
    row = reply_row(reply, rounds, "code")
    names = {*FIGURE_NAMES, *(f.name for f in fields(Settings)), *(f.name for f in fields(PairInfo))}
    assert names <= set(row)
    assert row["alpha"] == 0.75 and row["domain_choice"] == "code" and row["exact"] is True
    assert row["context_tokens"] == 10 + 6
    assert row["seconds"] == row["prefill_seconds"] + row["decode_seconds"]
    assert (row["ttft_seconds"], row["finish_reason"]) == (reply.ttft_seconds, "eos_token")
    assert not any(isinstance(value, dict) for value in row.values())


def test_json_is_strict_and_safe_to_print():
    odd = token("a", 0, 0, 0, text="\x1b[2J\x9b31m\x7f\u2028é", p=float("nan"), q=float("inf"))
    line = json_line(round_row(round_of("a", tokens=(odd,))))
    assert not re.search("[\x00-\x1f\x7f-\x9f\u2028]", line) and len(line.splitlines()) == 1 and "é" in line
    (read,) = strict_json(line)["tokens"]
    assert read["text"] == odd.text and read["p"] is None and read["q"] is None and read["fate"] == "accepted"


# --- Input -------------------------------------------------------------------------------------------------


def written(tmp_path, content):
    path = tmp_path / "messages.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return str(path)


TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", "extra": 1}]


def test_the_prompt_follows_the_messages(tmp_path):
    path = written(tmp_path, TURNS)
    request = parse_request(["--messages", path, "--prompt", "And now?", "--system", "Be brief."])
    assert [message["content"] for message in request.messages] == ["Be brief.", "Hi", "Hello", "And now?"]
    assert request.settings == Settings(seed=1, max_new_tokens=128)


def test_messages_may_end_with_the_question(tmp_path):
    path = written(tmp_path, b"\xef\xbb\xbf" + json.dumps(TURNS[:1]).encode())
    assert parse_request(["--messages", path]).messages == TURNS[:1]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"[", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        ({"role": "user"}, "must hold a list"),
        (["hi"], "Message 1 of"),
        ([{"role": "robot", "content": "hi"}], "Message 1 of"),
        ([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "a content that is text"),
        ([*TURNS, {"role": "system", "content": ""}], "Message 3 of"),
    ],
)
def test_a_file_that_is_no_conversation_is_refused(tmp_path, content, sentence):
    with pytest.raises(InputError, match=sentence):
        read_messages(written(tmp_path, content))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "nothing to answer"),
        (["--system", "Be brief."], "nothing to answer"),
        (["--prompt", " \n"], "prompt is empty"),
        (["--prompt", "hi", "--domain", "poetry"], "Domain must be one of"),
        (["--messages", "nowhere.json"], "nowhere.json cannot be read"),
    ],
)
def test_bad_arguments_are_refused_in_words(arguments, sentence):
    with pytest.raises(InputError, match=sentence):
        parse_request(arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--k", "17"],
        ["--k", "automatic"],
        ["--verifier", "lucky"],
        ["--temperature", "hot"],
        ["--top-p", "2"],
        ["--min-p", "2"],
        ["--repetition-penalty", "0"],
        ["--seed", "1.5"],
        ["--max-new-tokens", "0"],
    ],
)
def test_bad_settings_are_refused_in_words(arguments):
    with pytest.raises(SettingsError, match="must be"):
        parse_request(["--prompt", "hi", *arguments])


def test_every_setting_can_be_given():
    given = {
        "temperature": 0.9,
        "top_k": 5,
        "top_p": 0.8,
        "min_p": 0.05,
        "repetition_penalty": 1.2,
        "seed": 9,
    }
    flags = [text for name, value in given.items() for text in ("--" + name.replace("_", "-"), str(value))]
    settings = parse_request(
        ["--prompt", "hi", "--k", "2", "--max-new-tokens", "7", "--stop", "END", *flags]
    ).settings
    assert settings == Settings(num_draft_tokens=2, max_new_tokens=7, stop=("END",), **given)
    assert parse_request(["--prompt", "hi"]).settings == Settings(max_new_tokens=128, seed=1)


def test_messages_without_a_question_are_refused(tmp_path):
    path = written(tmp_path, TURNS)
    with pytest.raises(InputError, match="not a user's"):
        parse_request(["--messages", path])
    system = [{"role": "system", "content": "Be brief."}]
    with pytest.raises(InputError, match="leave --system away"):
        parse_request(["--messages", written(tmp_path, system), "--system", "No.", "--prompt", "hi"])


def refused(capsys, arguments, load):
    assert main(arguments, load=load) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err.splitlines()


def test_bad_input_is_answered_before_anything_loads(capsys):
    def load(spec, progress):
        raise AssertionError("loaded")

    assert refused(capsys, ["--prompt", "hi", "--k", "-1"], load) == [
        "Draft tokens (K) must be a whole number from 0 to 16, not '-1'."
    ]


def test_a_pair_that_makes_no_sense_is_answered_before_anything_loads(capsys, monkeypatch):
    def load(spec, progress):
        raise AssertionError("loaded")

    said = refused(capsys, [*ASK, "--draft", "a/b"], load)
    assert said == ["--draft needs a target: name one with --target."]
    monkeypatch.setenv("REDLINE_DEVICE", "tpu")
    assert refused(capsys, ASK, load) == ["REDLINE_DEVICE must be one of auto, cpu, cuda, not 'tpu'."]


@pytest.mark.parametrize(
    ("arguments", "spec"),
    [
        ([], embedded_spec()),
        (["--target", "a/big", "--quantize", "nf4"], PairSpec("custom", "a/big", None, quantize="nf4")),
        (["--pair", "qwen3-8b"], PairSpec("qwen3-8b", "Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B")),
    ],
)
def test_the_pair_asked_for_is_loaded_and_its_notes_are_said(capsys, embedded_pair, arguments, spec):
    asked = []

    def load(given, progress):
        asked.append(given)
        return replace(embedded_pair, notes=("Padding only.",))

    assert main([*ASK, "--max-new-tokens", "1", *arguments], load=load) == 0
    said = capsys.readouterr()
    assert asked == [spec]
    assert "Padding only." in said.err.splitlines() and "Padding" not in said.out


def test_a_model_that_cannot_be_loaded_is_one_sentence(capsys):
    def load(spec, progress):
        raise LoadError("Connect this computer to the internet.")

    assert refused(capsys, ASK, load)[-1] == "Connect this computer to the internet."


def test_a_prompt_that_is_too_long_is_refused_in_words(capsys, embedded_pair):
    said = refused(capsys, ["--prompt", "word " * 9000], lambda spec, progress: embedded_pair)
    assert "too long" in said[-1]


def test_turns_that_do_not_fit_are_named(run, capsys, tmp_path):
    turns = [{"role": role, "content": "word " * 4500} for role in ("user", "assistant")]
    assert run("--messages", written(tmp_path, turns), "--prompt", "Hi", "--max-new-tokens", "1") == 0
    assert "The oldest 2 messages do not fit" in capsys.readouterr().err


def test_halves_of_characters_are_cleaned(tmp_path):
    request = parse_request(["--prompt", "hi \udc80", "--stop", "a\x00"])
    assert request.messages[-1]["content"] == "hi \ufffd" and request.settings.stop == ("a\ufffd",)
