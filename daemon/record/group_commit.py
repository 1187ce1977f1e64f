"""Group commits for the journal and the audit log: a thread that commits, and replies that wait for it.

The thread takes all queued items and commits them together. Items that come during the commit are the next group. If a
commit fails, the thread keeps the group and tries again every second.

`DurableReplies` holds each reply until its items are durable. A grant that can't be made durable in time is revoked
before its tenant receives it.
"""

import asyncio
import contextlib
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar, Final, Generic, NamedTuple, TypeVar

from gpulease.daemon.host.processes import start_thread
from gpulease.daemon.leases.denials import Denial
from gpulease.daemon.leases.events import Event, Granted, RegionGranted, RequestDenied, RevokeRequested
from gpulease.daemon.leases.warm_pool import RECORD_LIMIT_S
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.protocol.time_units import NS_PER_S

RETRY_S: Final = 1.0
"""Seconds between two tries after a failed commit."""

STALLED_AFTER_S: Final = 5.0
"""Maximum seconds of a commit before the disk counts as broken."""

STOP_TIMEOUT_S: Final = 5.0
"""Maximum seconds for the last group when the daemon stops, in case the disk hangs."""

MAX_WAIT_S: Final = float(RECORD_LIMIT_S)
"""Maximum seconds for which a reply is held. After that the tenant gets a denial and can turn to another node."""

GATHER_LIMIT_S: Final = 0.002
"""Maximum seconds for which items are gathered for one commit while the loop is busy. A commit takes as much processor
time as 20 items."""

Item = TypeVar("Item")


