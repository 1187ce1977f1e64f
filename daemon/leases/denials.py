"""Denials: why a request was refused, as a reason for programs, a sentence for people and a hint."""

from collections.abc import Sequence
from enum import Enum
from typing import Final

from gpulease.daemon.leases.devices import Card
from gpulease.daemon.leases.model import Cause, LeaseSnapshot, LeaseState
from gpulease.protocol.counts import counted
from gpulease.protocol.failures import LEASE_ENDS, Failure, lease_end
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.limits import MAX_REGIONS
from gpulease.protocol.opcodes import Status
from gpulease.protocol.sizes import size_text
from gpulease.protocol.time_units import NS_PER_MS

# Long enough for tenants to recognise their own text, and too short to fill a log line.
MAX_QUOTED_CHARS: Final = 64


class DenialReason(Enum):
    """Reasons for a denial that a program can act on.

    Attributes:
        value: The reason's name in metrics, logs and audit records.
        status: The status on the wire.
    """

    _value_: str
    status: Status

    def __new__(cls, name: str, status: Status) -> "DenialReason":
        member = object.__new__(cls)
        member._value_, member.status = name, status
        return member

    CAPACITY_EXCEEDED = "capacity_exceeded", Status.CAPACITY_EXCEEDED
    LEASE_EXPIRED = "lease_expired", Status.LEASE_EXPIRED
    REVOKED = "revoked", Status.REVOKED
    FENCED = "fenced", Status.FENCED
    UNSUPPORTED = "unsupported", Status.UNSUPPORTED
    INVALID_REQUEST = "invalid_request", Status.INVALID_REQUEST
    NOT_FOUND = "not_found", Status.NOT_FOUND
    LIMIT = "limit", Status.DENIED
    RATE = "rate", Status.BUSY
    SESSION_FAILED = "session_failed", Status.SESSION_FAILED
    FREED = "freed", Status.LEASE_FREED
    SHUTTING_DOWN = "shutting_down", Status.DISCONNECTED
    NOT_RECORDED = "not_recorded", Status.BUSY
    DRAINED = "drained", Status.DRAINED
    BUSY = "busy", Status.BUSY
    NOT_ALLOWED = "not_allowed", Status.DENIED
    ISOLATED = "isolated", Status.BUSY
    NAME_TAKEN = "name_taken", Status.BUSY


_END_REASONS: Final = {
    reason.status: reason for reason in DenialReason if reason.status in {end.status for end in LEASE_ENDS.values()}
}
"""The reason for each status with which a lease ends. No two reasons share such a status."""


@dataclass(frozen=True, slots=True)
class Denial:
    """A refusal: `message` says what failed and why, `hint` says what to do. Both are whole sentences."""

    reason: DenialReason
    message: str
    hint: str

    @property
    def failure(self) -> Failure:
        """Return the denial as the failure that the client receives, with the reason as a status of the protocol."""
        return Failure(self.reason.status, self.message, hint=self.hint)


def duration_text(ms: int) -> str:
    """Return a duration as text: in seconds from 1000 ms on, else in milliseconds."""
    return f"{ms / 1000:g} s" if ms >= 1000 else f"{ms} ms"


def _ended_text(lease: LeaseSnapshot, clause: str) -> str:
    because = f": {lease.reason.rstrip('.')}" if lease.reason else ""
    return f"Lease {lease.lease_id:032x} {clause}{because}."


def _ended(cause: Cause, reason: str = "") -> tuple[DenialReason, str, str]:
    end = lease_end(cause.value, reason)
    return _END_REASONS[end.status], end.predicate, end.hint


# --- leases that are over, or not granted yet ---


