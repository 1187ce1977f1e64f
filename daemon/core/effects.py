"""What the lease table wants done. The shell executes effects in the order given; it never decides.

Every acquire, renew, free, revoke, fence clear, drain and submit gets exactly one of `Granted`, `Renewed`, `Freed`,
`RevokeDone`, `FenceCleared`, `DrainSet`, `SubmitReady` or `Denied`, except an acquire or submit whose requester left.
Times are monotonic nanoseconds. What is done to a lease's worker, timers and bytes is done to those of warm contexts
and submits by the same effects, with their numbers.
"""

from dataclasses import dataclass
from typing import NamedTuple

from gpulease.daemon.core.cards import CardSnapshot
from gpulease.daemon.core.denials import Denial
from gpulease.daemon.core.events import TimerKind
from gpulease.daemon.core.leases import Cause, LeaseSnapshot, StoryEntry
from gpulease.protocol.opcodes import Phase, RevokeOutcome, Waiting


@dataclass(frozen=True, slots=True)
class SpawnWorker:
    """Start a worker for the lease; answered by `WorkerReady`, `WorkerFailed` or `WorkerExited`."""

    lease_id: int
    card_uuid: str
    size_bytes: int
    generation: int
    max_kernel_ms: int = 0
    waiting: Waiting | None = None


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Start a worker that opens a context for no lease; answered as `SpawnWorker` is, by its number."""

    warm_id: int
    card_uuid: str


@dataclass(frozen=True, slots=True)
class RenameWorker:
    """The worker known by one number is known by the other from now on, dead or alive, in every event and effect.

    A lease takes a warm context so, which the `SpawnWorker` that follows then uses; or gives it back. So does a submit,
    which gives none back.
    """

    from_id: int
    to_id: int


@dataclass(frozen=True, slots=True)
class WarmEnded:
    """For logs and metrics, once per warm context that no lease took: it is gone, or fenced."""

    warm_id: int
    card_uuid: str
    reason: str
    is_fenced: bool


@dataclass(frozen=True, slots=True)
class SpawnSubmit:
    """Start a second worker for a lease, known by its own number; answered as `SpawnWorker` is.

    One that is warm is there already: a `RenameWorker` before this one gave it the number.
    """

    submit_id: int
    lease_id: int
    card_uuid: str
    size_bytes: int
    timeout_ms: int
    max_kernel_ms: int = 0
    waiting: Waiting | None = None
    is_warm: bool = False


@dataclass(frozen=True, slots=True)
class RefuseSubmit:
    """Flip the revocation word of a submit's page, once per submit; without a cause its own time is over."""

    submit_id: int
    cause: Cause | None


@dataclass(frozen=True, slots=True)
class SubmitFenced:
    """For logs: a submit could not be proved gone. Its lease goes on, and holds its bytes."""

    submit_id: int
    lease_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class SubmitEnded:
    """Nothing need be known of a submit any more, once each: its bytes are proved back, or are its lease's fence."""

    submit_id: int
    lease_id: int
    reason: str


class SetDeadline(NamedTuple):
    """Write the deadline and the generation where the worker reads them."""

    lease_id: int
    generation: int
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class RefuseWork:
    """Flip the control page's revocation word; the first effect of every teardown, sent once per lease."""

    lease_id: int
    cause: Cause


@dataclass(frozen=True, slots=True)
class KillWorker:
    """Kill the worker's process and reap it; answered by `WorkerExited`, also if there is no process."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class ScrubWorker:
    """Have the worker release and zero all that the lease left, and prove it; answered by `WorkerScrubbed` or never."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class RecycleWorker:
    """The scrubbed worker of a lease is a warm context from now on, known by that number, with a control page anew."""

    lease_id: int
    warm_id: int


@dataclass(frozen=True, slots=True)
class ProveReclaimed:
    """Watch the device until the lease's bytes are back; answered by `WorkerUnlisted`, as often as it takes.

    `ReclaimProved` answers it too, and `ReclaimFailed`.
    """

    lease_id: int
    card_uuid: str


