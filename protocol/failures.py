"""An error reply as one value, and the sentences about the ends of leases.

`Failure` holds an error's status, text and details; the details are sent as TLVs. `LEASE_ENDS` is the only table of
ends: it gives each cause's status, its texts and a hint for the tenant.
"""

import struct
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Final

from gpulease.protocol.codec import build_body, parse_body
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.framing import build_frame
from gpulease.protocol.limits import MAX_ERROR_TEXT_BYTES, MAX_TLVS
from gpulease.protocol.messages import ErrorBody
from gpulease.protocol.opcodes import ErrorTlv, Flag, Status
from gpulease.protocol.primitives import Tlv
from gpulease.protocol.session_words import ENDED_WORDS, STATUS_OF_WORD, RegionWord

_STATUSES: Final = {int(status): status for status in Status}
_U16: Final = struct.Struct(">H")
_U32: Final = struct.Struct(">I")
_TLV: Final = struct.Struct(">BH")
"""A TLV before its value: the type, and the value's size."""


@dataclass(slots=True)
class Failure:
    """A failed request. Treat it as immutable: it is not frozen because making a frozen one takes three times as long.

    Attributes:
        status: The kind of failure.
        message: A sentence that says what failed and why.
        hint: A sentence that says what to do about it, or "".
        failed_request_id: The quiet request that failed, if that is an earlier one than the answered request.
        failed_op: The operation of that quiet request.
        kernel: The kernel that failed.
        address: The device address that the kernel faulted at.
        log: The compiler's log.
        line: The line of the PTX source that the log names, 1-based.
        region: The affected region, by its lease id; None if the whole lease is affected. The session and its other
          regions continue.
        site: Index of the refused launch in its burst or graph.
        flipped_ns: When the broker changed the region's word, on the host's monotonic clock.
        position: The number that the client passed with the launch.
        is_kill: Whether a lease ended because its worker was killed from outside, and not because of its own work. This
          is not sent, but derived from LEASE_QUERY's report.
    """

    status: Status
    message: str
    hint: str = ""
    failed_request_id: int | None = None
    failed_op: int | None = None
    kernel: str = ""
    address: int | None = None
    log: str = ""
    line: int = 0
    region: int | None = None
    site: int | None = None
    flipped_ns: int | None = None
    position: int | None = None
    is_kill: bool = False

    def to_body(self) -> ErrorBody:
        """Return the reply's payload, with texts cut to MAX_ERROR_TEXT_BYTES."""
        # Send only details that have a value: a missing value would look like an empty one.
        details = [
            Tlv(kind, value)
            for kind, value in (
                (ErrorTlv.HINT, _cut(self.hint)),
                (ErrorTlv.FAILED_REQUEST_ID, _integer(self.failed_request_id, 8)),
                (ErrorTlv.FAILED_OP, _integer(self.failed_op, 2)),
                (ErrorTlv.KERNEL, _cut(self.kernel)),
                (ErrorTlv.ADDRESS, _integer(self.address, 8)),
                (ErrorTlv.LOG, _cut_start(self.log)),
                (ErrorTlv.LINE, _integer(self.line or None, 4)),
                (ErrorTlv.REGION, _integer(self.region, 16)),
                (ErrorTlv.SITE, _integer(self.site, 4)),
                (ErrorTlv.FLIPPED_NS, _integer(self.flipped_ns, 8)),
                (ErrorTlv.POSITION, _integer(self.position, 8)),
            )
            if value
        ]
        return ErrorBody(_cut(self.message).decode(), tuple(details))

    def to_frame(self, op: int, *, request_id: int, session_id: int = 0) -> bytes:
        """Return the whole error reply to a request.

        A frame with GOODBYE and request 0 contains the reason why the sender closes the connection.
        """
        payload = build_body(self.to_body())
        return build_frame(
            op, payload, request_id=request_id, session_id=session_id, flags=Flag.REPLY, status=self.status
        )

    @classmethod
    def from_body(cls, status: int, body: ErrorBody) -> "Failure":
        """Return the failure that an error reply carries.

        Skips unknown TLVs and numbers of a wrong width. An unknown status becomes INTERNAL.
        """
        # If a TLV occurs twice, the last one counts.
        return cls._with_details(status, body.message, {tlv.type: tlv.value for tlv in body.details})

    @classmethod
    def from_payload(cls, status: int, payload: bytes | memoryview) -> "Failure":
        """Return the failure of an error reply's payload. Raises BodyError if the payload is malformed.

        The result is that of `from_body` for the parsed payload, in a third of the time.
        """
        data = bytes(payload)
        values: dict[int, bytes] = {}
        # Step 1: parse it by hand, as `ErrorBody` defines it, because the parser takes most of a refusal's time.
        with suppress(struct.error, UnicodeDecodeError):
            (message_bytes,) = _U32.unpack_from(data)
            at = _U32.size + message_bytes
            message = data[_U32.size : at].decode()
            (count,) = _U16.unpack_from(data, at)
            at += _U16.size
            if message_bytes <= MAX_ERROR_TEXT_BYTES and count <= MAX_TLVS:
                for _ in range(count):
                    kind, value_bytes = _TLV.unpack_from(data, at)
                    at += _TLV.size + value_bytes
                    values[kind] = data[at - value_bytes : at]
                # The payload is valid if every byte was used, and none beyond its end.
                if at == len(data):
                    return cls._with_details(status, message, values)
        # Step 2: parse by the definition, which reports what is wrong.
        return cls.from_body(status, parse_body(ErrorBody, data))

    @classmethod
    def _with_details(cls, status: int, message: str, details: Mapping[int, bytes]) -> "Failure":
        failure = cls(_STATUSES.get(status, Status.INTERNAL), message)
        for kind, value in details.items():
            name, width_bytes = _DETAILS.get(kind, ("", 0))
            if width_bytes:
                # A number of another width comes from a later version, or from a peer's mistake. Ignore it, because a
                # wrong number would be worse than none.
                if len(value) == width_bytes:
                    setattr(failure, name, int.from_bytes(value, "big"))
            elif name:
                setattr(failure, name, value.decode(errors="replace"))
        return failure


