"""A thread that waits for a reply of the daemon polls before it sleeps, where that pays."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from gpulease.client.core.waits import Wait
from gpulease.client.sync import driver
from gpulease.client.transport.channel import Channel
from gpulease.protocol import Opcode
from gpulease.protocol.address import TcpAddress, UnixAddress
from gpulease.protocol.messages import Hello

HERE = UnixAddress("/nowhere")


class Waiter:
    """poll(2) of a socket at which something arrives at the so-and-so-many-th call."""

    def __init__(self, arrives_at: int) -> None:
        self.arrives_at = arrives_at
        self.timeouts: list[int] = []

    def __call__(self, timeout_ms: int) -> list[int]:
        self.timeouts.append(timeout_ms)
        return [1] if len(self.timeouts) >= self.arrives_at or timeout_ms else []


@pytest.fixture
def channel() -> Iterator[Channel]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours, HERE)


@pytest.fixture(autouse=True)
def _has_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_CONTROL_POLL_NS", 10**9)


def wait(channel: Channel, waiter: Any, timeout_s: float = 30.0) -> list[int]:
    channel.waiter = waiter
    assert driver._wait(Wait(channel, False, timeout_s))
    timeouts: list[int] = waiter.timeouts
    return timeouts


def test_a_reply_is_polled_for(channel: Channel) -> None:
    channel.link.request(Opcode.HELLO, Hello(0, "", ()))
    assert wait(channel, Waiter(5)) == [0] * 5


def test_without_a_request_in_flight_it_sleeps_at_once(channel: Channel) -> None:
    assert wait(channel, Waiter(5)) == [30_000]


def test_polling_ends_with_the_wait(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    channel.link.request(Opcode.HELLO, Hello(0, "", ()))
    assert wait(channel, Waiter(10**9), timeout_s=1e-9)[-1] == 1
    # With few cores a process never polls.
    monkeypatch.setattr(driver, "_CONTROL_POLL_NS", 0)
    assert wait(channel, Waiter(5)) == [30_000]


def test_one_thread_polls_at_a_time(channel: Channel) -> None:
    channel.link.request(Opcode.HELLO, Hello(0, "", ()))
    with driver._POLLING:
        assert wait(channel, Waiter(5)) == [30_000]
    assert wait(channel, Waiter(2)) == [0, 0]


def test_only_a_daemon_of_this_host_is_polled(channel: Channel) -> None:
    assert channel.is_polled
    assert not Channel(channel.sock, TcpAddress("localhost", 1)).is_polled
