"""Subscriptions to a lease's events, each on a connection of its own: no other reply waits behind them."""

import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from gpulease.client.engine.exchange import (
    CONNECT_LIMIT_S,
    CONTROL_REPLY_LIMIT_S,
    TimeLimit,
    ask,
    closing_on_failure,
    dial,
    disconnected,
)
from gpulease.client.engine.waits import Procedure, Wait
from gpulease.client.transport.channel import Channel
from gpulease.client.transport.link import LinkEnded
from gpulease.protocol import Notification, Opcode, Phase
from gpulease.protocol.address import Address
from gpulease.protocol.lease_ids import LeaseId
from gpulease.protocol.messages import CapabilityPresent, LeaseSubscribe

EVERY_LEASE: Final = 0
"""In place of a lease's id: all leases that the daemon lets this user see."""

WAIT_S: Final = 3600.0
"""Longest single wait for an event; there may be any number of waits."""

OnWarning = Callable[["LeaseEvent"], None]
"""Called with a WARNING event."""

_DOING: Final = "events"
_KNOWN_PHASES: Final = {int(phase): phase for phase in Phase}


@dataclass(frozen=True, slots=True)
class LeaseEvent:
    """A lease's phase, and why it is in it.

    Attributes:
        lease_id: The lease.
        phase: ACTIVE, WARNING, GRACE, TEARDOWN, ENDED; a newer daemon may send another number.
        left_s: Seconds to the next phase, at most; 0 if that is not known.
        generation: The lease's.
        cause: Why it ends or ended, a word; "" while nothing ends it.
        reason: The cause in words for people, or the reason of a warning.
        lost: Events that were dropped before this one, because they were not read.
    """

    lease_id: LeaseId
    phase: Phase | int
    left_s: float
    generation: int
    cause: str
    reason: str
    lost: int

    @property
    def phase_text(self) -> str:
        """The phase as a word."""
        return self.phase.name.lower() if isinstance(self.phase, Phase) else f"phase {self.phase}"


def event_of(told: Notification) -> LeaseEvent:
    """Read an event that the daemon sent."""
    event = told.event
    phase = _KNOWN_PHASES.get(event.phase, event.phase)
    return LeaseEvent(
        LeaseId(event.lease_id), phase, event.left_ms / 1000, event.generation, event.cause, event.reason, event.lost
    )


class EventStream:
    """A subscription to one lease, or to every lease.

    Args:
        token: A token of another tenant's lease; empty for the program's own.
    """

    def __init__(self, address: Address, lease_id: int, token: bytes = b"") -> None:
        self._address = address
        self._lease_id = lease_id
        self._token = token
        self._channel: Channel | None = None
        self._is_over = False

    def open(self) -> Procedure[None]:
        """Subscribe. Raises NotFound for a lease that is not this user's, Busy if there are too many subscriptions."""
        channel, _ = yield from dial(self._address, TimeLimit(CONNECT_LIMIT_S, "connect", self._address))
        limit = TimeLimit(CONTROL_REPLY_LIMIT_S, _DOING, self._address)
        with closing_on_failure(channel, _DOING):
            if self._token:
                yield from ask(channel, Opcode.CAPABILITY_PRESENT, CapabilityPresent(self._token), limit)
            yield from ask(channel, Opcode.LEASE_SUBSCRIBE, LeaseSubscribe(self._lease_id), limit)
        self._channel = channel

    def next(self) -> Procedure[LeaseEvent | None]:
        """The next event, None once there can be none. Raises Disconnected if the daemon goes away."""
        channel = self._channel
        if channel is None:
            return None
        while not channel.link.told and channel.link.end is None and not self._is_over:
            yield Wait(channel, False, WAIT_S)
            channel.pump()
        if channel.link.told and not self._is_over:
            event = event_of(channel.link.told.popleft())
            if event.phase == Phase.ENDED and self._lease_id != EVERY_LEASE:
                self.close()
            return event
        is_closed_here = self._is_over
        self.close()
        if is_closed_here or channel.link.end is None:
            return None
        raise disconnected(LinkEnded(channel.link.end), channel, _DOING)

    def wake(self) -> None:
        """Begin to close: whoever waits for an event stops waiting."""
        self._is_over = True
        if self._channel is not None:
            with suppress(OSError):
                self._channel.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the subscription."""
        channel, self._channel, self._is_over = self._channel, None, True
        if channel is not None:
            channel.close()


def warnings(stream: EventStream, tell: Callable[[LeaseEvent], Any]) -> Procedure[None]:
    """Call `tell` with every warning until the lease has ended. Raises what `open` and `next` raise."""
    yield from stream.open()
    try:
        while (event := (yield from stream.next())) is not None:
            if event.phase == Phase.WARNING:
                tell(event)
    finally:
        stream.close()
