"""Where the page is served, and with which pair: flags and environment, checked before heavy imports.

Gradio reads ``GRADIO_SERVER_PORT`` while it is imported and fails there on a senseless value, and
asks its own server through whatever proxy the environment names. So this module settles host,
port and proxy first, in plain words, and only then imports the page. It knows nothing of what the
page shows.
"""

from __future__ import annotations

import argparse
import errno
import os
import socket
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from core.models.spec import PairSpec, SpecError, add_pair_arguments, pair_spec

DEFAULT_PORT = 7860
PORTS_TO_TRY = 100
NOT_OURS = (errno.EADDRNOTAVAIL, 10049)  # the second is what Windows says
LOOPBACK = ("127.0.0.1", "localhost", "::1")


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
        return self.host in LOOPBACK and not self.share and not self.on_space


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
    host = flags.host or environment.get("GRADIO_SERVER_NAME", "").strip()
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
        host=host or ("0.0.0.0" if on_space else "127.0.0.1"),
        port=port,
        port_is_fixed=flags.port is not None,
        db=flags.db,
        share=flags.share,
        on_space=on_space,
        pair=pair,
    )


def _is_free(host: str, port: int) -> bool:
    """Whether ``host:port`` can be listened on. Raises LaunchError if the host is not ours."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        probe = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise LaunchError(f"The host {host!r} is not an address of this computer ({error}).") from None
    with probe:
        # As the server does it, so that a port whose last connections are still closing counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, os.name == "posix")
        try:
            probe.bind(address)
        except PermissionError:
            raise LaunchError(f"Port {port} needs administrator rights: choose one above 1023.") from None
        except OSError as error:
            if error.errno in NOT_OURS:
                raise LaunchError(
                    f"The host {host!r} is not an address of this computer ({error})."
                ) from None
            return False
    return True


def choose_port(options: Options) -> tuple[int, str | None]:
    """A free port and, where it is not the one asked for, a sentence that says so.

    Raises LaunchError if the port is busy and no other will do: it was given as a flag, or the
    page runs on a Space, where only the announced port can be reached.
    """
    if _is_free(options.host, options.port):
        return options.port, None
    if options.port_is_fixed or options.on_space:
        raise LaunchError(
            f"Port {options.port} is already in use: stop what uses it or choose another with --port."
        )
    last = min(options.port + PORTS_TO_TRY, 65535)
    for port in range(options.port + 1, last + 1):
        if _is_free(options.host, port):
            return port, f"Port {options.port} is already in use, so Redline listens on {port}."
    raise LaunchError(f"Ports {options.port} to {last} are all in use: choose another with --port.")


def settle_environment(environment: MutableMapping[str, str], port: int) -> None:
    """Take from Gradio what it would stumble over or send out.

    The variables hold checked values from here on; its start-up check of its own address must not
    go through a proxy; and nothing is reported to anyone.
    """
    environment["GRADIO_SERVER_PORT"] = str(port)
    environment.pop("GRADIO_SERVER_NAME", None)
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [host for host in environment.get(name, "").split(",") if host.strip()]
        environment[name] = ",".join(dict.fromkeys([*hosts, *LOOPBACK, "0.0.0.0"]))
    environment["GRADIO_ANALYTICS_ENABLED"] = "False"
    environment.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the page until interrupted. Returns the exit status: 2 if it cannot be served.

    Ends the process itself where a pair is still being loaded: Python would take the loader's thread down in
    the middle of native code, which aborts with a core dump.
    """
    try:
        options = parse_options(arguments, os.environ)
        port, sentence = choose_port(options)
    except LaunchError as error:
        print(error, file=sys.stderr)
        return 2
    if sentence:
        print(sentence, flush=True)
    settle_environment(os.environ, port)
    from app.starting import begin

    loader, status = begin(options.pair), 0
    try:
        from app.page import serve  # Gradio takes seconds to import, and reads the environment as it is now

        serve(options, port, loader)
    except OSError:
        print(f"Port {port} was taken while Redline started: choose another with --port.", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        status = 130
    if loader.state.loading:
        sys.stdout.flush()
        os._exit(status)
    return status