def lease_ended(lease: LeaseSnapshot) -> Denial:
    """Deny work because the lease is draining, torn down or fenced."""
    # Name the fence rather than the cause, because the fence concerns the operator as well.
    if lease.state is LeaseState.FENCED:
        return Denial(
            DenialReason.FENCED,
            _ended_text(lease, "ended, and its memory is fenced because it could not be proved free"),
            "Acquire a new lease. The fenced memory stays unavailable until an operator clears the fence.",
        )
    if lease.cause is None:
        raise ValueError(f"Lease {lease.lease_id:032x} has not ended.")
    reason, clause, hint = _ended(lease.cause, lease.reason)
    return Denial(reason, _ended_text(lease, clause), hint)


def lease_expired(lease: LeaseSnapshot) -> Denial:
    """Deny work because the lease's time is over, although no event has ended the lease yet."""
    reason, clause, hint = _ended(Cause.EXPIRED)
    return Denial(reason, _ended_text(lease, clause), hint)


def lease_pending(lease: LeaseSnapshot) -> Denial:
    """Deny work because the lease's worker is still starting."""
    return Denial(
        DenialReason.INVALID_REQUEST,
        f"Lease {lease.lease_id:032x} has not been granted yet: its worker is still starting.",
        "Wait for the reply to the acquire.",
    )


# --- requests that the node can't serve now, and objects hidden from other tenants ---


def no_worker_now(reason: str) -> Denial:
    """Deny a lease because the daemon has no resource left to start one more worker.

    Args:
        reason: What happened to the worker, as a clause without a subject.
    """
    return Denial(
        DenialReason.BUSY,
        f"The daemon can't start another worker now: it {reason.rstrip('.')}.",
        "Nothing was started: try again in a moment. If it happens repeatedly, the operator must raise the daemon's"
        " limits (LimitNOFILE), or end leases or connections.",
    )


def not_found(lease_id: int) -> Denial:
    """Deny access to an unknown lease or to another tenant's.

    Both get the same answer, so that callers can't probe for ids.
    """
    return Denial(
        DenialReason.NOT_FOUND,
        f"You have no lease {lease_id:032x} here.",
        "Check the lease id and the node; a node forgets leases that ended long ago.",
    )


def revoked_long_ago(lease_id: int) -> Denial:
    """Deny work under a lease that was revoked so long ago that only this fact is still known."""
    reason, clause, hint = _ended(Cause.REVOKED)
    return Denial(reason, f"Lease {lease_id:032x} {clause}.", hint)


def shutting_down() -> Denial:
    """Deny a lease because the daemon is shutting down."""
    return Denial(
        DenialReason.SHUTTING_DOWN,
        "No lease can be granted because the daemon is shutting down.",
        "Try again once it is back, or on another node.",
    )


