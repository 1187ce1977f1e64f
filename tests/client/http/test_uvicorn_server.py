"""Addresses at which a server listens, sockets that it replaces, and connections that it closes."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gpulease.client import InvalidRequest
from gpulease.client.http import unix_path, uvicorn_server
from gpulease.client.http.application import problem_response
from gpulease.client.http.problems import Problem
from gpulease.client.http.uvicorn_server import (
    HEAD_LIMIT_S,
    KEEP_ALIVE_S,
    LINGER_S,
    known_hosts,
    listening,
    serve_within,
)
from helpers.virtual_time import VirtualTimeLoop
from helpers.waiting import wait_until


@pytest.fixture
def path() -> Iterator[Path]:
    # Not pytest's tmp_path: a Unix socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="gpul-", dir="/tmp") as folder:
        yield Path(folder) / "s"


@pytest.mark.parametrize(
    "address", ["tcp:0.0.0.0:0", "tcp:10.1.2.3:80", "tcp:example.org:80", "tcp:[::]:0", "tls:127.0.0.1:1", "8080"]
)
def test_only_where_this_host_alone_can_connect(address: str) -> None:
    with pytest.raises(InvalidRequest), listening(address):
        pass


def test_its_url() -> None:
    with listening("tcp:127.0.0.1:0") as (sock, url):
        assert url == f"http://127.0.0.1:{sock.getsockname()[1]}"


def test_a_socket_that_was_left_is_taken_and_one_in_use_is_not(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with listening(f"unix:{path}") as (_, url):
        assert url == f"http+unix://{path}"
        with pytest.raises(InvalidRequest, match="in use"), listening(f"unix:{path}"):
            pass
        assert path.exists()
    assert not path.exists()


def test_what_is_no_socket_stays(path: Path) -> None:
    path.write_text("mine")
    with pytest.raises(InvalidRequest), listening(f"unix:{path}"):
        pass
    assert path.read_text() == "mine"


@pytest.fixture
def _own_signals() -> Iterator[None]:
    """A server has its process to itself, and leaves its handlers of signals."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_an_end_leaves_another_one_s_socket(path: Path) -> None:
    other = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen();"
        "print('listens', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", other, str(path)]
    with contextlib.ExitStack() as stack:
        with listening(f"unix:{path}"):
            path.unlink()
            process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            assert process.stdout is not None
            assert process.stdout.readline() == b"listens\n"
        assert path.exists()


SERVING = """
import contextlib, signal, sys
from starlette.applications import Starlette
from gpulease.client.http.uvicorn_server import known_hosts, listening, serve

if sys.argv[1] == "nohup":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

@contextlib.asynccontextmanager
async def lifespan(_):
    yield
    print("leases are freed", flush=True)

with listening("tcp:127.0.0.1:0") as (sock, url):
    print(url, flush=True)
    serve(Starlette(lifespan=lifespan), sock, hosts=known_hosts(sock, ()), stop_s=5)
"""


@pytest.mark.parametrize(
    ("how", "ends"),
    [("plain", [signal.SIGTERM]), ("plain", [signal.SIGHUP]), ("nohup", [signal.SIGHUP, signal.SIGTERM])],
    ids=["SIGTERM", "a closed terminal", "a closed terminal under nohup"],
)
def test_a_server_ends_in_order_when_its_terminal_is_closed(how: str, ends: list[signal.Signals]) -> None:
    command = [sys.executable, "-c", SERVING, how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().rpartition(":")[2])
        # Each reply comes after uvicorn has installed its handlers of signals.
        for end in ends:
            with socket.create_connection(("127.0.0.1", port)) as peer:
                peer.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                assert peer.recv(64).startswith(b"HTTP/1.1 404")
            process.send_signal(end)
        assert process.communicate(timeout=60)[0] == "leases are freed\n"
    assert process.returncode == 0


