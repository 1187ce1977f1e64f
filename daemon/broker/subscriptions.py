"""Subscriptions: events that report the state of leases to peers, sent without waiting for any peer.

The state is in the lease table. `Publisher` decides when to query the table, and remembers which event each lease's
subscribers received last. A slow reader loses old events but never the latest, which contains the number of lost
events. Memory does not grow with unread events.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final, Protocol

from gpulease.daemon.leases.events import (
    Effect,
    EndRegion,
    KillWorker,
    LeaseEnded,
    ProveReclaimed,
    RefuseWork,
    SetDeadline,
    SetRegion,
    Warned,
)
from gpulease.daemon.leases.model import LeaseSnapshot
from gpulease.daemon.leases.quotas import LeasePhase
from gpulease.daemon.leases.table import LeaseTable
from gpulease.protocol.failures import Failure, Refused
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.limits import MAX_SUBSCRIPTIONS, MAX_TEXT_BYTES
from gpulease.protocol.messages import LeaseEvent, RegionEvent
from gpulease.protocol.opcodes import Phase, Status
from gpulease.protocol.time_units import NS_PER_S

EVERY_LEASE: Final = 0
"""The lease id of a subscription to every lease that its peer may see."""

FLUSH_S: Final = 0.2
"""Time after which a slow reader's latest event is sent again."""

MAX_LEFT_MS: Final = 2**32 - 1

Key = tuple[Phase, str, int | None]


class Write(Protocol):
    """Writes an event to a subscriber's connection."""

    def __call__(self, subscription: int, event: LeaseEvent | RegionEvent) -> bool:
        """Return whether the connection had room for the event."""


@dataclass(slots=True, eq=False)
class PeerSubscription:
    """A peer's subscription to one lease or region, or to every lease that it may see.

    Attributes:
        number: The number of the request that made it.
        lease_id: The lease or region, or EVERY_LEASE.
        tenant: The peer's tenant.
        may_see: Returns whether the peer may receive events of a lease now.
        sequence: Number of events so far.
        lost: Number of events before `latest` that were dropped.
        latest: The latest event while the connection has no room for it, otherwise None.
        is_watch: Whether it reports launches that were refused because of a region, or because of any region of a
          lease.
    """

    number: int
    lease_id: int
    tenant: str
    may_see: Callable[[int], bool]
    write: Write
    sequence: int = 0
    lost: int = 0
    latest: LeaseEvent | RegionEvent | None = None
    is_watch: bool = False

    def send(self, event: LeaseEvent | RegionEvent) -> bool:
        """Send an event, or keep it in place of an earlier one that is still unsent. Returns whether it was sent."""
        # Number the event even if it is not sent: the gap shows the peer how many it missed.
        self.sequence += 1
        # A reader that is too slow gets the newest state; count the skipped events.
        if self.latest is not None:
            self.lost += 1
        self.latest = replace(event, sequence=self.sequence, lost=self.lost)
        return self.flush()

    def flush(self) -> bool:
        """Try to send the kept event. Returns True if no event is left."""
        if self.latest is not None and self.write(self.number, self.latest):
            self.latest, self.lost = None, 0
        return self.latest is None


