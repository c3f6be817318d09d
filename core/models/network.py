"""A person's proxy settings, made readable for the HTTP client that Gradio and the hub use (httpx).

httpx reads the proxy variables of the environment whenever a client is made, and raises there on what it does
not know: a SOCKS proxy without the package socksio, a scheme of another program, exceptions in brackets or
as IPv6 networks. ``settle`` takes such values from its sight. Nothing is asked directly for that:
``refusal`` says which variable is in the way of an address, and ``of_children`` gives programs that are
started the variables as they were.

Knows variables and addresses; nothing of the hub, of pip or of a page.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import re
import urllib.request
from collections.abc import Iterable, Mapping, MutableMapping
from urllib.parse import urlsplit

UPPER, LOWER = "NO_PROXY", "no_proxy"  # urllib, httpx, requests and curl read the second first
SCHEMES = ("http", "https", "all")
_KNOWN = ("http", "https", "socks5", "socks5h")  # to httpx
_NAME = re.compile(r"[\w.*-]+(?::\d{1,5})?(?:/\d+)?", re.ASCII)  # a host, a port, the width of a network

# What was taken from the environment of this process: the variable's name and value.
_hidden: dict[str, str] = {}


def settle(environment: MutableMapping[str, str], own: Iterable[str] = ()) -> None:
    """Make the proxy variables of ``environment`` ones that httpx can read; call it as often as you like.

    Both spellings of NO_PROXY then hold every exception of either, and the addresses ``own``. What httpx
    cannot read of them stays in the upper-case one alone, which it does not read beside the other. A proxy
    that it cannot use is taken out and remembered for ``refusal`` and ``of_children``.
    """
    _name_those_of_the_system(environment)
    for scheme in SCHEMES:
        for name in (f"{scheme}_proxy", f"{scheme.upper()}_PROXY"):
            if (value := environment.get(name)) and _fault(value):
                _hidden[name] = value
                del environment[name]
    listed = [entry for name in (UPPER, LOWER) for entry in environment.get(name, "").split(",")]
    entries = list(dict.fromkeys(entry.strip() for entry in (*listed, *own) if entry.strip()))
    if "*" in entries:  # no proxy for anything: to urllib only where it stands alone
        entries = ["*"]
    if entries:
        readable = [found for entry in entries if (found := _readable(entry))]
        environment[UPPER] = ",".join(entries)
        # Second, for on Windows both are one variable.
        environment[LOWER] = ",".join(dict.fromkeys(readable))


def refusal(address: str, environment: Mapping[str, str]) -> str | None:
    """Which variable names the proxy that ``address`` needs and why it cannot be used; None if it can."""
    parts = urlsplit(address)
    exceptions = environment.get(UPPER) or environment.get(LOWER, "")
    if urllib.request.proxy_bypass_environment(parts.netloc.rpartition("@")[2], {"no": exceptions}):
        return None
    for scheme in (parts.scheme, "all"):
        names = (f"{scheme}_proxy", f"{scheme.upper()}_PROXY")
        if any(environment.get(name) for name in names):
            return None
        for name in names:
            if name in _hidden:
                return f"{name} names a proxy that cannot be used ({_fault(_hidden[name])})"
    return None


def of_children(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` with what ``settle`` took out, for a program that reads it in its own way."""
    return {**environment, **_hidden}


def _name_those_of_the_system(environment: MutableMapping[str, str]) -> None:
    """Python asks the system (Windows, macOS) for a proxy only where no variable is set; soon one is."""
    if environment is os.environ and not urllib.request.getproxies_environment():
        for scheme, value in urllib.request.getproxies().items():
            if scheme in SCHEMES:
                environment[f"{scheme}_proxy"] = value


def _fault(value: str) -> str | None:
    """Why httpx cannot use the proxy ``value``, and what to do; None if it can. Names no password."""
    value = value if "://" in value else f"http://{value}"
    try:
        parts = urlsplit(value)
        port = parts.port
    except ValueError:
        return "it is no address with a port number: correct or unset it"
    if parts.scheme not in _KNOWN:
        return f"it begins with {parts.scheme}://: write http://, https:// or socks5:// there, or unset it"
    if not parts.hostname or port == 0 or not _is_host(parts.hostname):
        return "it is no address with a port number: correct or unset it"
    if parts.scheme.startswith("socks") and importlib.util.find_spec("socksio") is None:
        return "a SOCKS proxy needs the package socksio: pip install socksio, or unset it"
    return None


def _is_host(text: str) -> bool:
    try:
        return bool(ipaddress.ip_address(text))
    except ValueError:
        return _ascii(text) is not None


def _ascii(text: str) -> str | None:
    """A host's name as it goes over the wire; None where it can be none."""
    try:
        found = text if text.isascii() else text.encode("idna").decode("ascii")
    except UnicodeError:
        return None
    return found if _NAME.fullmatch(found) else None


def _readable(entry: str) -> str | None:
    """An exception as httpx reads it; None where it has no such form."""
    address, _, width = entry.partition("/")
    if address.startswith("[") and address.endswith("]"):
        address = address[1:-1]
    try:
        host = ipaddress.IPv6Address(address)
    except ValueError:
        return _ascii(entry)
    if host.scope_id is not None or width not in ("", "128"):
        return None
    return str(host)
