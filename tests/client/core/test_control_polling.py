"""A thread that waits for a reply of the daemon polls before it sleeps, where that pays."""

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gpulease.client.core import attachment as attachment_module
from gpulease.client.core import lease as lease_module
from gpulease.client.core.exchange import First, FixedDeadline
from gpulease.client.core.lease import LeaseHandle, ReplyCleanUp, acquire, lease_clean_up
from gpulease.client.core.session import SessionCore
from gpulease.client.core.waits import Procedure, Wait
from gpulease.client.errors import Disconnected
from gpulease.client.sync import driver
from gpulease.client.transport.channel import Channel
from gpulease.protocol import Exclusivity, Opcode
from gpulease.protocol.address import Address, TcpAddress, UnixAddress
from gpulease.protocol.lease_options import WAITING
from gpulease.protocol.messages import Empty, HelloReply, LeaseAlloc, LeaseGrant, LeaseRef
from gpulease.protocol.opcodes import GPU_RESOURCE_TYPE, Waiting

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


waits = pytest.mark.parametrize(
    ("address", "waiting", "is_polled"),
    [
        (HERE, None, True),
        (HERE, Waiting.SPIN, True),
        (HERE, Waiting.BLOCK, False),
        (TcpAddress("localhost", 1), None, False),
    ],
)


@waits
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


@waits
def test_a_lease_is_polled_for_and_its_later_replies_are_not(
    channel: Channel, monkeypatch: pytest.MonkeyPatch, address: Address, waiting: Waiting | None, is_polled: bool
) -> None:
    made = Channel(channel.sock, address)
    polled: list[bool] = []

    def dial_for(_address: Address, _deadline: object, first: First) -> Procedure[tuple[Channel, HelloReply, int]]:
        made.is_polled = first.is_polled
        return made, HelloReply(0, "", 0, ()), 1
        yield

    def receive(of: Channel, *_: Any, **__: Any) -> Procedure[Any]:
        polled.append(of.is_polled)
        return GRANT
        yield

    monkeypatch.setattr(lease_module, "dial_for", dial_for)
    monkeypatch.setattr(lease_module, "receive_from_living", receive)
    parameters = () if waiting is None else (WAITING.parameter(waiting),)
    request = LeaseAlloc(GPU_RESOURCE_TYPE, 1 << 20, 1000, 0, None, parameters)
    lease = driver.drive(acquire(address, request, threading.RLock(), lease_clean_up()))
    assert polled == [is_polled]
    assert not lease.channel.is_polled
    # So is the session, whose connection is another one.
    first: list[First] = []

    def dial_in_vain(_address: Address, _deadline: object, request: First) -> Procedure[Any]:
        first.append(request)
        raise Disconnected("nobody is there", "")
        yield

    monkeypatch.setattr(attachment_module, "dial_for", dial_in_vain)
    session = SessionCore(lease, threading.RLock(), grant=None, shared_memory=False, spin_ns=0)
    with pytest.raises(Disconnected):
        driver.drive(session.attach())
    assert [request.is_polled for request in first] == [is_polled]