class CommitQueue(Generic[Item]):
    """A first-in, first-out queue from the broker's loop to the thread that commits.

    If the last group had several items, the next items are gathered until a turn of the loop puts no further item, for
    at most GATHER_LIMIT_S. If it had a single item, the next item is taken at once.

    Attributes:
        accepted: Number of items that have been accepted. This is the last item's ticket.
    """

    def __init__(self) -> None:
        self.accepted = 0
        # `put` uses the lock directly, because the condition would cost one more call.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._items: deque[Item] = deque()
        # `_is_busy`: several items are likely to come together. `_is_gathering`: the committer waits for more items.
        self._is_busy = True
        self._is_gathering = False
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item) -> int:
        """Queue an item and return its ticket. Never waits for the disk."""
        with self._lock:
            self._append(item)
            return self.accepted

    def _append(self, item: Item) -> None:
        """Append an item, and make sure that the committer takes it. Called with the lock held."""
        self._items.append(item)
        self.accepted += 1
        if self._is_busy and not self._is_gathering:
            self._gather()
        elif len(self._items) == 1:
            # The committer waits only while the queue is empty or gathers items.
            self._changed.notify()

    def _gather(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            # No loop runs in this thread, so there are no turns to wait for.
            self._changed.notify()
        else:
            self._is_gathering = True
            loop.call_soon(self._end_turn, loop, len(self._items), loop.time() + GATHER_LIMIT_S)

    def _end_turn(self, loop: asyncio.AbstractEventLoop, count: int, until_s: float) -> None:
        """Wake the committer, unless the last turn of the loop added items to the `count` items before it."""
        with self._lock:
            if len(self._items) > count and loop.time() < until_s:
                loop.call_soon(self._end_turn, loop, len(self._items), until_s)
            else:
                self._is_gathering = False
                self._changed.notify()

    def take(self, most: int, wait_s: float | None) -> list[Item]:
        """Return the oldest items, at most `most`.

        Waits up to `wait_s` seconds for the first item, without a limit if `wait_s` is None. Returns [] if no item
        came, or if the queue is closed and empty.
        """
        with self._changed:
            # The wait is not repeated. After a spurious wakeup the group is smaller or empty, and the committer calls
            # `take` again.
            if (self._is_gathering or not self._items) and not self._is_closed:
                self._changed.wait(wait_s)
            taken = [self._items.popleft() for _ in range(min(most, len(self._items)))]
            self._is_busy = len(taken) > 1
            self._on_taken(taken)
            return taken

    def _on_taken(self, taken: list[Item]) -> None:
        """Handle items that leave the queue. Called with the lock held."""

    def wait_for_close(self, wait_s: float) -> None:
        """Return when the queue is closed, or after `wait_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, wait_s)

    def close(self) -> None:
        """Stop all waiting. Queued items can still be taken."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @property
    def is_closed(self) -> bool:
        return self._is_closed


class CommitTarget(ABC, Generic[Item]):
    """The target of a `GroupCommitter`: a file or a database. Its methods run in the committer's thread.

    Attributes:
        thread_name: Name of the committer's thread.
        work: A noun for one commit in messages: "a commit".
        doing: The thread's work in log lines: "writing the journal".
        max_group: Maximum number of items in one commit.
        idle_s: Time between two calls of `on_idle` while nothing is queued; None for no such calls.
        expected: Exceptions that a broken disk causes. Any other exception is logged as a bug.
    """

    thread_name: ClassVar[str]
    work: ClassVar[str]
    doing: ClassVar[str]
    max_group: ClassVar[int]
    idle_s: ClassVar[float | None] = None
    expected: ClassVar[tuple[type[Exception], ...]] = (OSError,)

    @abstractmethod
    def commit(self, group: Sequence[Item]) -> None:
        """Make a group durable, completely and in order.

        After a failure, the next group begins with the same items. A group may be empty.
        """

    @abstractmethod
    def on_failure(self, error: Exception, problem: str, *, is_first: bool) -> None:
        """Handle a failed commit. `is_first` is true if the previous commit succeeded."""

    @abstractmethod
    def on_recovery(self) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Close all files. The committer has stopped."""

    def after_commit(self) -> None:
        """Do work for which the group's durability need not wait."""

    def on_idle(self) -> None: ...


class GroupCommitter(Generic[Item]):
    """Commits items in a separate thread, from `start` to `stop`.

    Attributes:
        durable: The ticket of the last item that is on the disk.
    """

    def __init__(self, target: CommitTarget[Item], queue: CommitQueue[Item] | None = None) -> None:
        self.durable = 0
        self._target = target
        self._queue = CommitQueue[Item]() if queue is None else queue
        self.put: Final = self._queue.put
        self._group: list[Item] = []
        self._failure = ""
        self._busy_since_ns = 0
        self._on_change: Callable[[], None] = lambda: None
        # A daemon thread lets the process exit while the disk hangs in fsync.
        self._thread = threading.Thread(target=self._run, name=target.thread_name, daemon=True)

    @property
    def accepted(self) -> int:
        """The ticket of the last item that was put."""
        return self._queue.accepted

    def commit_first(self) -> None:
        """Make the first commit in the calling thread, before `start`.

        Raises the target's errors. After an OSError the caller may still call `start`; the thread then tries the commit
        again.
        """
        try:
            self._commit()
        except OSError as error:
            self._fail(error)
            raise
        finally:
            self._busy_since_ns = 0

    def start(self, on_change: Callable[[], None]) -> None:
        """Start the thread, which calls `on_change` whenever a group became durable or a commit failed.

        Raises NoThread.
        """
        self._on_change = on_change
        start_thread(self._thread)

    def stop(self) -> bool:
        """Commit the queued items, and close the target. Returns whether all items reached the disk in time.

        If the committer was never started, no client has received a reply, and this returns True.
        """
        self._queue.close()
        # If the thread was never started, no client waits for an item, so only close the files.
        if self._thread.ident is None:
            self._target.close()
            return True
        self._thread.join(STOP_TIMEOUT_S)
        return self.durable == self._queue.accepted

    def problem(self) -> str:
        """Return why nothing can be written now, as a clause; "" if it can."""
        # The committer's thread may change this field, so read it only once.
        since_ns = self._busy_since_ns
        if since_ns and time.monotonic_ns() - since_ns > STALLED_AFTER_S * NS_PER_S:
            return f"{self._target.work} has lasted for more than {STALLED_AFTER_S:g} s"
        return self._failure

    # --- the thread ---

    def _run(self) -> None:
        target, queue = self._target, self._queue
        while True:
            # After a failure, pause before the next try, but not if the daemon is stopping.
            if self._failure:
                queue.wait_for_close(RETRY_S)
            # Read `is_closed` before taking items, so that all items from before the close are taken.
            is_last = queue.is_closed
            # A group that failed is kept. New items are added after it.
            if len(self._group) < target.max_group:
                self._group += queue.take(target.max_group - len(self._group), 0 if self._failure else target.idle_s)
            self._try_to_commit()
            # After the close, end when all items are written or a commit has failed.
            if is_last and (self._failure or not len(queue)):
                target.close()
                return

    def _try_to_commit(self) -> None:
        try:
            # After a failure, commit even an empty group, because only a commit shows that the disk works again.
            if self._group or self._failure:
                self._commit()
            else:
                self._busy_since_ns = time.monotonic_ns()
                self._target.on_idle()
        except Exception as error:
            if not isinstance(error, self._target.expected):
                # Log a bug and keep the thread alive, because without the thread nothing more would be granted.
                log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing=self._target.doing)
            self._fail(error)
        finally:
            self._busy_since_ns = 0

    def _commit(self) -> None:
        self._busy_since_ns = time.monotonic_ns()
        # `problem` measures the commit's time from `_busy_since_ns`.
        self._target.commit(self._group)
        # The disk works again. Notify the operator before held replies are sent.
        if self._failure:
            self._target.on_recovery()
            self._failure = ""
        # A ticket is the number of items up to its own, so the durable ticket is the number of items on the disk.
        self.durable += len(self._group)
        self._group.clear()
        # A slow commit that has succeeded is not a problem.
        self._busy_since_ns = time.monotonic_ns()
        # Wake the replies first. Rotating files and similar work can wait.
        self._on_change()
        self._target.after_commit()

    def _fail(self, error: Exception) -> None:
        problem = reason_of(error) or type(error).__name__
        try:
            self._target.on_failure(error, problem, is_first=not self._failure)
        finally:
            # Set the failure even if `on_failure` raises, so that nothing more is granted.
            self._failure = problem
            self._on_change()