_DETAILS: Final[Mapping[int, tuple[str, int]]] = {
    ErrorTlv.HINT: ("hint", 0),
    ErrorTlv.FAILED_REQUEST_ID: ("failed_request_id", 8),
    ErrorTlv.FAILED_OP: ("failed_op", 2),
    ErrorTlv.KERNEL: ("kernel", 0),
    ErrorTlv.ADDRESS: ("address", 8),
    ErrorTlv.LOG: ("log", 0),
    ErrorTlv.LINE: ("line", 4),
    ErrorTlv.REGION: ("region", 16),
    ErrorTlv.SITE: ("site", 4),
    ErrorTlv.FLIPPED_NS: ("flipped_ns", 8),
    ErrorTlv.POSITION: ("position", 8),
}
"""By a detail's type: the attribute of `Failure`, and the width of its number in bytes; 0 for a text."""


class Refused(Exception):
    """A request is refused.

    Attributes:
        failure: The answer to the request.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(frozen=True, slots=True)
class LeaseEnd:
    """A cause that ends a lease, and the sentences about it.

    Attributes:
        status: The status of all later requests about the lease.
        words: A sentence without a full stop, for the tenant of the ended session.
        predicate: The rest of a sentence that begins with "Lease <id>", for a request that the broker refuses.
        hint: A sentence that says what the tenant can do next.
    """

    status: Status
    words: str
    predicate: str
    hint: str


KILLED: Final = "was killed by SIGKILL"
"""The reason for the cause `worker_died` if an operator killed the worker, or the kernel did because the host was out
of memory. A fault in the worker's own work ends it with other signals, and each kill by the daemon has its own cause.
"""

REGION_KEPT: Final = "could not be taken away"
"""If a lease ended because the memory of one of its regions could not be removed, the reason contains these words."""

_ACQUIRE_OR_REPORT: Final = "Acquire a new lease; if it happens again, report it to the operator."

LEASE_ENDS: Final[Mapping[str, LeaseEnd]] = MappingProxyType(
    # Ends that the tenant or its clock caused.
    {
        "freed": LeaseEnd(Status.LEASE_FREED, "the lease was freed", "was already freed", "Acquire a new lease."),
        "abandoned": LeaseEnd(
            Status.LEASE_FREED,
            "the client disconnected before the lease was granted",
            "was freed because its client disconnected before the lease was granted",
            "Acquire a new lease.",
        ),
        "expired": LeaseEnd(
            Status.LEASE_EXPIRED,
            "the lease expired",
            "has expired",
            "Acquire a new lease, and renew it in time.",
        ),
        "orphaned": LeaseEnd(
            Status.LEASE_EXPIRED,
            "the lease was orphaned",
            "was orphaned",
            "Acquire a new lease, and keep a connection to it, or acquire it with "
            "GpuBuilder().orphan_secs(0), so that it needs none.",
        ),
        # Ends that an operator, or the fleet, caused.
        "revoked": LeaseEnd(
            Status.REVOKED,
            "the lease was revoked",
            "was revoked",
            "Ask the operator for the reason before you acquire another lease.",
        ),
        "isolated": LeaseEnd(
            Status.REVOKED,
            "the lease's node was isolated from its fleet, so another node may serve the name",
            "ended because its node was isolated from its fleet, and another node may serve its name",
            "Acquire the name again, on another node of the fleet.",
        ),
        "drained": LeaseEnd(
            Status.DRAINED,
            "the lease ended because its node was drained",
            "ended because the node was drained",
            "Acquire a new lease on another node.",
        ),
        # Ends that the node caused.
        "shutdown": LeaseEnd(
            Status.DISCONNECTED,
            "the daemon shut down",
            "ended because the daemon is shutting down",
            "Acquire a new lease once the daemon is back, or on another node.",
        ),
        # Ends that the session's own work, or its worker, caused. Each has the status SESSION_FAILED: a new lease can
        # be acquired at once.
        "faulted": LeaseEnd(
            Status.SESSION_FAILED,
            "the session's GPU context failed",
            "ended because its context was lost",
            "Fix the kernel that faulted, then acquire a new lease.",
        ),
        "worker_died": LeaseEnd(
            Status.SESSION_FAILED,
            "the session's process died",
            "ended because its worker died",
            _ACQUIRE_OR_REPORT,
        ),
        "spawn_failed": LeaseEnd(
            Status.SESSION_FAILED,
            "the session's process could not be started",
            "ended before it began because its worker could not start",
            "Try again; if it happens again, report it to the operator.",
        ),
        "unresponsive": LeaseEnd(
            Status.SESSION_FAILED,
            "the session's process stopped responding",
            "ended because its worker stopped responding",
            _ACQUIRE_OR_REPORT,
        ),
        "over_slice": LeaseEnd(
            Status.SESSION_FAILED,
            "the session held more of the card than was leased",
            "ended because its session held more of the card than was leased",
            "Acquire a lease with more min_vram, and report the problem to the operator.",
        ),
        "unmeasured": LeaseEnd(
            Status.SESSION_FAILED,
            "the node could not read how much of the card the session held",
            "ended because its node could not read how much of the card its session held",
            "The session did nothing wrong: acquire a new lease, on another node if this one fails again.",
        ),
        "kernel_timeout": LeaseEnd(
            Status.SESSION_FAILED,
            "a kernel ran for longer than the lease allows",
            "ended because a kernel ran for longer than the lease allows",
            "Fix the kernel, or acquire a lease with a larger max_kernel_secs.",
        ),
        "load_timeout": LeaseEnd(
            Status.SESSION_FAILED,
            "an image took longer to compile than the node allows",
            "ended because an image took longer to compile than this node allows",
            "Load the image in parts, or load a cubin; the operator's limit is max_load_s.",
        ),
    }
)
"""Every cause that LEASE_QUERY's report may name."""


