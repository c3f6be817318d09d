"""Case HF-01: ports, hosts and proxies end in a page or in one sentence, never in a traceback."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import launch
from app.launch import LaunchError, choose_port, parse_options, settle_environment

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def busy_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_defaults_are_this_computer_only():
    options = parse_options([], {})
    assert (options.host, options.port, options.personal) == ("127.0.0.1", 7860, True)


def test_flags_win_over_the_environment():
    environment = {"GRADIO_SERVER_NAME": "0.0.0.0", "GRADIO_SERVER_PORT": "7001"}
    options = parse_options(["--host", "127.0.0.1", "--port", "7002"], environment)
    assert (options.host, options.port, options.port_is_fixed) == ("127.0.0.1", 7002, True)
    options = parse_options([], environment)
    assert (options.host, options.port, options.port_is_fixed) == ("0.0.0.0", 7001, False)
    assert not options.personal  # others reach it


def test_the_pair_is_asked_for_by_flags_or_variables():
    assert parse_options([], {}).pair is None
    assert parse_options(["--target", "embedded", "--quantize", "nf4"], {}).pair.quantize == "nf4"
    assert parse_options([], {"REDLINE_PAIR": "qwen3-8b", "SPACE_ID": "a/b"}).pair.name == "qwen3-8b"
    with pytest.raises(LaunchError, match="--draft needs a target"):
        parse_options(["--draft", "a/b"], {})


def test_an_empty_variable_counts_as_not_set():
    options = parse_options([], {"GRADIO_SERVER_PORT": "", "GRADIO_SERVER_NAME": " "})
    assert (options.host, options.port) == ("127.0.0.1", 7860)


@pytest.mark.parametrize("port", ["abc", "890900", "0", "-1", "7860.5", "7861-7861"])
def test_a_senseless_port_is_named_in_one_sentence(port):
    with pytest.raises(
        LaunchError, match="GRADIO_SERVER_PORT must be a port number from 1 to 65535"
    ) as caught:
        parse_options([], {"GRADIO_SERVER_PORT": port})
    assert port in str(caught.value)
    with pytest.raises(LaunchError, match="--port must be"):
        parse_options(["--port=" + port], {})


def test_a_busy_port_gives_way_to_the_next_and_says_so():
    with busy_port() as port:
        chosen, sentence = choose_port(parse_options([], {"GRADIO_SERVER_PORT": str(port)}))
        assert chosen > port
        assert sentence == f"Port {port} is already in use, so Redline listens on {chosen}."


def test_a_busy_port_that_was_asked_for_by_flag_is_an_error():
    with busy_port() as port, pytest.raises(LaunchError, match=f"Port {port} is already in use"):
        choose_port(parse_options(["--port", str(port)], {}))


def test_on_a_space_everybody_is_served_and_no_other_port_will_do():
    with busy_port() as port:
        options = parse_options([], {"SPACE_ID": "someone/redline", "GRADIO_SERVER_PORT": str(port)})
        assert (options.host, options.personal) == ("0.0.0.0", False)
        with pytest.raises(LaunchError, match="already in use"):
            choose_port(options)


def test_a_proxy_is_never_asked_for_our_own_address():
    environment = {"HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": "example.org", "GRADIO_SERVER_NAME": "x"}
    settle_environment(environment, 7003)
    assert environment["GRADIO_SERVER_PORT"] == "7003"
    assert "GRADIO_SERVER_NAME" not in environment
    for name in ("NO_PROXY", "no_proxy"):
        assert {"127.0.0.1", "localhost"} <= set(environment[name].split(","))
    assert environment["NO_PROXY"].startswith("example.org,")


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        ([], {"GRADIO_SERVER_PORT": "abc"}, "GRADIO_SERVER_PORT must be a port number"),
        (["--port", "890900"], {}, "--port must be a port number"),
        (["--host", "192.0.2.1"], {}, "is not an address of this computer"),
        (["--pair", "nope"], {}, "There is no pair 'nope': choose one of embedded,"),
        ([], {"REDLINE_QUANTIZE": "4bit"}, "REDLINE_QUANTIZE must be one of auto,"),
    ],
)
def test_the_program_ends_with_one_sentence_and_status_2(arguments, variables, said):
    ended = subprocess.run(
        [sys.executable, "app.py", *arguments],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 2
    assert said in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "ends_with, status, said", [(OSError(), 2, "was taken"), (KeyboardInterrupt(), 130, ""), (None, 0, "")]
)
@pytest.mark.parametrize("loading", [False, True])
def test_how_serving_ends(monkeypatch, capsys, ends_with, status, said, loading):
    """Also in the middle of loading, where the process has to end without Python's own farewell."""
    page, left = types.ModuleType("app.page"), []

    def serve(options, port, loader):
        if ends_with:
            raise ends_with

    page.serve = serve
    monkeypatch.setitem(sys.modules, "app.page", page)
    state = types.SimpleNamespace(loading=loading)
    monkeypatch.setattr("app.starting.begin", lambda spec: types.SimpleNamespace(state=state))
    monkeypatch.setattr(launch.os, "_exit", left.append)
    monkeypatch.setattr(launch, "settle_environment", lambda environment, port: None)
    assert launch.main([]) == status
    assert left == ([status] if loading else [])
    assert said in capsys.readouterr().err
