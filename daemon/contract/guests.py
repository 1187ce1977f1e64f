"""The rights of a guest: a connection that attached with a token.

The broker checks the token once, when the guest attaches. After that, each request costs one lookup in a table of
permissions. The worker reads the clock and the lease's generation for every request anyway.
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
        expires_ns: When the token expires, on the monotonic clock.
        generation: The generation of the lease for which the token is valid.
        mark: The number by which the lease's page names the token after it is revoked; see `mark_of`.
    """

    permissions: Permission
    expires_ns: int
    generation: int
    mark: int

    def holds(self, now_ns: int, generation: int) -> bool:
        """Return whether the token is valid at `now_ns` for a lease of that generation."""
        return now_ns < self.expires_ns and generation == self.generation

    def refuse(self, frame: Frame) -> bytes | None:
        """Return the refusal of a request that the token does not permit; None if it does, or if it is not a request.

        Raises FramingError for a quiet request, because the session would report the refusal to the next connection
        that syncs.
        """
        # Frames without a request id get no reply, and unknown flags are refused elsewhere.
        if frame.request_id == 0 or frame.flags not in (0, Flag.QUIET):
            return None
        missing = missing_permission(frame.op, self.permissions)
        if not missing:
            return None
        # The message names the operation and the token's permissions, both of which the holder may know.
        name = _NAMES.get(frame.op, f"operation {frame.op:#06x}")
        allowed = ", ".join(names_of(self.permissions & SESSION_PERMISSIONS))
        failure = Failure(
            Status.DENIED,
            f"the token with which this connection attached does not permit {name}, only {allowed}",
            hint="Attach with a token that permits the operation.",
        )
        # A quiet request has no reply. The refusal would be reported at the next sync, which may come from
        # another connection.
        if frame.flags:
            raise FramingError(
                f"{failure.message}; the connection was closed, because the request was quiet", failure.status
            )
        return failure.to_frame(frame.op, request_id=frame.request_id, session_id=frame.session_id)

    def to_message(self) -> list[int]:
        """Return the terms as they are sent to the worker."""
        return [int(self.permissions), self.expires_ns, self.generation, self.mark]

    @classmethod
    def from_message(cls, message: Any) -> "Guest | None":
        """Return the terms that arrived; None for no token. Raises ValueError or TypeError."""
        if message is None:
            return None
        permissions, expires_ns, generation, mark = map(int, message)
        return cls(Permission(permissions), expires_ns, generation, mark)
