"""One submit: a second worker of a lease, with a context of its own, for one kernel."""

from dataclasses import dataclass
from enum import Enum
from typing import Final

FIRST_SUBMIT_ID: Final = 1 << 129
"""Submits have numbers from here on, above those of leases and warm contexts: workers, timers and proofs are told apart
by them."""


class SubmitState(Enum):
    """Where a submit is in its life."""

    STARTING = "starting"
    RUNNING = "running"
    ENDING = "ending"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True)
class SubmitSnapshot:
    """What one submit was at one moment; the times are those of `Submit`."""

    submit_id: int
    lease_id: int
    state: SubmitState
    reason: str
    due_ns: int | None
    is_timed_out: bool

    @property
    def number(self) -> int:
        """What its tenant knows it by."""
        return self.submit_id - FIRST_SUBMIT_ID


@dataclass(slots=True)
class Submit:
    """A submit as the table keeps it; only `Submits` changes it. Times are monotonic nanoseconds.

    Attributes:
        size_bytes: What its kernel's buffers and code may take of the card.
        charge_bytes: The same and its context: a part of what its lease holds.
        request: Who waits for it to be ready; meaningless once that was answered.
        timeout_ms: How long it may take once it is ready.
        spawn_due_ns: When one that is STARTING is given up.
        due_ns: When one that is RUNNING is ended; None until it is.
        grace_due_ns: When its worker is killed, None if no grace was given.
        reclaim_due_ns: When it is fenced unless proved gone, None until that has begun.
        is_kill_sent: The worker was ordered dead; it is never ordered twice.
        is_worker_gone: Its process was reaped, so a proof of its bytes means something.
        is_timed_out: It was ended because it, its kernel or its image took too long.
        is_warm: Its context was made ahead.
        is_replaced: That was lost before it was ready: another one starts once its bytes are proved back.
    """

    submit_id: int
    lease_id: int
    card_uuid: str
    size_bytes: int
    charge_bytes: int
    request: int
    timeout_ms: int
    spawn_due_ns: int
    state: SubmitState = SubmitState.STARTING
    reason: str = ""
    due_ns: int | None = None
    grace_due_ns: int | None = None
    reclaim_due_ns: int | None = None
    is_kill_sent: bool = False
    is_worker_gone: bool = False
    is_timed_out: bool = False
    is_warm: bool = False
    is_replaced: bool = False

    def snapshot(self) -> SubmitSnapshot:
        """The submit as it is now."""
        return SubmitSnapshot(self.submit_id, self.lease_id, self.state, self.reason, self.due_ns, self.is_timed_out)
