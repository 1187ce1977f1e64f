"""Gives up commits that take too long: a server that waits for a standby sets that wait no bound."""

import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Connection = TypeVar("Connection", bound=Hashable)


class CommitWatch(Generic[Connection]):
    """One thread for all commits of a store; it sleeps while there are none.

    It is woken by the first commit after that alone. Then it sleeps until the one that began first must have ended,
    and by that time knows of those that began since: each of them ends later.
    """

    def __init__(self, limit_s: float, give_up: Callable[[Connection], object]) -> None:
        """Args: limit_s: How long one may take. give_up: Has the server end it; raises nothing."""
        self._limit_s, self._give_up = limit_s, give_up
        self._ends: dict[Connection, float] = {}
        self._given_up: Connection | None = None
        self._changed = threading.Condition()
        self._sleeps = self._is_closed = False
        self._thread: threading.Thread | None = None

    def begins(self, connection: Connection) -> None:
        """A commit on that connection."""
        with self._changed:
            self._ends[connection] = time.monotonic() + self._limit_s
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gpulease-commits", daemon=True)
                self._thread.start()
            elif self._sleeps:
                self._changed.notify_all()

    def ended(self, connection: Connection) -> None:
        """It has ended, or never begun; no word to give up comes behind this, which would end what is done next."""
        with self._changed:
            self._ends.pop(connection, None)
            self._changed.wait_for(lambda: self._given_up is not connection)

    def close(self) -> None:
        """End the thread, once no commit is under way; again is harmless."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while (connection := self._next()) is not None:
            self._give_up(connection)
            with self._changed:
                self._given_up = None
                self._changed.notify_all()

    def _next(self) -> Connection | None:
        """The next that took too long, once there is one; None at the end."""
        with self._changed:
            while self._ends or not self._is_closed:
                # In the order they began in, which is that of their ends.
                first = next(iter(self._ends), None)
                left_s = None if first is None else self._ends[first] - time.monotonic()
                if first is not None and left_s is not None and left_s <= 0:
                    del self._ends[first]
                    self._given_up = first
                    return first
                self._sleeps = first is None
                self._changed.wait(left_s)
        return None
