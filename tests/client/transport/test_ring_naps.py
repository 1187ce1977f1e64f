"""When a ring's client sleeps in the middle of an operation: only if its API may, and before the reply can come."""

import socket
from collections.abc import Iterator

import pytest

from gpulease.client.transport.channel import AskOutcome, Channel
from gpulease.client.transport.ring import RingChannel
from gpulease.client.transport.spin_policy import SpinPolicy
from gpulease.daemon.session.connection import RingWire, WorkerSpinPolicy
from gpulease.protocol.address import UnixAddress

REPLY = b"re", b"pl", b"y"


@pytest.fixture
def worker() -> Iterator[tuple[RingWire, socket.socket]]:
    near, far = socket.socketpair()
    near.setblocking(False)
    wire = RingWire(far, WorkerSpinPolicy())
    yield wire, near
    wire.close()
    near.close()


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch, worker: tuple[RingWire, socket.socket]) -> list[float]:
    """Each sleep of the client; the worker replies meanwhile."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        worker[0].send(b"".join(REPLY), 0)

    monkeypatch.setattr("gpulease.client.transport.ring.time.sleep", sleep)
    return slept


@pytest.mark.parametrize(
    ("policy", "nap_ns", "outcome"),
    [
        (SpinPolicy(1, naps=True), 5_000_000, AskOutcome.ANSWERED),
        (SpinPolicy(1, naps=True), 0, AskOutcome.UNANSWERED),
        (SpinPolicy(1), 5_000_000, AskOutcome.UNANSWERED),
        # It will sleep anyway.
        (SpinPolicy(0, naps=True), 5_000_000, AskOutcome.UNANSWERED),
    ],
)
def test_it_sleeps_if_the_api_may_and_the_operation_is_long(
    worker: tuple[RingWire, socket.socket], naps: list[float], policy: SpinPolicy, nap_ns: int, outcome: AskOutcome
) -> None:
    wire, near = worker
    channel = RingChannel(Channel(near, UnixAddress("/made/up")), wire.fd, wire.layout, policy)
    assert channel.ask(b"request", REPLY, nap_ns=nap_ns) is outcome
    assert naps == ([0.005] if outcome is AskOutcome.ANSWERED else [])
    channel.close()
