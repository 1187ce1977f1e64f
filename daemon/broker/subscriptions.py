"""Publishes the phases of leases to subscribers, without waiting for any of them.

The lease table says where a lease stands. The publisher notices when to ask, and remembers what it published last. A
slow reader loses old events, never the latest, and learns how many it lost, so unread events take no memory.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from gpulease.daemon.broker.refusal import Refusal
from gpulease.daemon.leases import (
    Effect,
    KillWorker,
    LeaseEnded,
    LeaseSnapshot,
    LeaseTable,
    ProveReclaimed,
    RefuseWork,
    SetDeadline,
    Standing,
    Warned,
)
from gpulease.protocol.failures import Failure
from gpulease.protocol.limits import MAX_SUBSCRIPTIONS, MAX_TEXT_BYTES
from gpulease.protocol.messages import LeaseEvent
from gpulease.protocol.opcodes import Phase, Status

EVERY_LEASE: Final = 0
"""The lease id of a subscription to every lease that the peer may see."""

FLUSH_S: Final = 0.2
"""Between two tries to write a slow reader's latest event."""

NS_PER_S: Final = 1_000_000_000
MAX_LEFT_MS: Final = 2**32 - 1

Key = tuple[Phase, str, int | None]


class Write(Protocol):
    """Writes an event to a subscriber's connection."""

    def __call__(self, subscription: int, event: LeaseEvent) -> bool:
        """Write an event, and return whether there was room for it."""


@dataclass(slots=True, eq=False)
class Subscription:
    """A peer's subscription to one lease, or to all that it may see.

    Attributes:
        number: The number of the request that made it.
        lease_id: The lease, or EVERY_LEASE.
        tenant: The peer's tenant.
        may_see: Returns whether the peer may see a lease now.
        write: Writes an event to the peer's connection.
        sequence: The number of the last event, 1 for the first.
        lost: How many events before `latest` were dropped.
        latest: An event that found no room; None if there is none.
    """

    number: int
    lease_id: int
    tenant: str
    may_see: Callable[[int], bool]
    write: Write
    sequence: int = 0
    lost: int = 0
    latest: LeaseEvent | None = None

    def send(self, event: LeaseEvent) -> bool:
        """Write an event, or keep it. Return whether it was written."""
        self.sequence += 1
        if self.latest is not None:
            self.lost += 1
        self.latest = replace(event, sequence=self.sequence, lost=self.lost)
        return self.flush()

    def flush(self) -> bool:
        """Try to write the event that was kept. Return whether none is left."""
        if self.latest is not None and self.write(self.number, self.latest):
            self.latest, self.lost = None, 0
        return self.latest is None


