"""What a lease's tenant is told of its way to the end: active, warning, grace, teardown, ended.

A phase is seen from the tenant's side: what there is still time for. WARNING: finish and give it back, or renew it
where that helps. GRACE: what is in flight may end, nothing new begins. TEARDOWN: all is gone but the proof of it.
"""

from dataclasses import dataclass
from typing import Final

from gpulease.daemon.core.leases import Lease, LeaseSnapshot, LeaseState
from gpulease.daemon.core.limits import NS_PER_MS, NS_PER_S
from gpulease.protocol.opcodes import Phase

WARNING_PART: Final = 10
"""The last tenth of a lease's time is its warning; a tenant that keeps it alive has renewed it before."""

MAX_WARNING_S: Final = 30
"""The longest warning of a lease's own end."""

ENDS_SOON: Final = "the lease ends unless it is renewed"
UNCONNECTED: Final = "nobody is connected to the lease: it is orphaned unless somebody connects"
DRAINS: Final = "the node is being drained: the lease can't be renewed for longer"


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a lease stands; times are monotonic nanoseconds.

    Attributes:
        until_ns: When the next phase comes at the latest, None if there is no telling or no next one.
        look_again_ns: When it stands elsewhere although nothing happens, None if never.
        reason: Why, a clause; "" while there is nothing to say.
    """

    phase: Phase
    until_ns: int | None
    look_again_ns: int | None
    cause: str
    reason: str
    generation: int

    def left_ms(self, now_ns: int) -> int:
        """Time to the next phase, rounded up; 0 if there is no telling."""
        return 0 if self.until_ns is None else -(-max(0, self.until_ns - now_ns) // NS_PER_MS)

    @property
    def key(self) -> tuple[Phase, str, int | None]:
        """What is worth telling when it changes; how long an active lease has left is not."""
        return self.phase, self.reason, self.until_ns if self.reason in (DRAINS, UNCONNECTED) else None


def ends_ns(deadline_ns: int, drain_ns: int | None) -> int:
    """When a lease with that deadline ends, if nothing else ends it."""
    return deadline_ns if drain_ns is None else min(deadline_ns, drain_ns)


def standing_of(lease: Lease, drain_ns: int | None, now_ns: int) -> Standing:
    """Where a live lease stands. `drain_ns`: the deadline of the drain, None if there is none."""
    generation = lease.generation
    if lease.state is LeaseState.DRAINING:
        is_over = lease.is_kill_sent or lease.is_worker_gone
        phase, until_ns = (Phase.TEARDOWN, lease.reclaim_due_ns) if is_over else (Phase.GRACE, lease.grace_due_ns)
        cause = "" if lease.cause is None else lease.cause.value
        return Standing(phase, until_ns, None, cause, lease.reason, generation)
    if lease.state is not LeaseState.ACTIVE or lease.deadline_ns is None:
        return ended_standing(lease.snapshot())
    orphan_ns = lease.orphan_due_ns
    if orphan_ns is not None and orphan_ns < ends_ns(lease.deadline_ns, drain_ns):
        return Standing(Phase.WARNING, orphan_ns, None, "", UNCONNECTED, generation)
    if drain_ns is not None:
        return Standing(Phase.WARNING, drain_ns, None, "", DRAINS, generation)
    warning_ns = min(lease.ttl_ms * NS_PER_MS // WARNING_PART, MAX_WARNING_S * NS_PER_S)
    due_ns = lease.deadline_ns - warning_ns
    if now_ns >= due_ns:
        return Standing(Phase.WARNING, lease.deadline_ns, None, "", ENDS_SOON, generation)
    return Standing(Phase.ACTIVE, due_ns, due_ns, "", "", generation)


def ended_standing(lease: LeaseSnapshot) -> Standing:
    """Where a lease stands that has ended or is fenced."""
    cause = "" if lease.cause is None else lease.cause.value
    return Standing(Phase.ENDED, None, None, cause, lease.reason, lease.generation)