@pytest.mark.usefixtures("_own_signals")
def test_a_socket_that_was_removed_is_made_anew(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(unix_path, "CHECK_INTERVAL_S", 0.01)

    async def body() -> None:
        async def answer(_: Request) -> Response:
            return Response("here")

        servers: list[uvicorn.Server] = []
        with listening(f"unix:{path}") as (sock, _):
            app = Starlette(routes=[Route("/", answer)])
            serving = asyncio.create_task(
                serve_within(app, sock, hosts=known_hosts(sock, ()), stop_s=5, began=servers.append)
            )
            for _ in range(2):
                os.unlink(path)
                await asyncio.to_thread(wait_until, path.exists, "the socket was created again")
                reader, writer = await asyncio.open_unix_connection(path)
                writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                assert (await reader.read()).endswith(b"here")
                writer.close()
            servers[0].should_exit = True
            await serving

    asyncio.run(body())
    assert not path.exists()
    assert [message for message in caplog.messages if "created again" in message] == [
        f"the socket's file {path} was removed: the socket was created again"
    ] * 2


@pytest.mark.usefixtures("_own_signals")
@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nG"],
    ids=["nothing", "a part", "a second's part"],
)
def test_a_connection_whose_next_request_does_not_come_is_closed(
    sent: bytes, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Before uvicorn's own limit, which closes idle connections.
    monkeypatch.setattr(uvicorn_server, "HEAD_LIMIT_S", KEEP_ALIVE_S / 2)
    assert _read_to_the_end(path, sent).count(b"late") == sent.count(b"\r\n\r\n")


HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
BROKEN = {
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b""),
    "HTTP/0.9": (b"GET /\r\n\r\n", b""),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b""),
    "two lengths": (HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", b""),
    "a length and chunks": (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b""),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", b""),
    "a host that is none": (b"GET //x HTTP/1.1\r\nHost: [::z\r\n\r\n", b""),
    "a NUL": (HEAD + b"X: a\x00b\r\n\r\n", b""),
    "a chunk without a size": (CHUNKED + b"zz\r\nabc", b""),
    "a chunk without a size, in the answer": (CHUNKED, b"zz\r\nabc\r\n"),
    "a trailer": (CHUNKED + b"3\r\nabc\r\n0\r\n\x00bad\r\n\r\n", b""),
    "behind a request": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n\x00\r\n\r\n", b""),
    "behind a request, in the answer": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x00\r\n\r\n"),
    "a body that ends too soon": (HEAD + b"Content-Length: 9\r\n\r\nabc", None),
}
"""What is not HTTP: what is sent, and what behind the answer's begin; None: the end of the connection."""


