"""What a peer has yet to read of its last reply, while the worker goes on with others.

A reply that finds no room is waited for shortly, where it stands: an honest peer on this host reads in microseconds.
Then what is left of it is copied and the connection left aside: nothing of what it asks is done before it has read on.
So it costs its session one reply's memory, for a bounded time, and nobody's turn.
"""

import time
from typing import Final

ALONE_WAIT_NS: Final = 20_000_000
"""How long a reply waits for room in a session's only connection: nobody but the broker wants the thread meanwhile."""

SHARED_WAIT_NS: Final = 2_000_000
"""The same where there are other connections."""

DISTRUST_S: Final = 10.0
"""For so long after it was left aside a connection of several is not waited for at all. Stops a peer that reads each
reply only when it was left aside from taking SHARED_WAIT_NS of the others' time for each of its requests."""

UNREAD_BYTES: Final = 64 << 20
"""What a session may keep of replies together: four of the largest. A well-behaved client asks for 1 MiB at a time."""

UNREAD_TIMEOUT_S: Final = 60.0
"""For a peer to read on by STEP_BYTES, or to the end. Stops one that never does from keeping memory and a place."""

STEP_BYTES: Final = 64 << 10


class Backlog:
    """The rest of one reply.

    Attributes:
        rest: What has not gone.
    """

    def __init__(self, rest: bytes | memoryview) -> None:
        # A reply may lie in memory that the session uses again at once.
        self.rest = memoryview(bytes(rest))
        self._marked_bytes = len(self.rest)
        self._marked_s = time.monotonic()

    def keep(self, rest: bytes | memoryview) -> None:
        """So much is left of it now."""
        self.rest = memoryview(rest)
        if self._marked_bytes - len(self.rest) >= STEP_BYTES:
            self._marked_bytes, self._marked_s = len(self.rest), time.monotonic()

    def is_stale(self, now_s: float) -> bool:
        """Whether its peer has had its time."""
        return now_s - self._marked_s > UNREAD_TIMEOUT_S
