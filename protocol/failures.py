"""What an error reply says, as one value: status, text, and the details other languages can read as TLVs."""

from dataclasses import dataclass

from gpulease.protocol.codec import build_body
from gpulease.protocol.framing import build_frame
from gpulease.protocol.limits import MAX_ERROR_TEXT_BYTES
from gpulease.protocol.messages import ErrorBody
from gpulease.protocol.opcodes import ErrorTlv, Flag, Status
from gpulease.protocol.primitives import Tlv

_STATUSES = {int(status): status for status in Status}


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed request.

    Attributes:
        status: Which failure.
        message: What failed and why, a sentence.
        hint: What to do about it, a sentence or "".
        failed_request_id: The quiet request that failed, if it was an earlier one than the one answered.
        failed_op: That request's operation.
        kernel: The kernel that failed.
        address: The device address a kernel faulted at.
        log: The compiler's log.
        line: The line of the PTX source the log speaks of, 1-based.
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

    def to_body(self) -> ErrorBody:
        """The reply's payload, its texts cut to what fits."""
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
            )
            if value
        ]
        return ErrorBody(_cut(self.message).decode(), tuple(details))

    def to_frame(self, op: int, *, request_id: int, session_id: int = 0) -> bytes:
        """The whole error reply to a request; with GOODBYE and request 0, why the connection is closed."""
        payload = build_body(self.to_body())
        return build_frame(
            op, payload, request_id=request_id, session_id=session_id, flags=Flag.REPLY, status=self.status
        )

    @classmethod
    def from_body(cls, status: int, body: ErrorBody) -> "Failure":
        """The failure an error reply tells of.

        Unknown TLVs and numbers of a wrong width are skipped; an unknown status is INTERNAL.
        """
        found = {tlv.type: tlv.value for tlv in body.details}

        def text(kind: ErrorTlv) -> str:
            return found.get(kind, b"").decode(errors="replace")

        def number(kind: ErrorTlv, width_bytes: int) -> int | None:
            value = found.get(kind, b"")
            return int.from_bytes(value, "big") if len(value) == width_bytes else None

        return cls(
            status=_STATUSES.get(status, Status.INTERNAL),
            message=body.message,
            hint=text(ErrorTlv.HINT),
            failed_request_id=number(ErrorTlv.FAILED_REQUEST_ID, 8),
            failed_op=number(ErrorTlv.FAILED_OP, 2),
            kernel=text(ErrorTlv.KERNEL),
            address=number(ErrorTlv.ADDRESS, 8),
            log=text(ErrorTlv.LOG),
            line=number(ErrorTlv.LINE, 4) or 0,
        )


def _integer(value: int | None, width_bytes: int) -> bytes:
    return b"" if value is None else value.to_bytes(width_bytes, "big")


def _cut(value: str) -> bytes:
    data = value.encode(errors="replace")
    return data[:MAX_ERROR_TEXT_BYTES].decode(errors="ignore").encode()


def _cut_start(value: str) -> bytes:
    # A compiler says what went wrong last, so a long log keeps its end.
    data = value.encode(errors="replace")
    return data[-MAX_ERROR_TEXT_BYTES:].decode(errors="ignore").encode()
