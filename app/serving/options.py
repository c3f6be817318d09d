"""What was asked for at the start: flags and environment, checked before heavy imports.

Knows nothing of what the page shows, and does not try whether a port is free: that is ``app.launch``.
"""

from __future__ import annotations

import argparse
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from core.models.sources import SpecError
from core.pairs.flags import add_pair_arguments, pair_spec
from core.pairs.spec import PairSpec

DEFAULT_PORT = 7860


class LaunchError(Exception):
    """The page cannot be served as asked; the message is one sentence that says what to do."""


@dataclass(frozen=True)
class Options:
    """What was asked for. ``port_is_fixed``: it came as a flag, so no other port will do. ``pair`` None: the
    machine decides.
    """

    host: str
    port: int
    port_is_fixed: bool
    db: Path | None
    share: bool
    on_space: bool
    pair: PairSpec | None

    @property
    def personal(self) -> bool:
        """Only the person at this computer can reach the page, so the whole record is theirs."""
        return _is_loopback(self.host) and not self.share and not self.on_space

    @property
    def url_host(self) -> str:
        """The host as it stands in an address that a browser takes."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"[{host}]" if ":" in host else host


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _bare(host: str) -> str:
    """An IPv6 address without the brackets it has in a URL, in its shortest form; other hosts as they are."""
    inner = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        return str(ipaddress.IPv6Address(inner))
    except ValueError:
        return host


def _port(name: str, text: str) -> int:
    try:
        port = int(text)
    except ValueError:
        port = -1
    if not 1 <= port <= 65535:
        raise LaunchError(f"{name} must be a port number from 1 to 65535, not {text!r}.")
    return port


def parse_options(arguments: Sequence[str] | None, environment: Mapping[str, str]) -> Options:
    """Flags over environment over defaults; an empty variable counts as not set.

    Raises LaunchError for a port that is none and a pair that makes no sense. Unknown flags end the program
    as argparse does.
    """
    parser = argparse.ArgumentParser(
        prog="app.py", description="Redline: watch speculative decoding at work."
    )
    parser.add_argument("--host", help="address to listen on (default: this computer only)")
    parser.add_argument("--port", help=f"port to listen on (default: {DEFAULT_PORT}, or the next free one)")
    parser.add_argument(
        "--db", type=Path, metavar="FILE", help="database of the record (default: data/redline.db)"
    )
    parser.add_argument("--share", action="store_true", help="also open a public Gradio link")
    add_pair_arguments(parser)
    flags = parser.parse_args(arguments)
    on_space = bool(environment.get("SPACE_ID"))
    host = (flags.host or "").strip() or environment.get("GRADIO_SERVER_NAME", "").strip()
    port_variable = environment.get("GRADIO_SERVER_PORT", "").strip()
    if flags.port is not None:
        port = _port("--port", flags.port.strip())
    elif port_variable:
        port = _port("GRADIO_SERVER_PORT", port_variable)
    else:
        port = DEFAULT_PORT
    try:
        pair = pair_spec(flags, environment)
    except SpecError as error:
        raise LaunchError(str(error)) from error
    return Options(
        host=_bare(host) or ("0.0.0.0" if on_space else "127.0.0.1"),
        port=port,
        port_is_fixed=flags.port is not None,
        db=flags.db,
        share=flags.share,
        on_space=on_space,
        pair=pair,
    )