class Publisher:
    """Holds all subscriptions, and sends them events.

    Args:
        table: The lease table.
        on_warning: Called with a lease, the milliseconds left and the reason, when its warning is published.
    """

    def __init__(self, table: LeaseTable, on_warning: Callable[[int, int, str], None] = lambda *_: None) -> None:
        self._table = table
        self._on_warning = on_warning
        self._by_lease: dict[int, list[Subscription]] = {}
        self._by_tenant: Counter[str] = Counter()
        # The phase that was published last, of each lease that somebody subscribed to.
        self._published: dict[int, Key] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._unread: set[Subscription] = set()
        self._flush_timer: asyncio.TimerHandle | None = None

    def add(self, subscription: Subscription) -> None:
        """Publish changes to it from now on. Raises Refusal."""
        if self._by_tenant[subscription.tenant] >= MAX_SUBSCRIPTIONS:
            raise Refusal(
                Failure(
                    Status.BUSY,
                    f"tenant {subscription.tenant} has {MAX_SUBSCRIPTIONS} subscriptions, the most one may have",
                    hint="End those that are not needed, or subscribe to lease 0, which is all of them.",
                )
            )
        self._by_tenant[subscription.tenant] += 1
        self._by_lease.setdefault(subscription.lease_id, []).append(subscription)

    def begin(self, subscription: Subscription) -> None:
        """Send where its lease stands, once its request was answered, and watch its leases."""
        now_ns = time.monotonic_ns()
        if subscription.lease_id != EVERY_LEASE:
            standing = self._table.standing(subscription.lease_id, now_ns)
            if standing is not None:
                self._send((subscription,), subscription.lease_id, standing, now_ns)
                self._watch(subscription.lease_id, standing)
            return
        for lease in self._table.snapshots():
            standing = self._table.standing(lease.lease_id, now_ns)
            if standing is not None and lease.lease_id not in self._published:
                self._watch(lease.lease_id, standing)

    def remove(self, subscription: Subscription) -> None:
        """End a subscription."""
        self._by_tenant[subscription.tenant] -= 1
        if not self._by_tenant[subscription.tenant]:
            del self._by_tenant[subscription.tenant]
        self._unread.discard(subscription)
        others = self._by_lease[subscription.lease_id]
        others.remove(subscription)
        if others:
            return
        del self._by_lease[subscription.lease_id]
        if EVERY_LEASE in self._by_lease:
            return
        left = list(self._published) if subscription.lease_id == EVERY_LEASE else [subscription.lease_id]
        for lease_id in left:
            if lease_id not in self._by_lease:
                self._forget(lease_id)

    def on_effects(self, effects: Sequence[Effect]) -> None:
        """Publish what changed. Called after the effects were carried out."""
        if not self._by_lease:
            return
        moved: dict[int, None] = {}
        for effect in effects:
            match effect:
                case SetDeadline() | RefuseWork() | KillWorker() | ProveReclaimed() | Warned():
                    moved[effect.lease_id] = None
                case LeaseEnded(lease):
                    moved[lease.lease_id] = None
        for lease_id in moved:
            self._publish(lease_id)

    def stop(self) -> None:
        """Cancel all timers."""
        for handle in (*self._timers.values(), self._flush_timer):
            if handle is not None:
                handle.cancel()

    def _publish(self, lease_id: int) -> None:
        if lease_id not in self._by_lease and EVERY_LEASE not in self._by_lease:
            return
        now_ns = time.monotonic_ns()
        standing = self._table.standing(lease_id, now_ns)
        if standing is None:
            return
        if self._published.get(lease_id) != standing.key:
            subscriptions = [*self._by_lease.get(lease_id, ()), *self._by_lease.get(EVERY_LEASE, ())]
            self._send(subscriptions, lease_id, standing, now_ns)
        self._watch(lease_id, standing)

    def _watch(self, lease_id: int, standing: Standing) -> None:
        """Remember what was published, and publish again when time alone changes the phase."""
        self._forget(lease_id)
        if standing.phase is Phase.ENDED:
            return
        self._published[lease_id] = standing.key
        if standing.look_again_ns is not None:
            delay_s = max(0, standing.look_again_ns - time.monotonic_ns()) / NS_PER_S
            self._timers[lease_id] = asyncio.get_running_loop().call_later(delay_s, self._publish, lease_id)

    def _forget(self, lease_id: int) -> None:
        self._published.pop(lease_id, None)
        if (handle := self._timers.pop(lease_id, None)) is not None:
            handle.cancel()

    def _send(self, subscriptions: Iterable[Subscription], lease_id: int, standing: Standing, now_ns: int) -> None:
        event = LeaseEvent(
            lease_id=lease_id,
            sequence=0,
            lost=0,
            phase=int(standing.phase),
            left_ms=min(standing.left_ms(now_ns), MAX_LEFT_MS),
            generation=standing.generation,
            cause=standing.cause,
            reason=standing.reason.encode(errors="replace")[:MAX_TEXT_BYTES].decode(errors="ignore"),
        )
        if standing.phase is Phase.WARNING:
            self._on_warning(lease_id, event.left_ms, standing.reason)
        for subscription in subscriptions:
            if subscription.may_see(lease_id) and not subscription.send(event):
                self._unread.add(subscription)
                self._flush_later()

    def _flush_later(self) -> None:
        if self._flush_timer is None:
            self._flush_timer = asyncio.get_running_loop().call_later(FLUSH_S, self._flush)

    def _flush(self) -> None:
        self._flush_timer = None
        self._unread = {subscription for subscription in self._unread if not subscription.flush()}
        if self._unread:
            self._flush_later()


class SubscriptionHandler:
    """The subscriptions of one control connection."""

    def __init__(self, publisher: Publisher, tenant: str, write: Write) -> None:
        self._publisher = publisher
        self._tenant = tenant
        self._write = write
        self._own: dict[int, Subscription] = {}

    def subscribe(self, number: int, lease_id: int, may_see: Callable[[int], bool]) -> None:
        """Handle LEASE_SUBSCRIBE. Call `begin` once it was answered. Raises Refusal."""
        subscription = Subscription(number, lease_id, self._tenant, may_see, self._write)
        self._publisher.add(subscription)
        self._own[number] = subscription

    def begin(self, number: int) -> None:
        """Begin to send events: the subscription was answered."""
        self._publisher.begin(self._own[number])

    def unsubscribe(self, number: int) -> None:
        """Handle LEASE_UNSUBSCRIBE. Raises Refusal."""
        subscription = self._own.pop(number, None)
        if subscription is None:
            raise Refusal(Failure(Status.NOT_FOUND, f"this connection has no subscription {number}"))
        self._publisher.remove(subscription)

    def leave(self) -> None:
        """End all subscriptions: the connection is gone."""
        for subscription in self._own.values():
            self._publisher.remove(subscription)
        self._own.clear()


def seen_by(see: Callable[[LeaseSnapshot], bool], table: LeaseTable) -> Callable[[int], bool]:
    """Make a check of a lease's id from a check of a lease."""

    def may_see(lease_id: int) -> bool:
        lease = table.get(lease_id)
        return lease is not None and see(lease)

    return may_see
