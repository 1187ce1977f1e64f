"""The thread that commits: all that is queued in one transaction, and while that syncs the next group gathers.

If the disk refuses, nothing is dropped: the same changes are tried again every second, and those that came since.
"""

import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from gpulease.daemon.journal.rows import Change
from gpulease.daemon.journal.store import Store
from gpulease.daemon.logs.catalogue import LogEvent
from gpulease.daemon.logs.telling import tell
from gpulease.daemon.threads import start_thread

MAX_GROUP: Final = 1024
"""Batches of changes in one commit: bounds how long those in it wait for each other."""

RETRY_S: Final = 1.0
"""Between two tries to write to a disk that refused."""

STALLED_AFTER_S: Final = 5.0
"""A commit that lasts longer counts as a disk that does not work."""

STOP_TIMEOUT_S: Final = 5.0
"""For the last changes when the daemon stops; a hung disk must not keep it."""

NS_PER_S: Final = 1_000_000_000


class Writer:
    """Commits changes in a thread of its own, from `start` to `stop`.

    What waits is bounded by live leases: while nothing can be written, nothing is granted.

    Attributes:
        accepted: The ticket of the last batch that was put.
        durable: The ticket of the last batch that is on the disk.
        commits: How many commits there were.
    """

    def __init__(self, store: Store) -> None:
        self.accepted = 0
        self.durable = 0
        self.commits = 0
        self._store = store
        self._on_change: Callable[[], None] = _nobody
        # Taken as it is where nobody waits: a condition costs a call to get in.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[Sequence[Change]] = deque()
        self._is_closed = False
        self._failure = ""
        self._busy_since_ns = 0
        self._thread = threading.Thread(target=self._run, name="gpulease-journal", daemon=True)

    # --- the broker's side ---

    def start(self, on_change: Callable[[], None]) -> None:
        """Begin. `on_change` is called in the thread whenever changes became durable, or can't be written.

        Raises NoThread.
        """
        self._on_change = on_change
        start_thread(self._thread)

    def put(self, changes: Sequence[Change]) -> int:
        """Queue changes that belong together; their ticket. Waits for no disk."""
        with self._lock:
            self._queue.append(changes)
            self.accepted += 1
            if len(self._queue) == 1:
                self._changed.notify()
            return self.accepted

    def problem(self) -> str:
        """Why nothing can be written now, in a clause; "" if all is well."""
        since_ns = self._busy_since_ns
        if since_ns and time.monotonic_ns() - since_ns > STALLED_AFTER_S * NS_PER_S:
            return f"a commit has lasted for more than {STALLED_AFTER_S:g} s"
        return self._failure

    def stop(self) -> bool:
        """Write what is queued; whether all of it reached the disk in time. The store is closed.

        If it was never started, the daemon did not come to be, nobody was told of anything, and nothing is owed.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.ident is None:
            self._store.close()
            return True
        self._thread.join(STOP_TIMEOUT_S)
        return self.durable == self.accepted

    # --- the thread's side ---

    def _run(self) -> None:
        group: list[Sequence[Change]] = []
        while True:
            is_last = self._gather(group)
            if group:
                self._commit(group)
            if is_last and (self._failure or not self._queue):
                self._store.close()
                return

    def _gather(self, group: list[Sequence[Change]]) -> bool:
        """Wait for batches and take them; whether no more will come."""
        with self._changed:
            if self._failure:
                self._changed.wait_for(lambda: self._is_closed, RETRY_S)
            else:
                self._changed.wait_for(lambda: self._queue or self._is_closed)
            while self._queue and len(group) < MAX_GROUP:
                group.append(self._queue.popleft())
            return self._is_closed

    def _commit(self, group: list[Sequence[Change]]) -> None:
        self._busy_since_ns = time.monotonic_ns()
        try:
            self._store.apply([change for changes in group for change in changes])
        except (sqlite3.Error, OSError, ValueError) as error:
            self._fail(error)
        except Exception as error:
            # A fault of ours. Without this thread nothing would be granted any more, and nothing would say why.
            tell(LogEvent.DAEMON_FAULT, is_fault=True, doing="writing the journal")
            self._fail(error)
        else:
            self.durable += len(group)
            self.commits += 1
            group.clear()
            if self._failure:
                tell(LogEvent.JOURNAL_BACK)
                self._failure = ""
        finally:
            self._busy_since_ns = 0
        self._on_change()

    def _fail(self, error: Exception) -> None:
        said = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        if not self._failure:
            tell(LogEvent.JOURNAL_FAILING, reason=said)
        self._failure = said or type(error).__name__


def _nobody() -> None:
    """Told before anybody listens."""