@pytest.mark.usefixtures("_own_signals")
@pytest.mark.parametrize("reads", [False, True], ids=["streams", "reads"])
@pytest.mark.parametrize("name", BROKEN)
def test_what_is_not_http_ends_its_connection_and_leaves_no_line_in_the_log(
    name: str, reads: bool, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sent, later = BROKEN[name]

    async def answer(request: Request) -> Response:
        if reads:
            await request.body()

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(4):
                yield b"part"
                await asyncio.sleep(0.01)

        return StreamingResponse(parts())

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        if later is None:
            writer.write_eof()
        elif later:
            if not reads:
                await reader.readuntil(b"part")
            writer.write(later)
        await reader.read()

    app = Starlette(routes=[Route("/", answer, methods=["GET", "POST"])])
    # At a path, where a host may have any name.
    asyncio.run(_talk_to(app, talk, f"unix:{path}"))
    assert caplog.records == []


@pytest.mark.usefixtures("_own_signals")
def test_an_answer_takes_longer_than_a_request_s_head_may(path: Path) -> None:
    asked = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert _read_to_the_end(path, asked * 2, answer_s=10 * HEAD_LIMIT_S).count(b"late") == 2


def _read_to_the_end(path: Path, sent: bytes, answer_s: float = 0.0) -> bytes:
    """What a server sends until it closes the connection.

    The clock goes on only while nobody has anything to do, so no limit passes while a slow host serves; what is written
    to a Unix socket can be read at once.
    """

    async def answer(_: Request) -> Response:
        await asyncio.sleep(answer_s)
        return Response("late")

    got = b""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal got
        writer.write(sent)
        got = await reader.read()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(_talk_to(Starlette(routes=[Route("/", answer)]), talk, f"unix:{path}"))
    return got


async def _refuse_unread(_: Request) -> Response:
    return problem_response(Problem(413, "too_large", "It is too large."), is_body_unread=True)


REFUSING = Starlette(routes=[Route("/", _refuse_unread, methods=["POST"])])


@pytest.mark.usefixtures("_own_signals")
@pytest.mark.parametrize("is_http", [True, False])
def test_a_reply_arrives_although_its_request_was_not_read(is_http: bool, path: Path) -> None:
    """Most clients send their whole body before they read."""
    got = b""
    declared = b"Content-Length: %d\r\n\r\n" % (8 << 20) if is_http else b""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal got
        writer.write(HEAD + declared + bytes(8 << 20))
        await writer.drain()
        got = await reader.read()

    asyncio.run(_talk_to(REFUSING, talk, f"unix:{path}"))
    assert got.startswith(b"HTTP/1.1 413 " if is_http else b"HTTP/1.1 400 ")


@pytest.mark.usefixtures("_own_signals")
@pytest.mark.parametrize("most", [512, 1])
def test_a_peer_whose_request_is_not_read_is_dropped_after_a_while(
    most: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # At the limit of connections, the descriptor is needed at once.
    monkeypatch.setattr(uvicorn_server, "MAX_CONNECTIONS", most)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def send(mebibytes: int) -> None:
            for _ in range(mebibytes):
                writer.write(bytes(1 << 20))
                await writer.drain()

        writer.write(HEAD + b"Content-Length: 100000000\r\n\r\n")
        assert await reader.read()
        if most > 1:
            await send(1)
            await asyncio.sleep(LINGER_S + 1)
        with pytest.raises(ConnectionError):
            await send(8)
        writer.transport.abort()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(_talk_to(REFUSING, talk, f"unix:{path}"))


@pytest.mark.usefixtures("_own_signals")
def test_a_peer_that_resets_the_connection_before_the_end_of_the_reply_leaves_no_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Resets:
        """An application whose peer resets the connection before the end of the reply."""

        def __init__(self) -> None:
            self.peer, self.is_over = socket.socket(), asyncio.Event()

        async def __call__(self, _: Scope, __: Receive, send: Send) -> None:
            headers = [(b"connection", b"close"), (b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 413, "headers": headers})
            # With these two options, a close resets the connection.
            self.peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.peer.close()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            self.is_over.set()

    async def main() -> None:
        servers, resets = list[uvicorn.Server](), Resets()
        app = Starlette(routes=[Route("/", resets, methods=["POST"])])
        with listening("tcp:127.0.0.1:0") as (sock, _):
            hosts = known_hosts(sock, ())
            serving = asyncio.create_task(serve_within(app, sock, hosts=hosts, stop_s=5, began=servers.append))
            resets.peer.connect(sock.getsockname())
            resets.peer.sendall(HEAD + b"Content-Length: 9\r\n\r\n")
            async with asyncio.timeout(60):
                await resets.is_over.wait()
            servers[0].should_exit = True
            await serving

    asyncio.run(main())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.usefixtures("_own_signals")
def test_a_request_over_one_connection_too_many_is_refused_as_a_problem(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uvicorn_server, "MAX_CONNECTIONS", 1)
    head, _, body = _read_to_the_end(path, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"\r\nretry-after: 1\r\n" in head.lower()
    assert json.loads(body)["code"] == "too_many_connections"


async def _talk_to(
    app: Starlette, talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], address: str
) -> None:
    """Serve an application for one connection."""
    servers: list[uvicorn.Server] = []
    with listening(address) as (sock, _):
        serving = asyncio.create_task(
            serve_within(app, sock, hosts=known_hosts(sock, ()), stop_s=5, began=servers.append)
        )
        if sock.family == socket.AF_UNIX:
            reader, writer = await asyncio.open_unix_connection(sock.getsockname())
        else:
            reader, writer = await asyncio.open_connection(*sock.getsockname())
        await talk(reader, writer)
        writer.close()
        servers[0].should_exit = True
        await serving
