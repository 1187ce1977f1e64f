"""Whoever logs never waits: a reader that stops costs lines, which are counted, and nothing else."""

import fcntl
import itertools
import json
import logging
import os
import pty
import resource
import select
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from gpulease.daemon.log import writer as writing
from gpulease.daemon.log.writer import FLUSH_S, JsonShape, NonblockingHandler, QueueingHandler
from helpers.waiting import wait_until

MakeHandler = Callable[[JsonShape, int], logging.Handler]
MAKERS = [QueueingHandler, NonblockingHandler, partial(NonblockingHandler, reopens=False)]
MANY = 400
"""Records of 300 bytes: more than two of the smallest pipes hold."""


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe of one page, and its reader that never waits."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(reader, False)
    yield reader, writer
    for fd in (reader, writer):
        os.close(fd)


def log(handler: logging.Handler, number: int) -> None:
    handler.handle(logging.LogRecord("test", logging.INFO, "", 0, f"record {number} {'x' * 100}", (), None))


def read_all(fd: int) -> list[str]:
    """Everything that can be read now."""
    data = b""
    while select.select([fd], [], [], 0.05)[0] and (part := os.read(fd, 1 << 16)):
        data += part
    return data.decode().splitlines()


def numbers_in(lines: list[str]) -> list[int]:
    told = map(json.loads, lines)
    return [int(record["message"].split()[1]) for record in told if record["event"] == "log.other"]


@pytest.mark.parametrize("make", MAKERS, ids=["queue", "heedless", "shut in"])
def test_a_reader_that_stops(make: MakeHandler, pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MAX_WAITING_BYTES", 8000)
    reader, writer = pipe
    handler = make(JsonShape("test"), writer)
    for number in range(MANY):
        log(handler, number)
    # Nobody has read so far, and all this time nobody has waited.
    lines: list[str] = []
    more = itertools.count(MANY)

    def goes_on() -> bool:
        log(handler, next(more))
        lines.extend(read_all(reader))
        return any(number >= MANY for number in numbers_in(lines))

    wait_until(goes_on, "it goes on once it is read")
    handler.close()
    lines += read_all(reader)
    numbers = numbers_in(lines)
    dropped = [record["count"] for record in map(json.loads, lines) if record["event"] == "log.dropped"]
    assert numbers == sorted(set(numbers))
    assert len(numbers) < MANY
    assert sum(dropped) + len(numbers) == next(more)
    assert os.get_blocking(writer)


def test_the_end_does_not_wait_for_a_reader(pipe: tuple[int, int]) -> None:
    _, writer = pipe
    handler = QueueingHandler(JsonShape("test"), writer)
    for number in range(MANY):
        log(handler, number)
    began = time.monotonic()
    handler.close()
    assert time.monotonic() - began < 10 * FLUSH_S
    read_all(pipe[0])


def test_the_thread_ends_while_its_closer_holds_the_lock(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    handler = QueueingHandler(JsonShape("test"), writer)
    log(handler, 0)
    # As `logging.shutdown` does at the end of the interpreter.
    handler.acquire()
    try:
        handler.close()
        assert not handler._thread.is_alive()
    finally:
        handler.release()
    assert numbers_in(read_all(reader)) == [0]


@pytest.mark.parametrize("make", MAKERS, ids=["queue", "heedless", "shut in"])
def test_nobody_is_there(make: MakeHandler) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    handler = make(JsonShape("test"), writer)
    for number in range(3):
        log(handler, number)
    handler.flush()
    handler.close()
    os.close(writer)


@pytest.mark.parametrize("make", MAKERS, ids=["queue", "heedless", "shut in"])
@pytest.mark.parametrize("kind", ["socket", "terminal"])
def test_other_ends(make: MakeHandler, kind: str) -> None:
    ends = [end.detach() for end in socket.socketpair()] if kind == "socket" else pty.openpty()
    reader, writer = ends
    handler = make(JsonShape("test"), writer)
    for number in range(3):
        log(handler, number)
    handler.flush()
    numbers = [int(json.loads(line)["message"].split()[1]) for line in read_all(reader)]
    handler.close()
    for end in ends:
        os.close(end)
    assert numbers == [0, 1, 2]


def test_a_socket_that_is_full_goes_on_where_it_was() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        handler = NonblockingHandler(JsonShape("test"), ours.fileno())
        lines: list[str] = []
        for number in range(MANY):
            log(handler, number)
        lines += read_all(theirs.fileno())
        log(handler, MANY)
        text = "\n".join(lines + read_all(theirs.fileno()))
        handler.close()
    told = [json.loads(line) for line in text.splitlines()]
    assert {record["event"] for record in told} == {"log.other", "log.dropped"}


FAR_OUT = 64 << 20
"""Where a file is bounded here: not one that something else writes meanwhile is as long."""


@pytest.mark.parametrize("make", MAKERS, ids=["queue", "heedless", "shut in"])
def test_a_disk_that_is_full_and_then_is_not(make: MakeHandler, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (tmp_path / "log").open("wb") as file:
        handler = make(JsonShape("test"), file.fileno())
        file.seek(FAR_OUT - 500)
        resource.setrlimit(resource.RLIMIT_FSIZE, (FAR_OUT, before[1]))
        try:
            for number in range(5):
                log(handler, number)
                handler.flush()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        for number in range(5, 7):
            log(handler, number)
            handler.flush()
        handler.close()
    lines = (tmp_path / "log").read_bytes()[FAR_OUT - 500 :].decode().splitlines()
    whole = [line for line in lines if line.endswith("}")]
    numbers = numbers_in(whole)
    (dropped,) = [record["count"] for line in whole if (record := json.loads(line))["event"] == "log.dropped"]
    assert len(lines) - len(whole) <= 1, "the piece that the disk took"
    assert {0, 5, 6} <= {*numbers}
    assert len(numbers) + dropped == 7


def test_a_record_that_can_not_be_shown_is_lost_alone(pipe: tuple[int, int]) -> None:
    handler = QueueingHandler(JsonShape("test"), pipe[1])
    handler.handle(logging.LogRecord("test", logging.INFO, "", 0, "%d", ("no number",), None))
    log(handler, 1)
    handler.close()
    assert [json.loads(line)["event"] for line in read_all(pipe[0])] == ["log.dropped", "log.other"]