_REGION_KEPT_END: Final = LeaseEnd(
    Status.SESSION_FAILED,
    "a region of the session could not be ended",
    "ended because one of its regions could not be ended",
    "Keep launches that name regions shorter than the operator's region_grace_ms; if they already are, "
    "report it to the operator.",
)
"""Used in place of the end of `kernel_timeout`, whose text is about `max_kernel_secs`."""


def lease_end(cause: str, reason: str = "") -> LeaseEnd:
    """Return how a lease ended.

    Args:
        cause: The cause. An unknown cause, which a later daemon may send, counts as a failed session.
        reason: The cause in the daemon's words.
    """
    if cause == "kernel_timeout" and REGION_KEPT in reason:
        return _REGION_KEPT_END
    if (known := LEASE_ENDS.get(cause)) is not None:
        return known
    return LeaseEnd(Status.SESSION_FAILED, f"the lease ended ({cause})", f"ended ({cause})", _ACQUIRE_OR_REPORT)


SESSION_REFUSALS: Final[Mapping[Status, tuple[str, str]]] = MappingProxyType(
    # A session's texts about its lease's end; the broker uses those of LEASE_ENDS.
    {
        Status.LEASE_EXPIRED: ("the lease has expired", LEASE_ENDS["expired"].hint),
        Status.REVOKED: (LEASE_ENDS["revoked"].words, LEASE_ENDS["revoked"].hint),
        Status.LEASE_FREED: (LEASE_ENDS["freed"].words, LEASE_ENDS["freed"].hint),
        Status.DISCONNECTED: (
            "the daemon is stopping",
            "Acquire a new lease once it is back, or on another node.",
        ),
        # Statuses of a single session or connection, which do not end the lease.
        Status.DRAINED: ("the node was drained", LEASE_ENDS["drained"].hint),
        Status.TIMED_OUT: (
            "the submit took longer than its time limit",
            "Set a longer limit with .timeout_secs(seconds), or make the kernel shorter.",
        ),
        Status.DENIED: (
            "the token with which this connection attached is no longer valid: it expired or was "
            "revoked, or the lease was renewed",
            "Get a new token and attach again.",
        ),
        Status.SESSION_FAILED: ("the session has failed", "Ask the daemon why, then acquire a new lease."),
    }
)
"""Words and hint of a session's refusal, by the status on its control page.

A session has the status of its lease's end, but not the cause. DENIED is never on the page; it is for guests with an
expired token."""


