"""Frees objects that a program has dropped while its session is idle.

A handle's last reference may be dropped in any thread, at any moment, so the handle is only recorded, and the session's
next operation frees it. But an idle session has no next operation. So each API polls its sessions every
`POLL_INTERVAL_S`: the blocking API from a thread, asyncio's from its event loop. If the session sent no request between
two polls, the second poll frees the recorded handles.
"""

from typing import Final

from gpulease.client.core.operations import RequestPipeline

POLL_INTERVAL_S: Final = 0.1
"""Pause between two polls, in seconds. Dropped memory is free again after at most two pauses. Ten polls a second cost a
process next to nothing."""


class IdlePoller:
    """Polls one session for handles that are due to be freed."""

    def __init__(self, operations: RequestPipeline) -> None:
        self._operations = operations
        self._last_id = -1

    @property
    def is_over(self) -> bool:
        """True once this process has been notified that the session has ended."""
        return self._operations.attachment.end is not None

    def has_found(self) -> bool:
        """Return True if no request was sent since the last poll and there is something to free: then call `free`."""
        # If the last request id is the same at two polls, the session was idle between them.
        last_id, self._last_id = self._last_id, self._operations.attachment.connection.last_request_id
        return last_id == self._last_id and not self.is_over and self._operations.has_leftovers

    def free(self) -> None:
        """Free the dropped objects, without waiting for replies. The caller holds the session's lock."""
        self._operations.free_leftovers()