def reason_of(error: Exception) -> str:
    """Return the text of an exception, without the number and path of an OSError."""
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)


class _Held(NamedTuple):
    ticket: int
    until_s: float
    on_done: Callable[[str], None]


class DurableReplies:
    """Holds each reply until the items that it depends on are on the disk. Used in one event loop, from `attach` on.

    A reply's callback receives "" when these items are durable. If that takes longer than MAX_WAIT_S, the callback
    receives the problem, as a clause.

    Args:
        durable: Returns the ticket of the last item that is on the disk.
        problem: Returns why nothing can be written now, as a clause; "" if it can.
    """

    def __init__(self, durable: Callable[[], int], problem: Callable[[], str]) -> None:
        self._durable = durable
        self._problem = problem
        self._loop: asyncio.AbstractEventLoop | None = None
        self._post: Callable[[Event], None] = lambda _: None
        # Replies in the order of arrival, and so of their time limits.
        self._held: deque[_Held] = deque()
        # The replies that wait without a time limit, in the order of arrival.
        self._lasting: deque[_Held] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def attach(self, post: Callable[[Event], None]) -> None:
        """Begin to hold replies in the running loop. `post` receives the revocations of unreported grants."""
        self._loop = asyncio.get_running_loop()
        self._post = post

    def hold(self, ticket: int, on_done: Callable[[str], None]) -> None:
        """Call `on_done` when the item with this ticket is durable, or with the problem when it can't be in time."""
        # Call it at once if the item is durable, if nothing can be written now, or if the broker's loop does not run
        # yet.
        if self._durable() >= ticket:
            on_done("")
        elif problem := self._problem():
            on_done(problem)
        elif self._loop is None:
            on_done("the daemon has not begun")
        else:
            # Otherwise wait. One timer is enough for all replies, because the first in the queue is the first to time
            # out.
            self._held.append(_Held(ticket, self._loop.time() + MAX_WAIT_S, on_done))
            if self._timer is None:
                self._timer = self._loop.call_later(MAX_WAIT_S, self._give_up, self._loop)

    def hold_until_durable(self, ticket: int, do: Callable[[], None]) -> None:
        """Call `do` when the item with this ticket is durable, however long that takes."""
        if self._durable() >= ticket:
            do()
        else:
            self._lasting.append(_Held(ticket, math.inf, lambda _: do()))

    def refuse(self, granted: Granted | RegionGranted, denial: Denial) -> RequestDenied:
        """Revoke a grant that can't be made durable. Returns the denial that its tenant gets instead."""
        self._post(RevokeRequested(0, granted.lease.lease_id, denial.message))
        return RequestDenied(granted.request, denial)

    def on_change(self) -> None:
        """Check again which replies are durable. Called in the committer's thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # The loop has ended, so no reply waits.
                self._loop.call_soon_threadsafe(self._release)

    def _release(self) -> None:
        # Send, in order, every reply with a ticket that is on the disk.
        durable = self._durable()
        for waiting in (self._held, self._lasting):
            while waiting and waiting[0].ticket <= durable:
                _finish(waiting.popleft(), "")
        # If nothing can be written now, report the problem to the other replies before their time limit.
        if self._held and (problem := self._problem()):
            while self._held:
                _finish(self._held.popleft(), problem)

    def _give_up(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give up replies that have waited too long, and set the timer for the first of the remaining ones."""
        self._timer = None
        # A reply that timed out reports the problem even if its commit succeeds later. Its grant is revoked.
        while self._held and self._held[0].until_s <= loop.time():
            _finish(self._held.popleft(), self._problem() or too_long())
        # A callback may have added another reply and so set the timer.
        if self._held and self._timer is None:
            self._timer = loop.call_at(self._held[0].until_s, self._give_up, loop)


def too_long() -> str:
    """Return the problem of a reply that waited for MAX_WAIT_S."""
    return f"it took more than {MAX_WAIT_S:g} s"


def _finish(batch: _Held, problem: str) -> None:
    try:
        batch.on_done(problem)
    except Exception:
        # Log the bug, so that the other waiting replies are still sent.
        log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing="reporting an outcome")