def draining(left_ns: int) -> Denial:
    """Deny a lease because the node is drained; `left_ns` is the time until the remaining leases end."""
    # After the deadline no time is left to report.
    if left_ns <= 0:
        return Denial(
            DenialReason.DRAINED,
            "No lease can be granted because the node is drained.",
            "Use another node, or ask this node's operator.",
        )
    left_ms = -(-left_ns // NS_PER_MS)
    return Denial(
        DenialReason.DRAINED,
        f"No lease can be granted because the node is being drained: in {duration_text(left_ms)} all leases end.",
        "Use another node, or ask this node's operator.",
    )


def card_draining(card_uuid: str, left_ns: int) -> Denial:
    """Deny memory of a card that is drained; `left_ns` is the time until its remaining leases end."""
    hint = "Leave the choice of the card to the daemon, use another node, or ask this node's operator."
    if left_ns <= 0:
        return Denial(DenialReason.DRAINED, f"Card {card_uuid} is drained: nothing on it can be granted.", hint)
    time_left = duration_text(-(-left_ns // NS_PER_MS))
    message = f"Card {card_uuid} is being drained: nothing on it can be granted, and in {time_left} its leases end."
    return Denial(DenialReason.DRAINED, message, hint)


def card_is_drained(card_uuid: str) -> Denial:
    """Deny a live lease more memory of a drained card.

    The status is not DRAINED, which clients take for the lease's end.
    """
    return Denial(
        DenialReason.BUSY,
        f"Card {card_uuid} is drained: nothing more is granted on it.",
        "Try again once its drain has ended, or when the lease is on another card.",
    )


def node_is_drained() -> Denial:
    """Deny a live lease more memory of a drained node. As above, the status is not DRAINED."""
    return Denial(
        DenialReason.BUSY,
        "The node is drained: nothing more is granted on it.",
        "Try again once its drain has ended, or use another node.",
    )


MEMBERSHIP_LOST: Final = "the node has been unable to reach its fleet's store for too long"
"""Why a claimed lease ends at its membership deadline, or is not granted after it."""


def isolated(reason: str) -> Denial:
    """Deny a claimed lease because the node may not serve any now; `reason` gives the cause as a clause."""
    return Denial(
        DenialReason.ISOLATED,
        f"This node can't grant named leases, or leases that count against a fleet quota, right now: {reason}.",
        "Try another node of the fleet.",
    )


def lease_isolated(lease: LeaseSnapshot) -> Denial:
    """Deny work because the lease is claimed and past its membership deadline, although no event has ended it yet."""
    reason, clause, hint = _ended(Cause.ISOLATED)
    return Denial(reason, _ended_text(lease, clause), hint)


# --- claims of names in the fleet ---


def name_taken(name: str, lease_id: int | None) -> Denial:
    """Deny a name that another lease of this node has until that lease's memory is proved free.

    `lease_id` is None if the lease belongs to another tenant, who must not be disclosed.
    """
    owner = "Another tenant's lease" if lease_id is None else f"Lease {lease_id:032x}"
    return Denial(
        DenialReason.NAME_TAKEN,
        f"{owner} has the name {name!r} until its memory is proved free.",
        "Wait until that lease's memory is free, or use another name. If the memory is fenced, an operator must clear"
        " the fence first.",
    )


def old_epoch(name: str, epoch: int, highest: int) -> Denial:
    """Deny a claim with an epoch that is not above the highest one that this node has served for the name."""
    return Denial(
        DenialReason.FENCED,
        f"The claim of the name {name!r} with epoch {epoch} has ended: this node has already served epoch {highest}.",
        "Acquire again. If it happens repeatedly, the fleet's etcd was probably restored from a backup; its operator "
        "must raise etcd's revision.",
    )


# --- grants and notes that can't be made durable in the audit log or the journal ---


def not_recorded(problem: str) -> Denial:
    """Deny a grant because the audit log can't be written and the operator requires it; `problem` says why."""
    return Denial(
        DenialReason.NOT_RECORDED,
        f"No lease can be granted because the audit log can't be written: {problem}.",
        "Try again later; an operator must repair the log.",
    )


def note_not_recorded(problem: str) -> Denial:
    """Deny a tenant's note because the audit log can't store it now; `problem` says why."""
    return Denial(
        DenialReason.NOT_RECORDED,
        f"The note may be missing from the audit log: {problem}.",
        "Send it again later; if it happens repeatedly, an operator must repair the log.",
    )


def invalid_note(problem: str) -> Denial:
    """Deny a note that can't become a record; `problem` says why."""
    return Denial(
        DenialReason.INVALID_REQUEST,
        f"The note must be a canonical JSON object: {problem}.",
        "Send one object of strings, integers, true, false and null, with sorted keys and without whitespace.",
    )


def too_many_notes(clause: str) -> Denial:
    """Deny a note that exceeds a limit; `clause` says which one, as a clause."""
    return Denial(
        DenialReason.RATE, f"The audit log can't accept another note yet: {clause}.", "Send the note again in a moment."
    )


NO_AUDIT_LOG: Final = Denial(
    DenialReason.UNSUPPORTED, "This daemon keeps no audit log.", "Its operator can set `audit` to a folder."
)
"""Denies a note because the node has no audit log."""


def not_kept(problem: str) -> Denial:
    """Deny a grant because the journal can't be written: a restarted daemon would have no record of the lease.

    `problem` says why.
    """
    return Denial(
        DenialReason.NOT_RECORDED,
        f"No lease can be granted or renewed because the journal can't be written: {problem}.",
        "Try again later; an operator must repair the disk, or make room on it.",
    )


def done_but_not_kept(clause: str, problem: str) -> Denial:
    """Report that an action was taken (`clause`, a main clause) but that the journal can't record it now."""
    return Denial(
        DenialReason.NOT_RECORDED,
        f"{clause}, but the journal can't be written: {problem}. If the daemon restarts before that is fixed, the"
        " change is lost.",
        "Query the lease's state; an operator must repair the disk, or make room on it.",
    )


# --- requests that are wrong, or beyond a limit ---


def invalid(message: str, hint: str) -> Denial:
    """Deny a request with values that are out of range or contradict each other."""
    return Denial(DenialReason.INVALID_REQUEST, message, hint)


def over_limit(name: str, message: str, hint: str) -> Denial:
    """Deny a request that exceeds the node's limit `name` (its name in the configuration)."""
    return Denial(DenialReason.LIMIT, f"{message} (limit {name}).", hint)


def over_tenant_limit(tenant: str, name: str, message: str, hint: str) -> Denial:
    """Deny a request that exceeds a tenant's limit `name` (its name in the configuration)."""
    return over_limit(f"{name} of tenant {tenant!r}", message, hint)


def over_fleet_bytes(lease_id: int, tenant: str, fleet_bytes: int) -> Denial:
    """Deny a larger size, because the fleet has claimed only the lease's first size from its tenant's quota."""
    return over_tenant_limit(
        tenant,
        "fleet_quota",
        f"Lease {lease_id:032x} counts {size_text(fleet_bytes)} against its tenant's fleet quota, and can't "
        "grow beyond that",
        "Acquire another lease.",
    )


def too_fast(tenant: str, per_minute: int, wait_ms: int) -> Denial:
    """Deny a lease because the tenant has exceeded its rate; it may ask again in `wait_ms`."""
    return Denial(
        DenialReason.RATE,
        f"Tenant {tenant!r} may request {counted(per_minute, 'lease')} per minute here (limit acquires_per_minute of"
        f" tenant {tenant!r}).",
        f"Try again in {duration_text(wait_ms)}.",
    )


def too_heavy(tenant: str, weight: int, max_weight: int) -> Denial:
    """Deny a lease with a larger weight than its tenant may have."""
    return over_tenant_limit(
        tenant,
        "max_weight",
        f"A weight of {weight} was requested, but this tenant's leases may have at most {max_weight}",
        "Request less, or ask the operator for a larger max_weight.",
    )


def no_latency(tenant: str) -> Denial:
    """Deny a lease of the latency class, because its tenant may not have one."""
    return over_tenant_limit(
        tenant,
        "may_latency",
        "A lease of the latency class was requested, but this tenant may not have one",
        "Leave latency() out, or ask the operator for may_latency.",
    )


# --- cards and their room ---


def unknown_card(selector: str, cards: Sequence[Card], otherwise: str = "") -> Denial:
    """Deny a request with a selector that matches no card of this node.

    `otherwise` completes the hint if a request may name no card: what to do instead of naming one.
    """
    names = ", ".join(f"{card.index} ({card.uuid}, {card.name})" for card in cards) or "none"
    return invalid(
        f"No card matches {selector[:MAX_QUOTED_CHARS]!r}; the cards of this node are: {names}.",
        f"Name a card by its uuid or its index{otherwise and f', or {otherwise}'}.",
    )


def no_partition() -> Denial:
    """Deny partition exclusivity on a device that is not partitioned."""
    return Denial(
        DenialReason.UNSUPPORTED,
        "Partition exclusivity can't be granted because the device is not a MIG partition.",
        "Request session or device exclusivity, or a card that is a partition.",
    )


def never_fits(size_bytes: int, largest_bytes: int, available_bytes: int) -> Denial:
    """Deny a lease that no candidate card could hold even if it were empty."""
    return Denial(
        DenialReason.CAPACITY_EXCEEDED,
        f"{size_text(size_bytes)} was requested, but the largest possible slice is "
        f"{size_text(largest_bytes)}; {size_text(available_bytes)} is available now.",
        "Request less: waiting would not help.",
    )


def no_room(size_bytes: int, largest_bytes: int, available_bytes: int, *, reason: str, waited_ms: int = 0) -> Denial:
    """Deny a lease because no card has room now; `reason` names the obstacle as a clause."""
    waited = f" after waiting {duration_text(waited_ms)}" if waited_ms else ""
    return Denial(
        DenialReason.CAPACITY_EXCEEDED,
        f"{size_text(size_bytes)} was requested and can't be granted{waited} because {reason}:"
        f" {size_text(available_bytes)} is available now, the largest possible slice is {size_text(largest_bytes)}.",
        "Request less, wait longer, or try another node.",
    )


# --- submits ---


def has_session(lease_id: int) -> Denial:
    """Deny a submit because the lease reserves no memory for submits next to its session."""
    return invalid(
        f"Lease {lease_id:032x} has no memory for one-shot submits: its session was opened, and holds all of it.",
        "Use a lease whose session was never opened, or reserve memory when you acquire: GpuBuilder().submits(bytes).",
    )


def no_context(lease_id: int) -> Denial:
    """Deny a submit because neither the card nor the lease has room for a second context."""
    return Denial(
        DenialReason.BUSY,
        f"A submit on lease {lease_id:032x} needs a separate context, and the card has no room for one now.",
        "Try again, or reserve room for submits when you acquire the lease: GpuBuilder().submits(bytes).",
    )


def no_time(timeout_ms: int) -> Denial:
    """Deny a submit with a timeout below 1 ms, in which no kernel could run."""
    return invalid(f"A submit's time limit must be at least 1 ms, not {timeout_ms} ms.", "Set a longer time limit.")


def busy(lease_id: int) -> Denial:
    """Deny a submit because the lease has one running and another one waiting."""
    return Denial(
        DenialReason.BUSY,
        f"Lease {lease_id:032x} has a submit running and another one waiting: a lease runs one at a time.",
        "Wait until one of them has ended.",
    )


def stuck(lease_id: int) -> Denial:
    """Deny a submit because the memory of an earlier one could not be proved free.

    The reason is not FENCED, which would mean that the whole lease is over.
    """
    return Denial(
        DenialReason.CAPACITY_EXCEEDED,
        f"Lease {lease_id:032x} accepts no more submits: the memory of an earlier one could not be proved free.",
        "Acquire a new lease. That memory stays fenced until an operator clears it.",
    )


def not_started(lease_id: int, reason: str) -> Denial:
    """Deny a submit because its worker failed to open its context."""
    return Denial(
        DenialReason.SESSION_FAILED,
        f"A submit on lease {lease_id:032x} could not start: {reason.rstrip('.')}.",
        "Nothing was run: try again; if it happens again, ask the operator.",
    )


def waited_in_vain(lease_id: int, waited_s: int) -> Denial:
    """Deny a submit because the previous one did not end within the time that a submit waits."""
    return Denial(
        DenialReason.BUSY,
        f"A submit on lease {lease_id:032x} waited {waited_s} s for the previous one, which is still running.",
        "Nothing was run: try again.",
    )


# --- ids and rights ---


def id_used(lease_id: int) -> Denial:
    """Deny a lease or region because its id is in use or out of range."""
    return invalid(
        f"Lease id {lease_id:032x} can't be used: it is already in use, or is not a u128 above 0.",
        "Choose another id at random.",
    )


def not_a_region(lease_id: int) -> Denial:
    """Deny an operation that only regions support."""
    return invalid(f"Lease {lease_id:032x} is not a region.", "Pass the id of a region.")


def not_its_tenant(region_id: int) -> Denial:
    """Deny the surrounding lease's tenant an operation that is reserved for the region's own tenant."""
    return Denial(
        DenialReason.NOT_ALLOWED,
        f"Lease {region_id:032x} is a region of another tenant; only that tenant may free it.",
        "To end it, revoke it.",
    )


def not_revocable(lease_id: int) -> Denial:
    """Deny a tenant's request to revoke its own lease or region. The tenant may free it instead."""
    return Denial(
        DenialReason.NOT_ALLOWED,
        f"You may not revoke lease {lease_id:032x}: only an operator can revoke a lease; only the tenant of the"
        " enclosing lease can revoke a region.",
        "Free it instead.",
    )


# --- regions ---


def no_regions(lease_id: int) -> Denial:
    """Deny a region because the session's driver or worker does not support regions."""
    return Denial(
        DenialReason.UNSUPPORTED,
        f"Lease {lease_id:032x} can't have regions: its session's driver or worker does not support them.",
        "Acquire a new lease, on a card whose driver supports regions.",
    )


def session_taken(lease_id: int) -> Denial:
    """Deny a region or a resize because a submit runs in place of the lease's session."""
    return Denial(
        DenialReason.BUSY,
        f"A submit is running on lease {lease_id:032x} and holds all of the lease's memory.",
        "Try again once the submit has ended.",
    )


def too_many_regions(lease_id: int) -> Denial:
    """Deny a region because the lease already has MAX_REGIONS of them."""
    return Denial(
        DenialReason.LIMIT,
        f"Lease {lease_id:032x} has {MAX_REGIONS} regions, the maximum for one session.",
        "Free a region that you no longer need.",
    )


def too_many_places(lease_id: int) -> Denial:
    """Deny a region because too many ended ones still keep their addresses."""
    return Denial(
        DenialReason.LIMIT,
        f"Lease {lease_id:032x} keeps the addresses of too many regions that have ended.",
        "Release these addresses in the session: region.close(), or REGION_RELEASE.",
    )


def regions_used_up(lease_id: int) -> Denial:
    """Deny a region because the lease has used up its region numbers."""
    return Denial(
        DenialReason.LIMIT,
        f"Lease {lease_id:032x} has opened as many regions as one lease may open before it ends.",
        "Acquire a new lease.",
    )


def region_too_large(lease_id: int, size_bytes: int, slice_bytes: int) -> Denial:
    """Deny a region that exceeds the whole slice of its lease."""
    return Denial(
        DenialReason.CAPACITY_EXCEEDED,
        f"A region of {size_text(size_bytes)} was requested, but the session of lease {lease_id:032x} has"
        f" {size_text(slice_bytes)} in all.",
        "Request less, or resize the lease: waiting would not help.",
    )


def regions_full(lease_id: int, size_bytes: int, left_bytes: int) -> Denial:
    """Deny a region because the lease's other regions leave too little of the slice."""
    return Denial(
        DenialReason.CAPACITY_EXCEEDED,
        f"A region of {size_text(size_bytes)} was requested, but lease {lease_id:032x} has only"
        f" {size_text(max(0, left_bytes))} left; its other regions hold the rest.",
        "Free a region, release the addresses of ended ones, or request less.",
    )


def region_refused(reason: str) -> Denial:
    """Deny a region because its session can't map it; `reason` is the session's own sentence."""
    return Denial(
        DenialReason.CAPACITY_EXCEEDED,
        f"The session can't open the region: {reason.rstrip('.')}.",
        "Free memory of the session, or request less.",
    )


def session_silent(lease_id: int, clause: str, waited_s: int) -> Denial:
    """Deny a request that a lease's session did not carry out in time; `clause` is a clause without a subject."""
    return Denial(
        DenialReason.BUSY,
        f"The session of lease {lease_id:032x} did not {clause} within {waited_s} s.",
        "Check the lease with `lease.query()` or `gpulease leases`, then try again.",
    )


# --- resizes ---


def is_region(region_id: int) -> Denial:
    """Deny a resize of a region; the size of a region is fixed."""
    return invalid(
        f"Lease {region_id:032x} is a region, and the size of a region is fixed.",
        "Open another region of the size you need.",
    )


def is_resizing(lease_id: int) -> Denial:
    """Deny a resize because an earlier one is still in progress."""
    return Denial(
        DenialReason.BUSY,
        f"Lease {lease_id:032x} is already being resized.",
        "Try again once that resize has ended.",
    )


def no_room_to_grow(lease_id: int, more_bytes: int, available_bytes: int) -> Denial:
    """Deny a larger size because the card has too little memory that is neither held nor waited for."""
    return Denial(
        DenialReason.CAPACITY_EXCEEDED,
        f"Lease {lease_id:032x} can't grow by {size_text(more_bytes)}: its card has"
        f" {size_text(max(0, available_bytes))} that is neither leased nor reserved for waiting requests.",
        "Request less, or try again later.",
    )


def too_small_for_regions(lease_id: int, size_bytes: int, region_bytes: int) -> Denial:
    """Deny a smaller size because the lease's regions and submits hold more."""
    return Denial(
        DenialReason.CAPACITY_EXCEEDED,
        f"Lease {lease_id:032x} can't shrink to {size_text(size_bytes)}: its regions and submits hold"
        f" {size_text(region_bytes)}.",
        "Free regions first, or choose a larger size.",
    )


def resize_refused(lease_id: int, doubt: str, size_bytes: int) -> Denial:
    """Report a resize that the session did not carry out.

    `doubt` says why; `size_bytes` is the size that the lease has now.
    """
    return Denial(
        DenialReason.CAPACITY_EXCEEDED,
        f"Lease {lease_id:032x} could not be resized: {doubt.rstrip('.')}; its size is now {size_text(size_bytes)}.",
        "Free memory of the session, and try again.",
    )


# --- parking ---


def not_parkable(lease_id: int) -> Denial:
    """Deny a park of a lease that was not acquired as parkable, or of a region."""
    return Denial(
        DenialReason.UNSUPPORTED,
        f"Lease {lease_id:032x} is not parkable, so its memory stays on its card.",
        "Acquire the lease with .parkable().",
    )


def parking_off(lease_id: int) -> Denial:
    """Deny a park because the operator provides no host memory for parked sessions."""
    return Denial(
        DenialReason.UNSUPPORTED,
        f"Lease {lease_id:032x} can't be parked: this node keeps no host memory for parked sessions.",
        "Ask the operator to set park_memory.",
    )


def no_host_memory(lease_id: int, needed_bytes: int, left_bytes: int) -> Denial:
    """Deny a park because the host memory for parked sessions is in use."""
    return Denial(
        DenialReason.CAPACITY_EXCEEDED,
        f"Lease {lease_id:032x} can't be parked: it needs {size_text(needed_bytes)} of host memory, and"
        f" {size_text(max(0, left_bytes))} of park_memory is left.",
        "Free a parked lease, or bring one back to its card by using it; or ask the operator to raise park_memory.",
    )


def region_moves(lease_id: int) -> Denial:
    """Deny a park because a region of the lease is being opened or ended."""
    return Denial(
        DenialReason.BUSY,
        f"Lease {lease_id:032x} can't be parked now: a region of it is being opened or ended.",
        "Try again in a moment.",
    )


def has_fenced_region(lease_id: int) -> Denial:
    """Deny a park because the memory of an ended region was never shown free."""
    return Denial(
        DenialReason.BUSY,
        f"Lease {lease_id:032x} can't be parked: the memory of a region that ended was not proved free.",
        "End the lease, or have an operator clear the card's fences.",
    )


def has_submit(lease_id: int) -> Denial:
    """Deny a park because a submit of the lease runs or waits."""
    return Denial(
        DenialReason.BUSY,
        f"Lease {lease_id:032x} can't be parked: it has a submit in progress.",
        "Try again after its end.",
    )


def too_many_parks(lease_id: int, wait_ms: int) -> Denial:
    """Deny a park because its card has reached `parks_per_minute`."""
    return Denial(
        DenialReason.RATE,
        f"Lease {lease_id:032x} can't be parked now: its card has reached parks_per_minute.",
        f"Try again in {duration_text(wait_ms)}.",
    )


def is_returning(lease_id: int) -> Denial:
    """Deny a park because an operation is bringing the session back."""
    return Denial(
        DenialReason.BUSY,
        f"Lease {lease_id:032x} is returning to its card, because an operation of its tenant needs it.",
        "Try again when that operation has ended.",
    )


def too_many_deferred(lease_id: int, most: int) -> Denial:
    """Deny a region, a resize, a submit or a move because too many of these wait for the session's return."""
    return Denial(
        DenialReason.BUSY,
        f"Lease {lease_id:032x} is returning to its card, and {most} requests, the maximum, already wait for that.",
        "Try again after they have been answered.",
    )


def return_refused(reason: str) -> Denial:
    """Deny a request that needs the session on its card; `reason` is a sentence that says why it can't return."""
    return Denial(DenialReason.BUSY, reason, "Try again later: nothing of the session is lost.")


def park_refused(lease_id: int, reason: str) -> Denial:
    """Report a park that the session did not carry out; `reason` is its worker's clause."""
    return Denial(
        DenialReason.BUSY,
        f"Lease {lease_id:032x} was not parked: {reason.rstrip('.')}.",
        "Try again when the session is idle.",
    )


def cant_leave(lease_id: int, reason: str, *, is_lasting: bool = True) -> Denial:
    """Deny a move, or a cold park, of a session that can't leave its process; `reason` is its worker's clause.

    `is_lasting`: Whether the reason is permanent, such as something that the session contains.
    """
    if not is_lasting:
        return Denial(
            DenialReason.BUSY,
            f"Lease {lease_id:032x}'s session can't be moved to another process now: {reason.rstrip('.')}.",
            "Try again in a moment.",
        )
    return Denial(
        DenialReason.UNSUPPORTED,
        f"Lease {lease_id:032x}'s session can't be moved to another process: {reason.rstrip('.')}.",
        "You can still park it without moving it (a warm park).",
    )


def is_moving(lease_id: int) -> Denial:
    """Deny a move of a session that is being moved."""
    return Denial(DenialReason.BUSY, f"Lease {lease_id:032x} is being moved.", "Wait until the move has ended.")


def is_there(lease_id: int, card_uuid: str) -> Denial:
    """Deny a move to the card that the lease is on."""
    return invalid(f"Lease {lease_id:032x} is already on card {card_uuid}.", "Name another card.")


def not_its_card(lease_id: int, tenant: str, card_uuid: str) -> Denial:
    """Deny a move to a card that the lease's tenant may not use, whoever requests the move."""
    return over_tenant_limit(
        tenant,
        "devices",
        f"Lease {lease_id:032x} can't move to card {card_uuid}, which its tenant may not use",
        "Name another card, or ask the operator.",
    )


def no_place(lease_id: int, card_uuid: str) -> Denial:
    """Deny a move to a card that can't take the lease, even if others make room."""
    return Denial(
        DenialReason.CAPACITY_EXCEEDED,
        f"Card {card_uuid} can't take lease {lease_id:032x}: the card is too small, is leased exclusively, or has as "
        "many parkable leases as overcommit allows.",
        "Name another card.",
    )


def no_room_to_return(lease_id: int, needed_bytes: int, free_bytes: int, waited_ms: int) -> str:
    """Return the reason for which a parked session's operations are refused: it lacks the room to return."""
    return (
        f"Lease {lease_id:032x} is parked and can't return: it needs {size_text(needed_bytes)}, and its card has"
        f" {size_text(free_bytes)} free after a wait of {duration_text(waited_ms)}."
    )


def return_failed(lease_id: int, reason: str) -> str:
    """Return why a parked session's operations are refused after a failed return, with its worker's `reason`."""
    return f"Lease {lease_id:032x} is parked and could not return: {reason.rstrip('.')}."
