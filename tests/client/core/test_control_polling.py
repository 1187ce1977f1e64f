"""A thread that waits for a reply of the daemon polls before it sleeps, where that pays."""

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gpulease.client.core import lease as lease_module
from gpulease.client.core.exchange import FixedDeadline
from gpulease.client.core.lease import LeaseHandle, ReplyCleanUp
from gpulease.client.core.waits import Procedure, Wait
from gpulease.client.sync import driver
from gpulease.client.transport.channel import Channel
from gpulease.protocol import Exclusivity, Opcode
from gpulease.protocol.address import Address, TcpAddress, UnixAddress
from gpulease.protocol.messages import Empty, LeaseGrant, LeaseRef
from gpulease.protocol.opcodes import Waiting

HERE = UnixAddress("/nowhere")
GRANT = LeaseGrant(1, 1, 1 << 20, 1000, 0, Exclusivity.SHARED, "GPU-0")


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
        made = Channel(ours, HERE)
        made.is_polled = True
        yield made


@pytest.fixture(autouse=True)
def _has_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_CONTROL_POLL_NS", 10**9)


def wait(channel: Channel, waiter: Any, timeout_s: float = 30.0) -> list[int]:
    channel.waiter = waiter
    assert driver._wait(Wait(channel, False, timeout_s))
    timeouts: list[int] = waiter.timeouts
    return timeouts


def test_a_reply_is_polled_for(channel: Channel) -> None:
    assert wait(channel, Waiter(5)) == [0] * 5
    channel.is_polled = False
    assert wait(channel, Waiter(5)) == [30_000]


def test_polling_ends_with_the_wait(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wait(channel, Waiter(10**9), timeout_s=1e-9)[-1] == 1
    # With few cores a process never polls.
    monkeypatch.setattr(driver, "_CONTROL_POLL_NS", 0)
    assert wait(channel, Waiter(5)) == [30_000]


def test_one_thread_polls_at_a_time(channel: Channel) -> None:
    class Outer(Waiter):
        def __call__(self, timeout_ms: int) -> list[int]:
            # While this one polls, another thread only sleeps.
            assert timeout_ms or wait(channel, Waiter(5)) == [30_000]
            return super().__call__(timeout_ms)

    assert wait(channel, Outer(2)) == [0, 0]
    assert wait(channel, Waiter(2)) == [0, 0]


def test_a_thread_that_was_interrupted_or_left_behind_by_a_fork_keeps_no_other_from_polling(channel: Channel) -> None:
    driver._polled_until_ns[0] = time.monotonic_ns() - 1
    assert wait(channel, Waiter(2)) == [0, 0]


@pytest.mark.parametrize(
    ("address", "waiting", "is_polled"),
    [
        (HERE, None, True),
        (HERE, Waiting.SPIN, True),
        (HERE, Waiting.BLOCK, False),
        (TcpAddress("localhost", 1), None, False),
    ],
)
def test_only_what_a_local_daemon_answers_soon_is_polled_for(
    channel: Channel, address: Address, waiting: Waiting | None, is_polled: bool
) -> None:
    lease = LeaseHandle(Channel(channel.sock, address), threading.RLock(), GRANT)
    lease.waiting = waiting
    polled: list[bool] = []

    def receive_reply(of: Channel, *_: Any) -> Procedure[Any]:
        polled.append(of.is_polled)
        return Empty()
        yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lease_module, "send", lambda *_: iter(()))
        patch.setattr(lease_module, "receive_reply", receive_reply)
        patch.setattr(lease.channel.link, "request", lambda *_, **__: (1, b""))
        deadline = FixedDeadline(1.0, "region_open", address)
        driver.drive(ReplyCleanUp(lease).ask(lease.channel, Opcode.REGION_OPEN, LeaseRef(1), deadline))
    assert polled == [is_polled]
    assert not lease.channel.is_polled
