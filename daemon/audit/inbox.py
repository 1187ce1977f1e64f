"""Records that wait for the disk: a bounded queue between the broker's loop and the writer's thread."""

import threading
from collections import deque
from typing import Final

from gpulease.daemon.audit.records import Draft, Kind

MAX_QUEUED: Final = 32_768
"""Records, some 30 MB: a disk that hangs must not eat the broker's memory."""

MAX_QUEUED_MINOR: Final = MAX_QUEUED // 2
"""Of these, for what tenants repeat at will; the rest is for grants and ends."""

MINOR: Final = frozenset({Kind.DENY, Kind.ATTACH, Kind.SUBMIT, Kind.RENEW, Kind.ISSUE, Kind.WITHDRAW})


class Inbox:
    """First in, first out. What has no room is counted, and the count is a record in its place.

    Attributes:
        accepted: Records taken in so far, those that tell of gaps included: the last one's ticket.
        dropped: Records that had no room.
    """

    def __init__(self) -> None:
        self.accepted = 0
        self.dropped = 0
        # Taken as it is where nobody waits: a condition costs a call to get in.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[Draft] = deque()
        self._gap: Draft | None = None
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, draft: Draft) -> int:
        """Queue a record; its ticket, 0 if there was no room. Waits for no disk."""
        with self._lock:
            if len(self._queue) >= (MAX_QUEUED_MINOR if draft.kind in MINOR else MAX_QUEUED):
                self._drop(draft)
                return 0
            self._queue.append(draft)
            self.accepted += 1
            if len(self._queue) == 1:
                self._changed.notify()
            return self.accepted

    def take(self, most: int, wait_s: float) -> list[Draft]:
        """The oldest records, at most so many; none if none came in time, or if it is closed and empty."""
        with self._changed:
            if not self._queue and not self._is_closed:
                self._changed.wait(wait_s)
            taken = [self._queue.popleft() for _ in range(min(most, len(self._queue)))]
            if self._gap is not None and any(draft is self._gap for draft in taken):
                self._gap = None
            return taken

    def wait_for_close(self, wait_s: float) -> None:
        """Return when it is closed, or in time."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, wait_s)

    def close(self) -> None:
        """Let nobody wait any more. What is inside can still be taken."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @property
    def is_closed(self) -> bool:
        """Whether nothing more is to come."""
        return self._is_closed

    def _drop(self, draft: Draft) -> None:
        # An end that is missing must be told of behind all that was queued before it; what is minor is just counted.
        gap = self._gap
        if gap is None or (draft.kind not in MINOR and self._queue[-1] is not gap):
            gap = self._gap = Draft(Kind.GAP, {"dropped": {}, "since_us": draft.mono_us}, draft.wall_us, draft.mono_us)
            self._queue.append(gap)
            self.accepted += 1
        counts = gap.data["dropped"]
        counts[draft.kind.value] = counts.get(draft.kind.value, 0) + 1
        self.dropped += 1