class Publisher:
    """Sends every subscriber the events of its leases.

    Args:
        on_warning: Called with a lease, the milliseconds left and the reason when subscribers are warned of its end.
    """

    def __init__(self, table: LeaseTable, on_warning: Callable[[int, int, str], None] = lambda *_: None) -> None:
        self._table = table
        self._on_warning = on_warning
        # Subscriptions by lease, watches by lease or region, and the number of each tenant's.
        self._by_lease: dict[int, list[PeerSubscription]] = {}
        self._watches: dict[int, list[PeerSubscription]] = {}
        self._by_tenant: Counter[str] = Counter()
        # The state that was last sent to each lease's subscribers.
        self._sent: dict[int, Key] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        # Subscriptions with an event for which their connection had no room. A timer sends it again.
        self._slow: set[PeerSubscription] = set()
        self._flush_timer: asyncio.TimerHandle | None = None

    def add(self, subscription: PeerSubscription) -> None:
        """Send the subscription every change from now on. Raises Refused if its tenant has too many."""
        if self._by_tenant[subscription.tenant] >= MAX_SUBSCRIPTIONS:
            raise Refused(
                Failure(
                    Status.BUSY,
                    f"tenant {subscription.tenant} has {MAX_SUBSCRIPTIONS} subscriptions, the maximum for one tenant",
                    hint="End subscriptions that you do not need, or subscribe once to lease 0, which stands "
                    "for all leases.",
                )
            )
        # Count per tenant, over all of its connections.
        self._by_tenant[subscription.tenant] += 1
        of_kind = self._watches if subscription.is_watch else self._by_lease
        of_kind.setdefault(subscription.lease_id, []).append(subscription)

    def begin(self, subscription: PeerSubscription) -> None:
        """Begin a subscription after the reply to its request: send the state of its lease, and follow its leases."""
        now_ns = time.monotonic_ns()
        # For a subscription to one lease, send its state at once, so that the subscriber need not query it.
        if subscription.lease_id != EVERY_LEASE:
            standing = self._table.phase(subscription.lease_id, now_ns)
            if standing is not None:
                self._send((subscription,), subscription.lease_id, standing, now_ns)
                self._follow(subscription.lease_id, standing)
            return
        # For every lease, send no first events, only later changes.
        for lease in (*self._table.snapshots(), *self._table.regions.snapshots()):
            standing = self._table.phase(lease.lease_id, now_ns)
            if standing is not None and lease.lease_id not in self._sent:
                self._follow(lease.lease_id, standing)

    def remove(self, subscription: PeerSubscription) -> None:
        """End a subscription, and stop following leases that have lost their last subscriber."""
        self._by_tenant[subscription.tenant] -= 1
        if not self._by_tenant[subscription.tenant]:
            del self._by_tenant[subscription.tenant]
        self._slow.discard(subscription)
        of_kind = self._watches if subscription.is_watch else self._by_lease
        others = of_kind[subscription.lease_id]
        others.remove(subscription)
        if others:
            return
        del of_kind[subscription.lease_id]
        # Watches follow no lease's state, and a subscription to every lease still needs all of them.
        if subscription.is_watch or EVERY_LEASE in self._by_lease:
            return
        followed = list(self._sent) if subscription.lease_id == EVERY_LEASE else [subscription.lease_id]
        for lease_id in followed:
            if lease_id not in self._by_lease:
                self._unfollow(lease_id)

    def on_effects(self, effects: Sequence[Effect]) -> None:
        """Send the changes that these effects made to leases. Called after the effects were executed."""
        # Return early, because most daemons have no subscriber.
        if not self._by_lease:
            return
        # Collect the leases that may have changed, so that each is queried once, however many effects concern it.
        changed: dict[int, None] = {}
        for effect in effects:
            match effect:
                case SetDeadline() | RefuseWork() | KillWorker() | ProveReclaimed():
                    changed[effect.worker_id] = None
                case SetRegion() | EndRegion():
                    changed[effect.region_id] = None
                case Warned(lease_id=lease_id):
                    changed[lease_id] = None
                case LeaseEnded(lease):
                    changed[lease.lease_id] = None
        for lease_id in changed:
            self._update(lease_id)

    def on_forward_revoked(self, lease_id: int, event: RegionEvent) -> None:
        """Report a launch that was refused because of a region to the watches of the region and of its lease."""
        self._send_to((*self._watches.get(event.lease_id, ()), *self._watches.get(lease_id, ())), event)

    def stop(self) -> None:
        """Cancel all timers: no event is sent any more."""
        for handle in (*self._timers.values(), self._flush_timer):
            if handle is not None:
                handle.cancel()

    def _update(self, lease_id: int) -> None:
        """Send the state of a lease if it is new to its subscribers."""
        # The last subscriber may have left while a timer was armed.
        if lease_id not in self._by_lease and EVERY_LEASE not in self._by_lease:
            return
        now_ns = time.monotonic_ns()
        standing = self._table.phase(lease_id, now_ns)
        if standing is None:
            return
        # Send only changes of the phase: a renewal moves the deadline but does not change the phase.
        if self._sent.get(lease_id) != standing.key:
            subscribers = [*self._by_lease.get(lease_id, ()), *self._by_lease.get(EVERY_LEASE, ())]
            self._send(subscribers, lease_id, standing, now_ns)
        self._follow(lease_id, standing)

    def _follow(self, lease_id: int, standing: LeasePhase) -> None:
        """Record the state that was sent, and query again when it changes without an event."""
        # A new timer replaces the old one: renewals move the times at which the phase changes.
        self._unfollow(lease_id)
        # The lease has ended, so nothing changes any more.
        if standing.phase is Phase.ENDED:
            return
        self._sent[lease_id] = standing.key
        # A phase such as WARNING begins without an event, so a timer must query it.
        if standing.next_check_ns is not None:
            delay_s = max(0, standing.next_check_ns - time.monotonic_ns()) / NS_PER_S
            self._timers[lease_id] = asyncio.get_running_loop().call_later(delay_s, self._update, lease_id)

    def _unfollow(self, lease_id: int) -> None:
        self._sent.pop(lease_id, None)
        if (handle := self._timers.pop(lease_id, None)) is not None:
            handle.cancel()

    def _send(self, subscribers: Iterable[PeerSubscription], lease_id: int, standing: LeasePhase, now_ns: int) -> None:
        # Make one event for all subscribers; each numbers its own copy.
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
        self._send_to(subscribers, event)

    def _send_to(self, subscribers: Iterable[PeerSubscription], event: LeaseEvent | RegionEvent) -> None:
        for subscription in subscribers:
            # Check this for each event: a token may have expired, or the lease may belong to another tenant.
            if subscription.may_see(event.lease_id) and not subscription.send(event):
                self._slow.add(subscription)
                self._schedule_flush()

    def _schedule_flush(self) -> None:
        if self._flush_timer is None:
            self._flush_timer = asyncio.get_running_loop().call_later(FLUSH_S, self._flush)

    def _flush(self) -> None:
        self._flush_timer = None
        self._slow = {subscription for subscription in self._slow if not subscription.flush()}
        if self._slow:
            self._schedule_flush()