@dataclass(frozen=True, slots=True)
class CapacityChanged:
    """For logs: others hold more or less of a card than was booked, so that more or less of it can be leased."""

    card: CardSnapshot
    is_less: bool


class ArmTimer(NamedTuple):
    """Send `TimerFired` with these numbers at `due_ns`; an earlier timer of the lease need not be cancelled."""

    lease_id: int
    generation: int
    kind: TimerKind
    due_ns: int


@dataclass(frozen=True, slots=True)
class ArmWaitTimer:
    """Send `WaitTimerFired` for the waiting acquire at `due_ns`."""

    request: int
    due_ns: int


@dataclass(frozen=True, slots=True)
class ArmHoldTimer:
    """Send `HoldTimerFired` at `due_ns`. It takes the place of the last one, which may fire all the same."""

    due_ns: int


@dataclass(frozen=True, slots=True)
class ArmPoolTimer:
    """Send `PoolTimerFired` at `due_ns`. It takes the place of the last one, which may fire all the same."""

    due_ns: int


@dataclass(frozen=True, slots=True)
class ArmDrainTimer:
    """Send `DrainTimerFired` at `due_ns`. It takes the place of the last one, which may fire all the same."""

    due_ns: int


@dataclass(frozen=True, slots=True)
class Warned:
    """Tell whoever listens where an active lease stands now.

    A drain began, moved or was cancelled; or the lease lost its last connection, or has one again.
    """

    lease_id: int
    phase: Phase
    left_ms: int


@dataclass(frozen=True, slots=True)
class Granted:
    """Reply to an acquire: the lease is active and its clock runs."""

    request: int
    lease: LeaseSnapshot


@dataclass(frozen=True, slots=True)
class Renewed:
    """Reply to a renew: the lease with its new generation and deadline."""

    request: int
    lease: LeaseSnapshot


@dataclass(frozen=True, slots=True)
class Freed:
    """Reply to a free: the lease is torn down and its bytes are proved back."""

    request: int
    lease: LeaseSnapshot


@dataclass(frozen=True, slots=True)
class RevokeDone:
    """Reply to a revoke, sent only once the lease is torn down or fenced, or was never there."""

    request: int
    outcome: RevokeOutcome


@dataclass(frozen=True, slots=True)
class FenceCleared:
    """Reply to a fence clear: how many fenced slices are grantable again; which leases and warm contexts they were."""

    request: int
    count: int
    lease_ids: tuple[int, ...]
    warm_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DrainSet:
    """Reply to a drain or its cancellation: when it ends what is left, None if nothing is drained; who is there."""

    request: int
    deadline_ns: int | None
    active_leases: int


@dataclass(frozen=True, slots=True)
class SubmitReady:
    """Reply to a submit's request: its worker has a context and waits for the connection."""

    request: int
    submit_id: int
    lease_id: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Denied:
    """Reply to any request that can't be met."""

    request: int
    denial: Denial


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """For logs and metrics, once per lease: it is torn down or fenced (`lease.state` says which), and its story."""

    lease: LeaseSnapshot
    cause: Cause
    story: tuple[StoryEntry, ...]


Outcome = Granted | Renewed | Freed | RevokeDone | FenceCleared | DrainSet | SubmitReady | Denied
"""What a request is answered with."""

Effect = (
    SpawnWorker
    | SpawnSubmit
    | RefuseSubmit
    | SubmitFenced
    | SubmitEnded
    | SubmitReady
    | WarmUp
    | RenameWorker
    | WarmEnded
    | SetDeadline
    | RefuseWork
    | KillWorker
    | ScrubWorker
    | RecycleWorker
    | ProveReclaimed
    | CapacityChanged
    | ArmTimer
    | ArmWaitTimer
    | ArmHoldTimer
    | ArmPoolTimer
    | ArmDrainTimer
    | Warned
    | Granted
    | Renewed
    | Freed
    | RevokeDone
    | FenceCleared
    | DrainSet
    | Denied
    | LeaseEnded
)