def _integer(value: int | None, width_bytes: int) -> bytes:
    return b"" if value is None else value.to_bytes(width_bytes, "big")


def _cut(value: str) -> bytes:
    data = value.encode(errors="replace")
    # A cut may fall inside a character: decode drops the incomplete one, so that the text stays UTF-8.
    return data[:MAX_ERROR_TEXT_BYTES].decode(errors="ignore").encode()


def _cut_start(value: str) -> bytes:
    # A compiler reports the error last, so keep the end of a long log.
    data = value.encode(errors="replace")
    return data[-MAX_ERROR_TEXT_BYTES:].decode(errors="ignore").encode()


_REGION_REFUSALS: Final[Mapping[Status, tuple[str, str]]] = MappingProxyType(
    {
        Status.REVOKED: ("was revoked", "Ask for the reason of the revocation; open another region, and use that one."),
        Status.LEASE_EXPIRED: ("has expired", "Open another region, and renew it in time."),
        Status.LEASE_FREED: ("was freed", "Remove it from every region set."),
        Status.CANCELLED: ("is cancelled", "Leave it out of the region set until it is resumed."),
        Status.FENCED: ("has ended or never began", "Make a region set without it."),
    }
)
"""The words about the region and the hint, by the refusal's status."""

_FENCED_REFUSAL: Final = (Status.FENCED, *_REGION_REFUSALS[Status.FENCED])

_REFUSAL_OF_WORD: Final = {word: (status, *_REGION_REFUSALS[status]) for word, status in STATUS_OF_WORD.items()}
"""By a region's word: status, words and hint of the first refusal. It is one table, so that a single look-up suffices
while a tenant waits."""


def region_refusal(
    region_id: int,
    word: RegionWord,
    flipped_ns: int,
    *,
    is_repeat: bool,
    kernel: str,
    site: int,
    position: int | None,
) -> Failure:
    """Return the failure of a launch or copy that is refused because of a region's word.

    Args:
        region_id: The region.
        word: Its word; NONE if its slot now has another region.
        flipped_ns: When the word was written, on the host's monotonic clock.
        is_repeat: Whether an earlier refusal has reported how the region ended: then this one reports FENCED.
        kernel: The kernel; "" for a copy, and for a graph of several.
        site: Index of the launch in its burst or graph.
        position: The position that the launch passed; None for a copy.
    """
    # Report once how a region ended. If a program continues to launch, it gets FENCED, which does not report the cause.
    # A word that is not in the table, including NONE, means that the region has left the slot.
    is_fenced = is_repeat and word in ENDED_WORDS
    status, message, hint = _FENCED_REFUSAL if is_fenced else _REFUSAL_OF_WORD.get(word, _FENCED_REFUSAL)
    # Kernel, site and position identify the launch, so that a program can find the work that was not done.
    return Failure(
        status,
        f"region {region_id:032x} {message}",
        hint,
        kernel=kernel,
        region=region_id,
        site=site,
        flipped_ns=flipped_ns,
        position=position,
    )
