"""How a session that is asked for nothing frees what nobody has any more: the look that both faces take now and then.

A handle's last reference may go in any thread, inside anything, so it is only noted then, and the session's next
operation frees it. An idle session has none. So each face looks at its sessions every `LOOK_S`: the blocking one from a
thread, asyncio's from its event loop. What was noted before two looks with no request between them is freed by the
second.
"""

from typing import Final

from gpulease.client.core.operations import Operations

LOOK_S: Final = 0.1
"""Pause between two looks: memory that nobody has is the lease's again within two of them. Ten looks a second cost a
process next to nothing."""


class IdleLook:
    """The looks at one session."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._last_id = -1

    @property
    def is_over(self) -> bool:
        """True once the session has ended, as far as is known here."""
        return self._operations.attachment.end is not None

    def has_found(self) -> bool:
        """True if nothing was asked since the last look and something is left to free: `free`, under the lock."""
        last_id, self._last_id = self._last_id, self._operations.attachment.connection.last_request_id
        return last_id == self._last_id and not self.is_over and self._operations.has_leftovers

    def free(self) -> None:
        """Free it, without waiting. The caller holds the session's lock."""
        self._operations.free_leftovers()
