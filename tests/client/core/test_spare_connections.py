"""Connections that are kept for later leases: alive ones are used again, all others are closed."""

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import pytest

from gpulease.client import CapacityExceeded
from gpulease.client.core import lease as lease_module
from gpulease.client.core.exchange import First, FixedDeadline
from gpulease.client.core.lease import acquire, lease_clean_up
from gpulease.client.core.spare_connections import MAX_SPARE, SpareConnections
from gpulease.client.core.waits import Procedure
from gpulease.client.sync import driver
from gpulease.client.transport.channel import Channel
from gpulease.protocol.address import Address, UnixAddress
from gpulease.protocol.messages import HelloReply, LeaseAlloc
from gpulease.protocol.opcodes import GPU_RESOURCE_TYPE

HELLO = HelloReply(0, "a daemon", 1 << 20, ())
ADDRESS = UnixAddress("/nowhere")
WAIT_MS: Final = 60_000
WAITED_MS: Final = 30


class Ends:
    """Connections, and their far ends."""

    def __init__(self) -> None:
        self.far: list[socket.socket] = []

    def channel(self) -> Channel:
        near, far = socket.socketpair()
        near.setblocking(False)
        self.far.append(far)
        return Channel(near, ADDRESS)


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    for far in made.far:
        far.close()


def is_closed(far: socket.socket) -> bool:
    far.setblocking(False)
    try:
        return far.recv(1) == b""
    except BlockingIOError:
        return False


def test_the_last_one_given_is_taken_first_and_each_once(ends: Ends) -> None:
    spare = SpareConnections()
    first, second = ends.channel(), ends.channel()
    spare.give(first, HELLO)
    spare.give(second, HELLO)
    assert [spare.take(), spare.take(), spare.take()] == [(second, HELLO), (first, HELLO), None]
    assert not any(map(is_closed, ends.far))
    first.close()
    second.close()


@pytest.mark.parametrize("came", [b"", b"bytes that nobody asked for"], ids=["end", "bytes"])
def test_a_connection_on_which_something_came_is_closed(ends: Ends, came: bytes) -> None:
    spare = SpareConnections()
    spare.give(ends.channel(), HELLO)
    if came:
        ends.far[0].sendall(came)
    else:
        ends.far[0].close()
    assert spare.take() is None
    assert not came or is_closed(ends.far[0])


def test_one_too_many_and_all_that_are_dropped_are_closed(ends: Ends) -> None:
    spare = SpareConnections()
    for _ in range(MAX_SPARE + 1):
        spare.give(ends.channel(), HELLO)
    assert [is_closed(far) for far in ends.far] == [False] * MAX_SPARE + [True]
    del spare
    assert all(map(is_closed, ends.far))


def test_a_channel_that_parted_is_closed_and_its_connection_is_not(ends: Ends) -> None:
    old = ends.channel()
    assert old.can_detach
    new = old.detach()
    old.close()
    old.pump()
    assert not old.can_detach
    assert old.link.end is not None
    assert new.can_detach
    ends.far[0].sendall(b"x")
    assert new.pump()
    assert not is_closed(ends.far[0])
    new.close()


def test_a_child_leaves_them_to_its_parent(ends: Ends) -> None:
    spare = SpareConnections()
    channel = ends.channel()
    spare.give(channel, HELLO)
    spare.disown()
    assert spare.take() is None
    assert not is_closed(ends.far[0])
    channel.close()


def test_a_request_that_waited_on_one_that_ends_waits_no_longer_than_it_may(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    spare, channel = SpareConnections(), ends.channel()
    # As after HELLO.
    monkeypatch.setattr(channel.link, "request", lambda *_, **__: (1, b"a request"))
    spare.give(channel, HELLO)
    waits_ms: list[int] = []

    def dial(address: Address, deadline: FixedDeadline, first: First) -> Procedure[Any]:
        assert isinstance(first.body, LeaseAlloc)
        waits_ms.append(first.body.wait_ms)
        raise CapacityExceeded("no room")
        yield

    def queue_and_end() -> None:
        ends.far[0].recv(1 << 16)
        time.sleep(WAITED_MS / 1000)
        ends.far[0].close()

    monkeypatch.setattr(lease_module, "dial_for", dial)
    daemon = threading.Thread(target=queue_and_end, daemon=True)
    daemon.start()
    wanted = LeaseAlloc(GPU_RESOURCE_TYPE, 1 << 20, 60_000, WAIT_MS, None, ())
    with pytest.raises(CapacityExceeded):
        driver.drive(acquire(ADDRESS, wanted, threading.RLock(), lease_clean_up(), spare))
    daemon.join()
    assert len(waits_ms) == 1
    assert 0 <= waits_ms[0] <= WAIT_MS - WAITED_MS
