"""The rights of a guest: a connection that attached with a token.

The broker checks the token once. From then on a request costs one lookup in a table of permissions. The clock and the
lease's generation are read for every request anyway.
"""

from hashlib import blake2b
from typing import Any, Final

from gpulease.protocol.capabilities import SESSION_PERMISSIONS, Permission, names_of
from gpulease.protocol.errors import FramingError
from gpulease.protocol.failures import Failure
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.framing import Frame
from gpulease.protocol.opcodes import Flag, Opcode, Status
from gpulease.protocol.operations import missing_permission

_MARK_BYTES: Final = 8

_NAMES = {int(op): op.name for op in Opcode}


def mark_of(nonce: bytes) -> int:
    """Return a u64 for a token's nonce, never 0. Only a lease's own tenant could force a collision, by brute force."""
    return int.from_bytes(blake2b(nonce, digest_size=_MARK_BYTES).digest(), "big") or 1


@dataclass(frozen=True, slots=True)
class Guest:
    """The terms of a guest's token.

    Attributes:
        permissions: The operations that it permits.
        expires_ns: When it ends, on the monotonic clock.
        generation: The lease's generation; the token ends with it.
        mark: The number by which the lease's page names the token once it is revoked; see `mark_of`.
    """

    permissions: Permission
    expires_ns: int
    generation: int
    mark: int

    def holds(self, now_ns: int, generation: int) -> bool:
        """Return whether the token is valid, while the lease is of that generation."""
        return now_ns < self.expires_ns and generation == self.generation

    def refuse(self, frame: Frame) -> bytes | None:
        """Return the reply to a request that the token does not permit; None if it does, or if it is not a request.

        Raises FramingError for a quiet request: the session would keep its failure for the next connection that syncs.
        """
        # Frames without a request id get no reply, and unknown flags are refused elsewhere.
        if frame.request_id == 0 or frame.flags not in (0, Flag.QUIET):
            return None
        missing = missing_permission(frame.op, self.permissions)
        if not missing:
            return None
        # The message names the operation and what the token does permit, which its holder may know.
        name = _NAMES.get(frame.op, f"operation {frame.op:#06x}")
        allowed = ", ".join(names_of(self.permissions & SESSION_PERMISSIONS))
        failure = Failure(
            Status.DENIED,
            f"the token this connection attached with does not permit {name}, only {allowed}",
            hint="Attach with a token that permits it.",
        )
        # A quiet request has no reply of its own. Its failure would be reported at the next sync, which may be another
        # connection's.
        if frame.flags:
            raise FramingError(
                f"{failure.message}; because the request was quiet, it ended the connection", failure.status
            )
        return failure.to_frame(frame.op, request_id=frame.request_id, session_id=frame.session_id)

    def to_message(self) -> list[int]:
        """Return the terms as the worker receives them."""
        return [int(self.permissions), self.expires_ns, self.generation, self.mark]

    @classmethod
    def from_message(cls, message: Any) -> "Guest | None":
        """Return the terms that arrived; None for no token. Raises ValueError or TypeError."""
        if message is None:
            return None
        permissions, expires_ns, generation, mark = map(int, message)
        return cls(Permission(permissions), expires_ns, generation, mark)
