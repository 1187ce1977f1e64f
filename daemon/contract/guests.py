"""What a connection that attached with a token may do.

The token was checked once, by the broker; from then on an operation costs one look into a table, and at the clock and
the lease's generation that are looked at anyway.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

from gpulease.protocol.capabilities import SESSION_PERMISSIONS, Permission, missing_permission, names_of
from gpulease.protocol.errors import FramingError
from gpulease.protocol.failures import Failure
from gpulease.protocol.framing import Frame
from gpulease.protocol.opcodes import Flag, Opcode, Status

_MARK_BYTES: Final = 8

_NAMES = {int(op): op.name for op in Opcode}


def mark_of(nonce: bytes) -> int:
    """One word for a token's nonce, never 0: two of a lease are the same by its own tenant's long work alone."""
    return int.from_bytes(blake2b(nonce, digest_size=_MARK_BYTES).digest(), "big") or 1


@dataclass(frozen=True, slots=True)
class Guest:
    """A token's bearer.

    Attributes:
        permissions: What it permits.
        expires_ns: When it ends, on the monotonic clock.
        generation: The lease's; it ends with that.
        mark: What the token is known by on the page once it is revoked; see `mark_of`.
    """

    permissions: Permission
    expires_ns: int
    generation: int
    mark: int

    def holds(self, now_ns: int, generation: int) -> bool:
        """Whether it is good for anything, while the lease is of that generation."""
        return now_ns < self.expires_ns and generation == self.generation

    def refuse(self, frame: Frame) -> bytes | None:
        """The reply to a request that it does not permit; None if it does, or if the frame is no request at all.

        Raises FramingError for a quiet one: its failure would be kept for whoever asks next.
        """
        if frame.request_id == 0 or frame.flags not in (0, Flag.QUIET):
            return None
        missing = missing_permission(frame.op, self.permissions)
        if not missing:
            return None
        name = _NAMES.get(frame.op, f"operation {frame.op:#06x}")
        allowed = ", ".join(names_of(self.permissions & SESSION_PERMISSIONS))
        failure = Failure(
            Status.DENIED,
            f"the token this connection attached with does not permit {name}, only {allowed}",
            hint="Attach with a token that permits it.",
        )
        if frame.flags:
            raise FramingError(
                f"{failure.message}; asked for without an answer, it ended the connection", failure.status
            )
        return failure.to_frame(frame.op, request_id=frame.request_id, session_id=frame.session_id)

    def to_message(self) -> list[int]:
        """As it travels to the worker."""
        return [int(self.permissions), self.expires_ns, self.generation, self.mark]

    @classmethod
    def from_message(cls, message: Any) -> "Guest | None":
        """As it arrived; None for no token. Raises ValueError."""
        if message is None:
            return None
        permissions, expires_ns, generation, mark = map(int, message)
        return cls(Permission(permissions), expires_ns, generation, mark)