class ConnectionSubscriptions:
    """The subscriptions of one control connection."""

    def __init__(self, publisher: Publisher, tenant: str, write: Write) -> None:
        self._publisher = publisher
        self._tenant = tenant
        self._write = write
        self._own: dict[int, PeerSubscription] = {}

    def subscribe(self, number: int, lease_id: int, may_see: Callable[[int], bool]) -> None:
        """Add a subscription. `begin` must follow once its request is answered. Raises Refused."""
        subscription = PeerSubscription(number, lease_id, self._tenant, may_see, self._write)
        # Add it to the publisher first: a subscription that the publisher refuses must not stay here.
        self._publisher.add(subscription)
        self._own[number] = subscription

    def watch(self, number: int, lease_id: int, may_see: Callable[[int], bool]) -> None:
        """Add a watch of a region, or of all regions of a lease. Raises Refused."""
        watch = PeerSubscription(number, lease_id, self._tenant, may_see, self._write, is_watch=True)
        self._publisher.add(watch)
        self._own[number] = watch

    def begin(self, number: int) -> None:
        """Send the first event of a subscription, after its request was answered."""
        self._publisher.begin(self._own[number])

    def unsubscribe(self, number: int) -> None:
        """End a subscription. Raises Refused if this connection has none with that number."""
        subscription = self._own.pop(number, None)
        if subscription is None:
            raise Refused(Failure(Status.NOT_FOUND, f"this connection has no subscription {number}"))
        self._publisher.remove(subscription)

    def end_all(self) -> None:
        for subscription in self._own.values():
            self._publisher.remove(subscription)
        self._own.clear()


def by_lease_id(may_see: Callable[[LeaseSnapshot], bool], table: LeaseTable) -> Callable[[int], bool]:
    """Return a check of a lease's id that is based on a check of its snapshot. An unknown lease fails it."""

    def may_see_id(lease_id: int) -> bool:
        lease = table.get(lease_id)
        return lease is not None and may_see(lease)

    return may_see_id
