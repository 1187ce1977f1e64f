"""Subscriptions to a lease's events, each on its own connection, so that they delay no reply."""

import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

from gpulease.client.core.exchange import (
    CONNECT_LIMIT_S,
    CONTROL_REPLY_LIMIT_S,
    FixedDeadline,
    ask,
    dial,
    disconnected,
)
from gpulease.client.core.waits import Procedure, Wait
from gpulease.client.transport.channel import Channel
from gpulease.client.transport.link import LinkEnded
from gpulease.protocol import Notification, Opcode, Phase, RegionNotification, Status
from gpulease.protocol.address import Address
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.lease_ids import LeaseId
from gpulease.protocol.messages import CapabilityPresent, LeaseRef, LeaseSubscribe

EVERY_LEASE: Final = 0
"""A lease id that stands for all leases that the daemon shows this user."""

WAIT_S: Final = 3600.0
"""Longest single wait for an event, in seconds; any number of waits may follow."""

E = TypeVar("E")

OnWarning = Callable[["LeaseEvent"], None]
"""Receives a WARNING event."""

_DOING: Final = "events"
_KNOWN_PHASES: Final = {int(phase): phase for phase in Phase}
_KNOWN_STATUSES: Final = {int(status): status for status in Status}


@dataclass(frozen=True, slots=True)
class LeaseEvent:
    """A lease's phase, and the reason for it.

    Attributes:
        lease_id: The lease.
        phase: ACTIVE, WARNING, GRACE, TEARDOWN, ENDED; a newer daemon may send another number.
        left_s: Upper bound of the seconds until the next phase; 0 if it is not known.
        generation: The lease's generation, which each renewal increments.
        cause: Why it has ended or is ending, as one word; "" before that.
        reason: The cause as a sentence, or the reason for a warning.
        lost: Number of events that were dropped before this one because they were not read.
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
        """The phase as a word, or "phase N" for a number that this client does not support."""
        return self.phase.name.lower() if isinstance(self.phase, Phase) else f"phase {self.phase}"


@dataclass(frozen=True, slots=True)
class ForwardRevoked:
    """A notice that a launch was refused because a region that it named had ended or was cancelled.

    Attributes:
        lease_id: The region.
        status: How the region ended; FENCED for every refusal except the first. A newer daemon may send another number.
        kernel: The kernel; "" for a graph of several.
        site: The launch's index in its burst or graph, from 0.
        position: The position that the launch passed.
        flipped_ns: When the daemon ended or cancelled the region, on its host's monotonic clock.
        seen_ns: When the session noticed that, on the same clock.
        lost: Number of events that were dropped before this one because they were not read.
    """

    lease_id: LeaseId
    status: Status | int
    kernel: str
    site: int
    position: int
    flipped_ns: int
    seen_ns: int
    lost: int


def event_of(notification: Notification) -> LeaseEvent:
    """Convert a notification of a lease's phase."""
    # A newer daemon may send a phase that this client does not support; pass it on as a number.
    event = notification.event
    phase = _KNOWN_PHASES.get(event.phase, event.phase)
    return LeaseEvent(
        LeaseId(event.lease_id), phase, event.left_ms / 1000, event.generation, event.cause, event.reason, event.lost
    )


def refusal_of(notification: RegionNotification) -> ForwardRevoked:
    """Convert a notification of a refused launch."""
    event = notification.event
    return ForwardRevoked(
        LeaseId(event.lease_id),
        _KNOWN_STATUSES.get(event.status, event.status),
        event.kernel,
        event.site,
        event.position,
        event.flipped_ns,
        event.seen_ns,
        event.lost,
    )


