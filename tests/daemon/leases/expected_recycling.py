"""Expected state of recycled contexts, stored separately from the table's own state."""

from typing import TYPE_CHECKING, Final

from gpulease.daemon.leases.events import KillWorker, RecycleWorker, WorkerScrubbed
from gpulease.daemon.leases.model import FIRST_SUBMIT_ID, FIRST_WARM_ID, Cause, LeaseState, Recycling

if TYPE_CHECKING:
    from .simulated import Shell

RECYCLING: Final = Recycling(idle_s=2, max_leases=3, max_idle=2)


class ExpectedRecycling:
    """Tenants that each context served, and contexts that must never be used again.

    Attributes:
        bounds: Bounds given to the table; None if no context is recycled.
        tainted: Leases that someone besides their tenant attached to.
        renamed: Tenant names that may have belonged to other people when a context served them.
    """

    def __init__(self, bounds: Recycling | None) -> None:
        self.bounds = bounds
        self.tainted: set[int] = set()
        self.renamed: set[str] = set()
        self._served: dict[int, tuple[str, int]] = {}
        self._on_warm: set[int] = set()

    def on_rename(self, from_id: int, to_id: int, shell: "Shell") -> None:
        """Check that a lease takes a context that served no other tenant, or that an unused context is returned."""
        served = self._served.pop(from_id, None)
        assert to_id < FIRST_SUBMIT_ID or served is None, "a submit was given a context that served a lease"
        if to_id >= FIRST_WARM_ID:
            self._on_warm.discard(from_id)
            return
        self._on_warm.add(to_id)
        lease = shell.table.get(to_id)
        if served is not None and lease is not None:
            assert lease.tenant == served[0], "a context that served one tenant was given to another"
            assert lease.tenant not in self.renamed, "a context was given to who may be another by now"
            self._served[to_id] = served

    def scrub(self, lease_id: int, luck: int, shell: "Shell") -> None:
        if lease_id in shell.alive:
            shell.send(WorkerScrubbed(lease_id, "" if luck % 8 else "the card shows more"))

    def on_recycle(self, effect: RecycleWorker, shell: "Shell") -> None:
        """Check that the worker lives and was proved scrubbed, and that only its tenant had the lease."""
        lease_id, warm_id = effect.lease_id, effect.warm_id
        lease = shell.table.get(lease_id)
        assert lease is not None
        assert (lease.state, lease.cause, lease.fault) == (LeaseState.TORNDOWN, Cause.FREED, "")
        assert lease_id in shell.alive, "a dead worker was recycled"
        assert (KillWorker, lease_id) not in shell.once, "a worker that is being killed was recycled"
        assert lease.tenant not in self.renamed, "a context was recycled whose tenant may be another by now"
        assert lease_id not in self.tainted | shell.revoked, "a context was recycled that was not its tenant's alone"
        of_lease = [number for number in shell.unproved if shell.submits.leases.get(number) == lease_id]
        assert not of_lease, "a context was recycled whose lease has a submit that is not proved gone"
        assert lease_id in self._on_warm, "a context was recycled that was not made ahead"
        assert lease_id not in shell.regions.leases.values(), "a context was recycled that had regions"
        count = self._served.pop(lease_id, ("", 0))[1] + 1
        assert self.bounds is not None
        assert count < self.bounds.max_leases
        self._served[warm_id] = (lease.tenant, count)
        uuid, _ = shell.unproved.pop(lease_id)
        shell.hold_on(warm_id, uuid, next(card.overhead_bytes for card in shell.cards if card.uuid == uuid))
        shell.alive.remove(lease_id)
        shell.alive.add(warm_id)
