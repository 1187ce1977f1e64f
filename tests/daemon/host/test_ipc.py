import os
import socket
from collections.abc import Iterator

import msgpack
import pytest

from gpulease.daemon.host.ipc import (
    MAX_FDS,
    MAX_MESSAGE_BYTES,
    ChannelClosed,
    channel_pair,
    close_all,
    receive_message,
    send_message,
)

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = channel_pair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        yield ours, theirs


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read_end, write_end = os.pipe()
    yield read_end, write_end
    for fd in (read_end, write_end):
        os.close(fd)


def is_same_file(one: int, other: int) -> bool:
    a, b = os.fstat(one), os.fstat(other)
    return (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)


def test_messages_keep_their_boundaries_and_order(pair: Pair) -> None:
    ours, theirs = pair
    for number in range(3):
        send_message(ours, {"op": "count", "number": number, "data": bytes(number)})
    for number in range(3):
        assert receive_message(theirs) == ({"op": "count", "number": number, "data": bytes(number)}, [])


def test_descriptors_arrive_as_what_they_are(pair: Pair, pipe: tuple[int, int]) -> None:
    ours, theirs = pair
    send_message(ours, {"op": "take"}, pipe)
    message, fds = receive_message(theirs)
    assert message == {"op": "take"}
    assert all(is_same_file(sent, got) for sent, got in zip(pipe, fds, strict=True))
    assert not set(pipe) & set(fds)
    assert not any(os.get_inheritable(fd) for fd in fds)
    os.write(fds[1], b"through")
    assert os.read(pipe[0], 100) == b"through"
    close_all(fds)


def test_most_descriptors(pair: Pair, pipe: tuple[int, int]) -> None:
    ours, theirs = pair
    send_message(ours, {"op": "take"}, (pipe[0],) * MAX_FDS)
    _, fds = receive_message(theirs)
    assert len(fds) == MAX_FDS
    close_all(fds)
    with pytest.raises(ValueError, match="too large"):
        send_message(ours, {"op": "take"}, (pipe[0],) * (MAX_FDS + 1))


def test_largest_message(pair: Pair) -> None:
    ours, theirs = pair
    overhead = len(msgpack.packb({"rest": bytes(1 << 16)})) - (1 << 16)
    largest = {"rest": bytes(MAX_MESSAGE_BYTES - overhead)}
    send_message(ours, largest)
    assert receive_message(theirs) == (largest, [])
    with pytest.raises(ValueError, match="too large"):
        send_message(ours, {"rest": bytes(MAX_MESSAGE_BYTES)})


def test_nothing_there_yet(pair: Pair) -> None:
    with pytest.raises(BlockingIOError):
        receive_message(pair[0])


def test_a_full_channel_does_not_wait(pair: Pair) -> None:
    def fill() -> None:
        for _ in range(10_000):
            send_message(pair[0], {"data": bytes(1 << 16)})

    with pytest.raises(BlockingIOError):
        fill()


def test_the_other_end_is_gone(pair: Pair) -> None:
    ours, theirs = pair
    send_message(theirs, {"op": "last words"})
    theirs.close()
    assert receive_message(ours) == ({"op": "last words"}, [])
    with pytest.raises(ChannelClosed, match="closed the channel"):
        receive_message(ours)
    with pytest.raises(ChannelClosed, match="gone"):
        send_message(ours, {"op": "hello?"})


MALFORMED = {
    "no msgpack": b"\xc1\xc1\xc1",
    "cut short": msgpack.packb({"op": "x", "data": bytes(100)})[:-1],
    "two messages": msgpack.packb({"op": "x"}) * 2,
    "no map": msgpack.packb([1, 2, 3]),
    "a number": b"\x05",
    "deep": b"\x91" * 5000,
    "too long": bytes(MAX_MESSAGE_BYTES + 1),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_messages_close_the_descriptors_beside_them(pair: Pair, pipe: tuple[int, int], name: str) -> None:
    ours, theirs = pair
    # The leak check of every test notices a descriptor that stays open.
    socket.send_fds(ours, [MALFORMED[name]], list(pipe))
    with pytest.raises(ChannelClosed, match="malformed"):
        receive_message(theirs)


def test_more_descriptors_than_there_is_room_for(pair: Pair, pipe: tuple[int, int]) -> None:
    ours, theirs = pair
    # The leak check of every test notices that those which got through are closed.
    socket.send_fds(ours, [msgpack.packb({"op": "take"})], [pipe[0]] * (MAX_FDS + 60))
    assert receive_message(theirs) == ({"op": "take"}, [])


def test_an_empty_datagram_with_descriptors(pair: Pair, pipe: tuple[int, int]) -> None:
    ours, theirs = pair
    socket.send_fds(ours, [b""], list(pipe))
    with pytest.raises(ChannelClosed):
        receive_message(theirs)
