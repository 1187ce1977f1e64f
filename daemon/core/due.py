"""What the timers of leases and submits are armed for, by their state; one that rings early is armed again for that."""

from gpulease.daemon.core.events import TimerKind
from gpulease.daemon.core.leases import Lease, LeaseState
from gpulease.daemon.core.submit import Submit, SubmitState


def lease_due_ns(lease: Lease, kind: TimerKind) -> int | None:
    """When a timer has something to do; None if it has nothing to do any more."""
    match kind:
        case TimerKind.SPAWN:
            return lease.spawn_due_ns if lease.state is LeaseState.PENDING else None
        case TimerKind.EXPIRY:
            return lease.deadline_ns if lease.state is LeaseState.ACTIVE else None
        case TimerKind.ORPHAN:
            return lease.orphan_due_ns if lease.state is LeaseState.ACTIVE else None
        case TimerKind.GRACE if not (lease.is_kill_sent or lease.is_worker_gone):
            return lease.grace_due_ns if lease.state is LeaseState.DRAINING else None
        case TimerKind.RECLAIM:
            return lease.reclaim_due_ns if lease.state is LeaseState.DRAINING else None
    return None


def submit_due_ns(submit: Submit, kind: TimerKind) -> int | None:
    """The same of a submit's."""
    match (submit.state, kind):
        case (SubmitState.STARTING, TimerKind.SPAWN):
            return submit.spawn_due_ns
        case (SubmitState.RUNNING, TimerKind.EXPIRY):
            return submit.due_ns
        case (SubmitState.ENDING, TimerKind.GRACE):
            return submit.grace_due_ns
        case (SubmitState.ENDING, TimerKind.RECLAIM):
            return submit.reclaim_due_ns
    return None
