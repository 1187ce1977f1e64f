"""The holders of a session's objects: each connection, and the lease itself.

An object belongs to the connection that created it, and ends with it (`ended_connections.py`), unless it is kept by
name (`kept_buffers.py`). A kept object is held by the lease.
"""

from collections.abc import MutableSequence


class Holder:
    """A connection or a lease, with the number of bytes of the allocations that it holds.

    Args:
        counters: Shared words, one of which shows the bytes; for example the claims page's.
        at: The word's index.

    Attributes:
        at: The word's index.
        held_bytes: The bytes.
    """

    __slots__ = ("_counters", "at", "held_bytes")

    def __init__(self, counters: "MutableSequence[int] | memoryview | None" = None, at: int = 0) -> None:
        self._counters, self.at = [0] if counters is None else counters, at
        self.held_bytes = 0

    def count(self, size_bytes: int) -> None:
        """Add `size_bytes`, which may be negative, to the bytes held."""
        self.held_bytes += size_bytes
        self._counters[self.at] += size_bytes

    def show_at(self, at: int) -> None:
        """From now on, show the bytes in another word, in addition to those of other holders."""
        # A word may show the sum of several holders' bytes, so subtract from the old word and add to the new one.
        self._counters[self.at] -= self.held_bytes
        self.at = at
        self._counters[at] += self.held_bytes
