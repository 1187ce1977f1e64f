"""An address at which another program listens: it is named, and nobody waits for it to time out."""

import http.server
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from gpulease.client import Disconnected
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Empty


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def greeter(stack: ExitStack, said: bytes) -> str:
    """The address of a program that speaks first, and then waits for the peer's words."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def serve() -> None:
        peer, _ = listener.accept()
        with peer:
            peer.sendall(said)
            while peer.recv(4096):
                pass

    thread = threading.Thread(target=serve)
    thread.start()
    stack.callback(thread.join)
    return "tcp:{}:{}".format(*listener.getsockname())


class _Quiet(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing."""


def test_a_server_of_http_that_waits_for_a_whole_request(stack: ExitStack) -> None:
    server = stack.enter_context(http.server.HTTPServer(("127.0.0.1", 0), _Quiet))
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    stack.callback(thread.join)
    address = f"tcp:127.0.0.1:{server.server_port}"
    with pytest.raises(Disconnected) as failure:
        ask(Opcode.GET_INVENTORY, Empty(), address)
    assert str(failure.value) == (
        f"{address}: an HTTP server answers there, not gpuleased. Is this the port of the web page? "
        "Use an address in the daemon's setting `listen`"
    )


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "an HTTP server answers there"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "an SSH server answers there"),
        (b"\x15\x03\x01\x00\x02\x02\x46", "it speaks TLS"),
    ],
)
def test_one_is_known_by_its_first_bytes(stack: ExitStack, said: bytes, named: str) -> None:
    address = greeter(stack, said)
    with pytest.raises(Disconnected, match=named):
        ask(Opcode.GET_INVENTORY, Empty(), address)