class Subscription(Generic[E]):
    """A subscription on its own connection.

    Args:
        address: The daemon's address.
        op: The request that subscribes.
        body: The request's body, which names the lease.
        token: A token of another tenant's lease; empty for the program's own.
    """

    def __init__(self, address: Address, op: Opcode, body: LeaseSubscribe | LeaseRef, token: bytes) -> None:
        self._address = address
        self._op = op
        self._body = body
        self._token = token
        self._channel: Channel | None = None
        self._is_closed = False

    def open(self) -> Procedure[None]:
        """Subscribe. Raises NotFound for a lease that is not this user's, Busy if there are too many subscriptions."""
        channel: Channel | None = None
        try:
            channel, _ = yield from dial(self._address, FixedDeadline(CONNECT_LIMIT_S, "connect", self._address))
            deadline = FixedDeadline(CONTROL_REPLY_LIMIT_S, _DOING, self._address)
            # Step 1: for another tenant's lease, present the token on this connection. Step 2: subscribe.
            if self._token:
                yield from ask(channel, Opcode.CAPABILITY_PRESENT, CapabilityPresent(self._token), deadline)
            yield from ask(channel, self._op, self._body, deadline)
            self._channel = channel
        except LinkEnded as ended:
            assert channel is not None
            raise disconnected(ended, channel, _DOING) from None
        finally:
            # If the call was interrupted or refused, nothing else refers to this connection, so close it.
            if channel is not None and self._channel is not channel:
                channel.close()

    def next(self) -> Procedure[E | None]:
        """Return the next event; None if there can be no more. Raises Disconnected if the connection is lost."""
        channel = self._channel
        if channel is None:
            return None
        # If events arrived together with an earlier one, no wait is needed.
        while not channel.link.notifications and channel.link.end is None and not self._is_closed:
            yield Wait(channel, False, WAIT_S)
            channel.pump()
        if channel.link.notifications and not self._is_closed:
            event = self._read(channel.link.notifications.popleft())
            if self._is_last(event):
                # The lease has ended, so no further event can come; the program's loop ends on its own.
                self.close()
            return event
        # There is no event: either this side has closed the subscription, or the connection has ended.
        is_closed_here = self._is_closed
        self.close()
        if is_closed_here or channel.link.end is None:
            return None
        raise disconnected(LinkEnded(channel.link.end), channel, _DOING)

    def _read(self, notification: Notification | RegionNotification) -> E:
        raise NotImplementedError

    def _is_last(self, event: E) -> bool:
        return False

    def wake(self) -> None:
        """Begin to close: make a thread or task that waits for an event stop waiting."""
        self._is_closed = True
        if self._channel is not None:
            # Shut the socket down, which wakes a thread that polls it. A close would not wake it.
            with suppress(OSError):
                self._channel.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the subscription by closing its connection."""
        # Forget the channel first, so that a second call finds nothing to close.
        channel, self._channel, self._is_closed = self._channel, None, True
        if channel is not None:
            channel.close()


class EventStream(Subscription[LeaseEvent]):
    """A subscription to the phases of one lease, or of every lease (EVERY_LEASE)."""

    def __init__(self, address: Address, lease_id: int, token: bytes = b"") -> None:
        super().__init__(address, Opcode.LEASE_SUBSCRIBE, LeaseSubscribe(lease_id), token)

    def _read(self, notification: Notification | RegionNotification) -> LeaseEvent:
        assert isinstance(notification, Notification), "the connection must distinguish a subscription from a watch"
        return event_of(notification)

    def _is_last(self, event: LeaseEvent) -> bool:
        # A subscription to all leases continues after the end of one.
        return event.phase == Phase.ENDED and self._body.lease_id != EVERY_LEASE


class RefusalStream(Subscription[ForwardRevoked]):
    """A subscription to launches refused because of a region, or of any region of a lease. Ends only when closed."""

    def __init__(self, address: Address, lease_id: int, token: bytes = b"") -> None:
        super().__init__(address, Opcode.REGION_WATCH, LeaseRef(lease_id), token)

    def _read(self, notification: Notification | RegionNotification) -> ForwardRevoked:
        assert isinstance(notification, RegionNotification), (
            "the connection must distinguish a watch from a subscription"
        )
        return refusal_of(notification)


def warnings(stream: EventStream, on_warning: Callable[[LeaseEvent], Any]) -> Procedure[None]:
    """Call `on_warning` with every warning until the lease has ended. Raises the errors of `open` and `next`."""
    yield from stream.open()
    try:
        # Skip all phases but warnings, until the stream ends.
        while (event := (yield from stream.next())) is not None:
            if event.phase == Phase.WARNING:
                on_warning(event)
    finally:
        stream.close()
