"""The membership deadline: the time until which this node may serve claimed leases.

A lease is claimed if it has a name, or counts against its tenant's quota in the fleet.

1. The node's fleet process moves the deadline forward with each heartbeat that the fleet's store acknowledges. Some
   time after the deadline has passed, another node may serve the names, and the bytes no longer count
   against the tenants' quotas.
2. A claimed lease is granted only before the membership deadline. It ends at its own deadline or at the membership
   deadline, whichever comes first. At the latter it ends with ISOLATED, and running kernels get no grace.
3. Each claimed lease has the membership deadline on its control page, on the clock that keeps running while the host
   sleeps. So the worker and the zygote end the lease even without the broker. A lease that a restarted broker takes
   over keeps the deadline on its page.
4. Once the claims are lost, every claimed lease ends, and queued acquires with a claim are refused. No claim is granted
   until the membership deadline moves again.
5. None of this affects a lease without a claim.
"""

from gpulease.daemon.leases import denials
from gpulease.daemon.leases.events import Effect, RequestDenied
from gpulease.daemon.leases.membership_events import ClaimsLost, MembershipDeadlineMoved, SetMembershipDeadline
from gpulease.daemon.leases.model import Cause, Lease, LeaseState, MembershipDeadline
from gpulease.daemon.leases.table_state import LeaseStore
from gpulease.daemon.leases.teardown import Teardown


class MembershipDeadlines:
    """Limits claimed leases to the membership deadline. Each method appends what to execute to `effects`."""

    def __init__(self, store: LeaseStore, teardown: Teardown) -> None:
        self._store = store
        self._teardown = teardown

    def on_moved(self, event: MembershipDeadlineMoved, now_ns: int, effects: list[Effect]) -> None:
        """Move the membership deadline of the node and of its claimed leases forward, never back.

        A lease that is past its own membership deadline has ended and is not extended.
        """
        moved = MembershipDeadline(event.membership_deadline_ns, event.membership_deadline_boot_ns)
        # Heartbeats may be acknowledged out of order. Compare by CLOCK_BOOTTIME, which includes the time for which the
        # host slept.
        if self._store.membership_deadline is not None and moved.boot_ns <= self._store.membership_deadline.boot_ns:
            return
        self._store.membership_deadline = moved
        for lease in list(self._store.with_claims.values()):
            # End overdue leases before the deadline is extended: another node may already have taken their names.
            self._teardown.expire_if_due(lease, now_ns, effects)
            if lease.state is LeaseState.ACTIVE:
                self.cap(lease, effects)

    def on_claims_lost(self, event: ClaimsLost, now_ns: int, effects: list[Effect]) -> None:
        """End every claimed lease, and refuse the queued acquires that have a claim."""
        # Without a deadline, `may_grant` refuses all claims until a heartbeat sets a new deadline.
        self._store.membership_deadline = None
        for waiter in self._store.queue:
            if waiter.acquire.terms.is_claimed:
                self._store.queue.leave(waiter)
                self._store.has_freed_room = True
                effects.append(RequestDenied(waiter.acquire.request, denials.isolated(event.reason)))
        for lease in list(self._store.with_claims.values()):
            self._teardown.expire_if_due(lease, now_ns, effects)
            if lease.state in (LeaseState.PENDING, LeaseState.ACTIVE):
                self._teardown.begin(
                    lease, Cause.ISOLATED, event.reason, now_ns, effects, denials.isolated(event.reason)
                )

    def may_grant(self, lease: Lease, now_ns: int, effects: list[Effect]) -> bool:
        """Set the membership deadline of a claimed lease that is about to be granted, and return True.

        If that time has passed, end the lease instead and return False.
        """
        if self._store.is_isolated(now_ns):
            reason = denials.MEMBERSHIP_LOST
            self._teardown.begin(lease, Cause.ISOLATED, reason, now_ns, effects, denials.isolated(reason))
            return False
        self.cap(lease, effects)
        return True

    def cap(self, lease: Lease, effects: list[Effect]) -> None:
        """Give a claimed lease the node's membership deadline, unless it has a later one from an earlier table."""
        membership_deadline = self._store.membership_deadline
        if membership_deadline is None or (
            lease.membership_deadline is not None and lease.membership_deadline.boot_ns >= membership_deadline.boot_ns
        ):
            return
        lease.membership_deadline = membership_deadline
        effects.append(SetMembershipDeadline(lease.lease_id, membership_deadline.boot_ns))
        # A worker that the session has left may have to continue it. If it did not get the new deadline, the zygote
        # would end it too early.
        effects += [
            SetMembershipDeadline(worker_id, membership_deadline.boot_ns)
            for worker_id in self._store.left_workers(lease)
        ]
        self._teardown.submits.on_membership_deadline(lease, effects)
