from __future__ import annotations

import socket
import urllib.request

import pytest


def test_outside_connections_and_look_ups_are_refused_and_counted(outside_attempts):
    with pytest.raises(OSError, match="closed in tests"):
        socket.create_connection(("192.0.2.1", 80), timeout=1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagram:
        with pytest.raises(OSError, match="closed in tests"):
            datagram.sendto(b"x", ("192.0.2.2", 53))
    with pytest.raises(OSError, match="closed in tests"):
        urllib.request.urlopen("http://models.example/weights")
    assert outside_attempts == ["192.0.2.1", "192.0.2.2", "models.example"]
    outside_attempts.clear()


def test_this_machine_can_be_reached():
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(("localhost", server.getsockname()[1])) as client:
            assert client.getpeername() == server.getsockname()
