"""Cases NX-02 and NX-03: a person's proxy settings are kept, and end neither the page nor a download."""

from __future__ import annotations

import importlib.util
import os
import urllib.request

import httpx
import pytest

from core.models import embedded, hub, network
from core.models.errors import LoadError
from tests.core.fake_hub import FakeHub, connected

VARIABLES = [f"{scheme}_proxy" for scheme in (*network.SCHEMES, "no")]


@pytest.fixture
def environment(monkeypatch):
    """The process's own, without proxies."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(network, "_hidden", {})
    before = dict(os.environ)
    yield os.environ
    for name in [name for name in os.environ if name.lower() in VARIABLES]:
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def no_socks(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "socksio" else find(name))


def goes_direct(address: str) -> bool:
    """What an httpx client made now does with an address, its mounts being what the environment says."""
    with httpx.Client(verify=False) as client:
        return client._transport_for_url(httpx.URL(address)) is client._transport


# --- NX-02: exceptions


@pytest.mark.parametrize("spelling", ["NO_PROXY", "no_proxy"])
def test_an_exception_in_either_spelling_holds_for_every_client(environment, spelling):
    environment.update({"HTTPS_PROXY": "http://127.0.0.1:9", spelling: "hub.corp.example, .mirror.example"})
    network.settle(environment, ["127.0.0.1", "::1"])
    for host in ("hub.corp.example", "a.mirror.example", "127.0.0.1"):
        assert urllib.request.proxy_bypass_environment(host), host
        assert goes_direct(f"https://{host}/"), host
    assert goes_direct("https://[::1]:7860/") and not goes_direct("https://elsewhere.example/")
    assert environment["HTTPS_PROXY"] == "http://127.0.0.1:9"


def test_both_spellings_are_joined_and_once_is_enough(environment):
    environment.update({"NO_PROXY": "a.example,b.example", "no_proxy": "b.example,c.example"})
    for _ in range(2):
        network.settle(environment, ["localhost"])
        assert environment["NO_PROXY"] == environment["no_proxy"] == "a.example,b.example,c.example,localhost"


def test_an_exception_for_everything_stays_one(environment):
    environment.update({"HTTP_PROXY": "http://127.0.0.1:9", "NO_PROXY": "*"})
    network.settle(environment, ["127.0.0.1"])
    assert environment["no_proxy"] == "*" and urllib.request.proxy_bypass_environment("any.example")
    assert goes_direct("http://any.example/")


def test_a_hub_that_is_excepted_is_asked_directly(environment, monkeypatch, tmp_path):
    served = FakeHub()
    served.add("own/model", {"config.json": b"{}"})
    with connected(served, monkeypatch, tmp_path / "cache") as address:
        environment.update(HTTP_PROXY="http://127.0.0.1:9", NO_PROXY="127.0.0.1")
        network.settle(environment)
        assert set(hub.look_up("own/model", None).files) == {"config.json"}, address
    assert served.requests


def test_a_proxy_of_the_system_is_not_lost_where_exceptions_are_set(environment, monkeypatch):
    """On Windows and macOS Python asks the system only where no variable is set."""
    monkeypatch.setattr(urllib.request, "getproxies", lambda: {"https": "http://proxy.example:3128"})
    network.settle(environment, ["127.0.0.1"])
    monkeypatch.undo()
    assert urllib.request.getproxies_environment()["https"] == "http://proxy.example:3128"


# --- NX-03: what httpx cannot read


ENTRIES = [
    "[::1]", "::1/128", "fe80::/10", "127.0.0.0/8", "fe80::1%eth0", "[::1]:8080", "localhost:8080",
    "bücher.example", "a b", "::", "http://x", "*.example", ".example", "[", "]:", ":80", "%", "x:99999",
    "[fe80::/10]", "é" * 70, "_srv._tcp.example", "127.0.0.1:80", "::ffff:127.0.0.1", "\\\\host", "a;b",
    "<local>", "user@host",
]  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES)
def test_no_exception_keeps_a_client_from_being_made(environment, entry):
    environment.update({"HTTPS_PROXY": "http://127.0.0.1:9", "no_proxy": f"localhost,{entry},kept.example"})
    network.settle(environment, ["127.0.0.1", "::1", "::", "0.0.0.0"])
    for address in (
        "http://127.0.0.1:7860/",
        "http://[::1]:7860/",
        "http://[::]:7860/",
        "https://kept.example/",
    ):
        assert goes_direct(address)
    assert entry in environment["NO_PROXY"].split(",")  # for programs that can read it


def test_an_address_in_brackets_and_a_network_of_one_are_that_address(environment):
    environment.update({"HTTPS_PROXY": "http://127.0.0.1:9", "no_proxy": "[2001:db8::1],2001:db8::2/128"})
    network.settle(environment)
    for host in ("2001:db8::1", "2001:db8::2"):
        assert goes_direct(f"https://[{host}]/")
    assert not goes_direct("https://[2001:db8::3]/")


UNUSABLE = {
    "socks5://127.0.0.1:1080": "needs the package socksio: pip install socksio",
    "socks5h://user:secret@127.0.0.1:1080": "needs the package socksio: pip install socksio",
    "socks://127.0.0.1:1080/": "it begins with socks://",
    "socks4://127.0.0.1:1080": "it begins with socks4://",
    "ftp://proxy.example": "it begins with ftp://",
    "http://proxy.example:port": "no address with a port number",
    "http://[::1": "no address with a port number",
    "proxy.example:99999": "no address with a port number",
    "http://": "no address with a port number",
    "http://a b:80": "no address with a port number",
}


@pytest.mark.parametrize("value", UNUSABLE)
@pytest.mark.parametrize("name", ["ALL_PROXY", "all_proxy", "HTTPS_PROXY", "http_proxy"])
def test_no_proxy_setting_keeps_a_client_from_being_made(environment, no_socks, name, value):
    environment[name] = value
    network.settle(environment, ["127.0.0.1"])
    assert goes_direct("http://127.0.0.1:7860/")
    assert name not in environment and network.of_children(environment)[name] == value
    address = "http://hub.example" if name == "http_proxy" else "https://hub.example"
    said = network.refusal(address, environment)
    assert said.startswith(f"{name} names a proxy") and UNUSABLE[value] in said and "secret" not in said


def test_a_proxy_that_works_is_left_alone(environment):
    values = {
        "HTTP_PROXY": "proxy.example:3128",
        "https_proxy": "http://user:secret@[2001:db8::1]:3128/",
        "ALL_PROXY": "https://proxy",
    }
    environment.update(values)
    network.settle(environment, ["127.0.0.1"])
    assert {name: environment[name] for name in values} == values
    assert network.refusal("https://hub.example", environment) is None
    assert not goes_direct("https://hub.example/")


def test_only_an_address_that_needs_the_proxy_is_refused(environment, no_socks):
    environment.update({"ALL_PROXY": "socks5://127.0.0.1:1080", "NO_PROXY": "hub.corp.example"})
    network.settle(environment)
    assert network.refusal("https://hub.corp.example", environment) is None
    assert network.refusal("https://hub.example", environment)
    environment["HTTPS_PROXY"] = "http://127.0.0.1:9"
    assert network.refusal("https://hub.example", environment) is None
    assert network.refusal("http://hub.example", environment)


def test_a_hub_behind_such_a_proxy_is_not_asked_past_it(environment, no_socks, monkeypatch, tmp_path):
    served = FakeHub()
    served.add("own/model", {"config.json": b"{}"})
    with connected(served, monkeypatch, tmp_path / "cache"):
        environment.pop("NO_PROXY", None)
        environment.pop("no_proxy", None)
        environment["ALL_PROXY"] = "socks5://127.0.0.1:1080"
        for _ in range(2):  # the second time it has left the environment
            with pytest.raises(LoadError, match=r"cannot be asked for own/model, for ALL_PROXY .*socksio"):
                hub.look_up("own/model", None)
    assert not served.requests


def test_pip_is_given_the_settings_as_they_were(environment, no_socks, monkeypatch, tmp_path):
    environment["ALL_PROXY"] = "socks5://127.0.0.1:1080"
    network.settle(environment)
    given = {}

    class Pip:
        def __init__(self, command, *, env, **others):
            given.update(env)
            raise OSError("far enough")

    monkeypatch.setattr(embedded.subprocess, "Popen", Pip)
    with pytest.raises(OSError, match="far enough"):
        embedded._download(tmp_path, "by hand", lambda sentence, fraction: None)
    assert given["ALL_PROXY"] == "socks5://127.0.0.1:1080"
