"""Case HF-01: ports, hosts and proxies end in a page or in one sentence, never in a traceback."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import types
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import launch
from app.launch import choose_port, settle_environment
from app.serving.options import LaunchError, parse_options

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
    monkeypatch.setattr("app.serving.starting.begin", lambda spec: types.SimpleNamespace(state=state))
    monkeypatch.setattr(launch.os, "_exit", left.append)
    monkeypatch.setattr(launch, "settle_environment", lambda environment, port, host: None)
    assert launch.main([]) == status
    assert left == ([status] if loading else [])
    assert said in capsys.readouterr().err


# --- NX-04: addresses of IPv6


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this computer has no IPv6 address")


@pytest.mark.parametrize(
    ("asked", "host", "url_host", "personal"),
    [
        ("::1", "::1", "[::1]", True),
        ("[::1]", "::1", "[::1]", True),
        ("0:0:0:0:0:0:0:1", "::1", "[::1]", True),
        ("::", "::", "[::1]", False),
        ("[::]", "::", "[::1]", False),
        ("[2001:db8::1]", "2001:db8::1", "[2001:db8::1]", False),
        ("127.0.0.2", "127.0.0.2", "127.0.0.2", True),
        ("localhost", "localhost", "localhost", True),
        ("0.0.0.0", "0.0.0.0", "127.0.0.1", False),
        ("192.168.1.5", "192.168.1.5", "192.168.1.5", False),
    ],
)
def test_every_spelling_of_a_host(asked, host, url_host, personal):
    for options in (parse_options(["--host", asked], {}), parse_options([], {"GRADIO_SERVER_NAME": asked})):
        assert (options.host, options.url_host, options.personal) == (host, url_host, personal)


@needs_ipv6
def test_a_port_of_an_ipv6_host_is_free_only_where_gradio_finds_it_free_too():
    with busy_port() as port, pytest.raises(LaunchError, match=f"Port {port} is already in use"):
        choose_port(parse_options(["--host", "::1", "--port", str(port)], {}))


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "::"])
def test_the_page_answers_at_an_ipv6_address(host):
    import gradio

    from app import page

    port = free_port()
    options = parse_options(["--host", host], {})
    with gradio.Blocks(analytics_enabled=False) as blocks:
        gradio.HTML("Redline")
    try:
        page.launch(blocks, options.host, port)
        assert b"Redline" in fetched(f"http://{options.url_host}:{port}/")
    finally:
        blocks.close()


def fetched(address: str) -> bytes:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(address, timeout=30) as answer:
        return answer.read()


@pytest.mark.proof
@needs_ipv6
@pytest.mark.parametrize(
    ("host", "variables"),
    [
        ("[::1]", {"ALL_PROXY": "socks5://127.0.0.1:1080", "no_proxy": "localhost,[::1]"}),
        ("::", {"all_proxy": "socks://127.0.0.1:1", "NO_PROXY": "localhost,127.0.0.0/8,::1/128,fe80::/10"}),
    ],
)
def test_the_page_is_served_over_ipv6_and_whatever_the_proxy_settings_say(tmp_path, host, variables):
    """Cases NX-03 and NX-04, with the program itself."""
    with busy_port() as port:
        pass
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    where = ["--host", host, "--port", str(port), "--db", str(tmp_path / "r.db")]
    process = subprocess.Popen(
        [sys.executable, "app.py", *where, "--target", str(tmp_path)],  # no model: soon told
        cwd=ROOT,
        env=environment | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = []
    try:
        for line in process.stdout:
            said.append(line)
            if line.startswith("Redline is at"):
                break
        assert said[-1:] == [f"Redline is at http://[::1]:{port}\n"], "".join(said)
        assert b"Redline" in fetched(f"http://[::1]:{port}/")
    finally:
        process.terminate()
        said += process.communicate(timeout=30)[0]
    assert "Traceback" not in "".join(said) and process.returncode == -signal.SIGTERM


@pytest.mark.parametrize("thrown", ["RuntimeError('no page')", "OSError(28, 'No space left on device')"])
def test_an_error_while_the_pair_loads_ends_in_words_and_never_in_an_abort(tmp_path, thrown):
    """Case NX-04: the guard of the loader's thread holds whatever ends the page."""
    code = f"""
import sys, threading, types
from app import launch
from app.serving import loading, starting
page = types.ModuleType("app.page")
begun = threading.Event()
def load(spec, progress):
    import torch  # native code with threads of its own
    begun.set()
    while True:
        torch.ones(300, 300) @ torch.ones(300, 300)
starting.load_engine = load
def serve(options, port, loader):
    begun.wait()
    raise {thrown}
page.serve = serve
sys.modules["app.page"] = page
sys.exit(launch.main(["--port", "{free_port()}"]))
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    if "OSError" in thrown:
        assert ended.returncode == 2 and "Traceback" not in ended.stderr
        assert "No space left on device" in ended.stderr and "was taken" not in ended.stderr
    else:
        assert ended.returncode == 1 and "RuntimeError was not expected" in ended.stderr
    assert "terminate called" not in ended.stderr


def free_port() -> int:
    with busy_port() as port:
        return port
