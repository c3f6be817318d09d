"""Where the page is served, settled before heavy imports.

Gradio reads ``GRADIO_SERVER_PORT`` while it is imported and fails there on a senseless value, and
asks its own server through whatever proxy the environment names. So this module settles host,
port and proxy first, in plain words, and only then imports the page. It knows nothing of what the
page shows.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import traceback
from collections.abc import MutableMapping, Sequence
from typing import TYPE_CHECKING

from app.serving.options import LaunchError, Options, parse_options
from core.models import network

if TYPE_CHECKING:
    from app.serving.loading import Loader

PORTS_TO_TRY = 100
NOT_OURS = (errno.EADDRNOTAVAIL, 10049)  # the second is what Windows says
LOOPBACK = ("127.0.0.1", "localhost", "::1")
EVERYWHERE = ("0.0.0.0", "::")  # addresses that stand for all of this computer's


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


def _both_free(host: str, port: int) -> bool:
    """Whether the page can have ``port``: Gradio tries it on 127.0.0.1 first, whatever the host."""
    return _is_free(host, port) and _is_free("127.0.0.1", port)


def choose_port(options: Options) -> tuple[int, str | None]:
    """A free port and, where it is not the one asked for, a sentence that says so.

    Raises LaunchError if the port is busy and no other will do: it was given as a flag, or the
    page runs on a Space, where only the announced port can be reached.
    """
    if _both_free(options.host, options.port):
        return options.port, None
    if options.port_is_fixed or options.on_space:
        raise LaunchError(
            f"Port {options.port} is already in use: stop what uses it or choose another with --port."
        )
    last = min(options.port + PORTS_TO_TRY, 65535)
    for port in range(options.port + 1, last + 1):
        if _both_free(options.host, port):
            return port, f"Port {options.port} is already in use, so Redline listens on {port}."
    raise LaunchError(f"Ports {options.port} to {last} are all in use: choose another with --port.")


def settle_environment(environment: MutableMapping[str, str], port: int, host: str = "127.0.0.1") -> None:
    """Take from Gradio what it would stumble over or send out.

    The variables hold checked values from here on; its start-up check of its own address, ``host``, must not
    go through a proxy, nor end on settings that are for others (``core.models.network``); and nothing is
    reported to anyone.
    """
    environment["GRADIO_SERVER_PORT"] = str(port)
    environment.pop("GRADIO_SERVER_NAME", None)
    network.settle(environment, dict.fromkeys((*LOOPBACK, *EVERYWHERE, host)))
    environment["GRADIO_ANALYTICS_ENABLED"] = "False"
    environment.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the page until interrupted. Returns the exit status: 2 if it cannot be served, 1 where something
    failed that nobody thought of.

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
    settle_environment(os.environ, port, options.host)
    from app.serving.starting import begin

    loader = begin(options.pair)
    status = _serve(options, port, loader)
    if loader.state.loading:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _serve(options: Options, port: int, loader: Loader) -> int:
    """Serve the page; returns the exit status, whatever ended it."""
    try:
        from app.page import serve  # Gradio takes seconds to import, and reads the environment as it is now

        serve(options, port, loader)
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.errno is None:  # Gradio's own, of a port
            reason = f"Port {port} was taken while Redline started: choose another with --port."
        else:
            reason = f"The page cannot be served ({error}): put that right and start Redline again."
        print(reason, file=sys.stderr)
        return 2
    except Exception as error:
        traceback.print_exc()
        print(
            f"Redline ended, for {type(error).__name__} was not expected: please report the lines above.",
            file=sys.stderr,
        )
        return 1
    return 0
