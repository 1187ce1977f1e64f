"""What a peer can leave undone, and for how long."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from gpulease.daemon.web import http_server as serving
from gpulease.daemon.web.http_server import MAX_HEAD_BYTES, server_of

ASK = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
LARGE = 8 << 20
SHORT_S = 0.2
GONE_S = 60.0


async def app(scope: Any, receive: Any, send: Any) -> None:
    size = LARGE if scope["path"] == "/large" else 2
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % size)]})
    for _ in range(max(1, size >> 16)):
        await send({"type": "http.response.body", "body": b"x" * min(size, 1 << 16), "more_body": True})
    await send({"type": "http.response.body", "body": b""})


Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[Connect]:
    server = server_of(app)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await server.listening.wait()
        writers = []

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            host, port = listener.getsockname()
            reader, writer = await asyncio.open_connection(host, port, limit=1 << 14)
            writers.append(writer)
            return reader, writer

        try:
            yield connect
        finally:
            for writer in writers:
                writer.transport.abort()
            server.should_exit = True
            await task


def play(scene: Callable[[Connect], Awaitable[None]]) -> None:
    async def run() -> None:
        async with served() as connect:
            await scene(connect)

    asyncio.run(run())


async def is_cut(reader: asyncio.StreamReader) -> bool:
    """Whether the connection ends in time, whatever is said before."""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(GONE_S):
            while await reader.read(1 << 16):
                pass
    return True


@pytest.mark.parametrize(
    "begin", [b"", b"GET / HT", ASK[:-2], ASK + b"GET /"], ids=["nothing", "line", "head", "second"]
)
def test_a_request_that_does_not_end(monkeypatch: pytest.MonkeyPatch, begin: bytes) -> None:
    monkeypatch.setattr(serving, "HEAD_S", SHORT_S)

    async def scene(connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(begin)
        assert await is_cut(reader)

    play(scene)


def test_a_byte_at_a_time_wins_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "HEAD_S", SHORT_S)

    async def scene(connect: Connect) -> None:
        reader, writer = await connect()

        async def trickle() -> None:
            while True:
                writer.write(b"X")
                await asyncio.sleep(SHORT_S / 10)

        task = asyncio.create_task(trickle())
        assert await is_cut(reader)
        task.cancel()

    play(scene)


def test_who_does_not_read_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "STALL_S", SHORT_S)

    async def scene(connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(ASK.replace(b"/ ", b"/large ", 1))
        await asyncio.sleep(3 * SHORT_S)
        read = 0
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(GONE_S):
                while data := await reader.read(1 << 16):
                    read += len(data)
        assert read < LARGE
        monkeypatch.undo()
        other, writer = await connect()
        writer.write(ASK.replace(b"/ ", b"/large ", 1))
        await other.readuntil(b"\r\n\r\n")
        assert len(await other.readexactly(LARGE)) == LARGE, "who reads gets it all"

    play(scene)


def test_more_connections_than_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 3)

    async def scene(connect: Connect) -> None:
        asking, writer = await connect()
        writer.write(ASK.replace(b"/ ", b"/large ", 1))
        await asking.readuntil(b"\r\n\r\n")
        kept = []
        for _ in range(2):
            reader, writer = await connect()
            writer.write(ASK)
            await reader.readuntil(b"xx")
            kept.append(reader)
        one_more, writer = await connect()
        writer.write(ASK)
        assert b"200" in await one_more.readline()
        assert await is_cut(kept[0]), "who has been idle for the longest gives way"
        assert not kept[1].at_eof()
        assert len(await asking.readexactly(LARGE)) == LARGE, "who is being answered does not"

    play(scene)


def test_who_asks_again_before_the_answer_is_answered_once() -> None:
    async def scene(connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(ASK * 100)
        answers = 0
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(GONE_S):
                while line := await reader.readline():
                    answers += line.startswith(b"HTTP/1.1 200")
        assert answers == 1

    play(scene)


def test_who_reads_nothing_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 3)

    async def scene(connect: Connect) -> None:
        asking = []
        for _ in range(3):
            reader, writer = await connect()
            writer.write(ASK.replace(b"/ ", b"/large ", 1))
            await reader.readuntil(b"\r\n\r\n")
            # Its transport reads on until its limit.
            asking.append(reader)
        for _ in range(3):
            one_more, writer = await connect()
            writer.write(ASK)
            assert b"200" in await one_more.readline()
            writer.close()
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            whole = await asking[0].readexactly(LARGE)
            raise AssertionError(f"{len(whole)} bytes")

    play(scene)


def test_a_head_without_end() -> None:
    async def scene(connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(ASK[:-2] + b"X: " + b"y" * (MAX_HEAD_BYTES * 2))
        assert b"400" in await reader.readline()
        assert await is_cut(reader)

    play(scene)
