"""What a daemon says of one lease: LEASE_QUERY's map, typed."""

from typing import Any, Final, Literal, NotRequired, TypedDict, cast

from gpulease.client.errors import error_of
from gpulease.protocol import Failure, Status


class SubmitReport(TypedDict):
    """One submit of a lease.

    Attributes:
        number: The submit's number on the daemon.
        reason: Why it ended or ends, "" while nothing ends it.
        timed_out: Whether it, its kernel or its image took too long.
        state: starting, running, ending or fenced; of the last one that is gone, absent.
        launches: Kernels started; likewise.
    """

    number: int
    reason: str
    timed_out: bool
    state: NotRequired[Literal["starting", "running", "ending", "fenced"]]
    launches: NotRequired[int]


class LeaseReport(TypedDict):
    """One lease. A daemon of another version may say more, and lack what is marked so.

    Attributes:
        lease_id: The id's text, 32 hexadecimal digits: equal to `lease.lease_id_text`, not to `lease.lease_id`.
        state: pending, active, draining (it ends), torndown (its memory is free) or fenced (that could not be proved).
        generation: Goes up with every renewal.
        size_bytes: Device memory granted.
        card_uuid: The card.
        exclusivity: shared, session_exclusive, device_exclusive or partition_exclusive.
        remaining_ms: Milliseconds to its end, 0 once it has ended.
        ttl_ms: Milliseconds last asked for.
        cause: Why it ended or ends, a word as `expired`; None while nothing ends it.
        reason: The same for people, "" while there is none.
        fault: What its worker said when the context was lost, "" if it was not.
        tenant: Whose it is.
        age_ms: Milliseconds since it was asked for.
        phase: active, warning, grace, teardown or ended; absent before it was granted.
        ended_after_deadline_us: Microseconds from its deadline to the proof that its memory is free; below 0 if it
            ended earlier, absent while it has not.
        orphan_ms: Milliseconds it may be without a connection, 0 for as long as it lasts.
        orphaned_in_ms: Milliseconds until it ends for want of a connection; None while it has one.
        allocated_bytes: Device memory its session holds. This and the counters below are its worker's word; they are
            absent once there is no worker.
        launches: Kernels its session queued.
        syncs: Waits for the card that went well.
        operations: Requests its session took.
        failed_operations: Requests that failed.
        sync_errors: Waits for the card that ended with a failure.
        copies: Copies to and from the card.
        copied_bytes: Bytes of these.
        submit: The submit that is not proved gone; absent if there is none.
        last_submit: The last submit that is gone; absent if there was none.
    """

    lease_id: str
    state: Literal["pending", "active", "draining", "torndown", "fenced"]
    generation: int
    size_bytes: int
    card_uuid: str
    exclusivity: str
    remaining_ms: int
    ttl_ms: int
    cause: NotRequired[str | None]
    reason: NotRequired[str]
    fault: NotRequired[str]
    tenant: NotRequired[str]
    age_ms: NotRequired[int]
    phase: NotRequired[Literal["active", "warning", "grace", "teardown", "ended"]]
    ended_after_deadline_us: NotRequired[int]
    orphan_ms: NotRequired[int]
    orphaned_in_ms: NotRequired[int | None]
    allocated_bytes: NotRequired[int]
    launches: NotRequired[int]
    syncs: NotRequired[int]
    operations: NotRequired[int]
    failed_operations: NotRequired[int]
    sync_errors: NotRequired[int]
    copies: NotRequired[int]
    copied_bytes: NotRequired[int]
    submit: NotRequired[SubmitReport]
    last_submit: NotRequired[SubmitReport]


_TEXTS: Final = ("lease_id", "state", "card_uuid", "exclusivity")
_NUMBERS: Final = ("generation", "size_bytes", "remaining_ms", "ttl_ms")


def lease_report_of(found: Any, doing: str) -> LeaseReport:
    """A map as the daemon sent it. Raises Disconnected for what is none, or has other types than the protocol says."""
    is_typed = (
        isinstance(found, dict)
        and all(isinstance(found.get(name, ""), str) for name in _TEXTS)
        and all(type(found.get(name, 0)) is int for name in _NUMBERS)
    )
    if not is_typed:
        raise error_of(Failure(Status.DISCONNECTED, "the report is no lease's map"), doing)
    return cast(LeaseReport, found)
