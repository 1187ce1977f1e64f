"""The fleet's horizon: the time until which this node may serve claimed leases.

A lease is claimed if it has a name, or counts against its tenant's quota in the fleet.

1. The node's fleet process moves the horizon on with each beat that the fleet's store has acknowledged. Without beats
   another node may serve the names, and use the quotas' bytes, from some time after the horizon on.
2. A claimed lease is granted only before the horizon. It ends at its own deadline or, ISOLATED, at the horizon,
   whichever comes first. At the horizon nothing in flight gets a grace.
3. Each claimed lease has the horizon on its control page, by the clock that goes on while the host sleeps. So worker
   and zygote end it without the broker, too. A lease that a restarted broker takes over keeps its page's horizon.
4. Once the claims are lost, every claimed lease ends, and waiting acquires with a claim are refused. Nothing is
   granted on a claim until the horizon moves again.
5. A lease without a claim feels nothing of all that.
"""

from gpulease.daemon.leases import denials
from gpulease.daemon.leases.events import Denied, Effect
from gpulease.daemon.leases.horizon_events import ClaimsLost, HorizonMoved, SetHorizon
from gpulease.daemon.leases.model import Cause, Horizon, Lease, LeaseState
from gpulease.daemon.leases.table_state import LeaseStore
from gpulease.daemon.leases.teardown import Teardown


class Horizons:
    """Caps claimed leases. Each method appends the effects to execute to `out`."""

    def __init__(self, store: LeaseStore, teardown: Teardown) -> None:
        self._store = store
        self._teardown = teardown

    def on_moved(self, event: HorizonMoved, now_ns: int, out: list[Effect]) -> None:
        """Move the horizon of the node and of its claimed leases, never back. A lease past its horizon has ended."""
        moved = Horizon(event.horizon_ns, event.horizon_boot_ns)
        if self._store.horizon is not None and moved.boot_ns <= self._store.horizon.boot_ns:
            return
        self._store.horizon = moved
        for lease in list(self._store.capped.values()):
            self._teardown.expire_if_due(lease, now_ns, out)
            if lease.state is LeaseState.ACTIVE:
                self.cap(lease, out)

    def on_claims_lost(self, event: ClaimsLost, now_ns: int, out: list[Effect]) -> None:
        """End every claimed lease, and refuse the acquires with a claim that wait."""
        self._store.horizon = None
        for waiter in self._store.queue:
            if waiter.acquire.terms.is_claimed:
                self._store.queue.leave(waiter)
                self._store.has_freed_room = True
                out.append(Denied(waiter.acquire.request, denials.isolated(event.reason)))
        for lease in list(self._store.capped.values()):
            self._teardown.expire_if_due(lease, now_ns, out)
            if lease.state in (LeaseState.PENDING, LeaseState.ACTIVE):
                self._teardown.begin(lease, Cause.ISOLATED, event.reason, now_ns, out, denials.isolated(event.reason))

    def may_grant(self, lease: Lease, now_ns: int, out: list[Effect]) -> bool:
        """Cap a lease that is about to be granted; end it instead if it is claimed and the horizon is past."""
        if not lease.terms.is_claimed:
            return True
        if self._store.is_isolated(now_ns):
            reason = denials.NO_HORIZON
            self._teardown.begin(lease, Cause.ISOLATED, reason, now_ns, out, denials.isolated(reason))
            return False
        self.cap(lease, out)
        return True

    def cap(self, lease: Lease, out: list[Effect]) -> None:
        """Give a claimed lease the node's horizon, unless it kept a later one of an earlier table."""
        horizon = self._store.horizon
        if horizon is None or (lease.horizon is not None and lease.horizon.boot_ns >= horizon.boot_ns):
            return
        lease.horizon = horizon
        out.append(SetHorizon(lease.lease_id, horizon.boot_ns))
        self._teardown.submits.on_horizon(lease, out)
