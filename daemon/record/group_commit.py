"""Group commits for the journal and the audit log: a thread that commits, and replies that wait for it.

The thread takes all queued items and commits them together. During the commit, the next group gathers. If the disk
refuses, nothing is dropped: the thread keeps the group, and tries again every second.

`DurableReplies` is the rule "a grant is reported only when it is durable": a grant that can't be made durable in time
is revoked before its tenant receives it.
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
from gpulease.daemon.leases import Denial, Event, Granted, RegionGranted, RequestDenied, RevokeRequested
from gpulease.daemon.leases.warm_pool import RECORD_LIMIT_S
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.protocol.time_units import NS_PER_S

RETRY_S: Final = 1.0
"""Time between two tries to write to a disk that refused."""

STALLED_AFTER_S: Final = 5.0
"""If a commit lasts longer, the disk counts as broken."""

STOP_TIMEOUT_S: Final = 5.0
"""Time for the last group when the daemon stops, so that a hung disk can't keep the daemon from stopping."""

MAX_WAIT_S: Final = float(RECORD_LIMIT_S)
"""Longest time for which a reply is held. A tenant that would have to wait longer is better served elsewhere."""

GATHER_LIMIT_S: Final = 0.002
"""Longest time for which a busy loop gathers items for one commit. A commit takes as much processor time as 20 of its
items."""

Item = TypeVar("Item")


class CommitQueue(Generic[Item]):
    """A first-in, first-out queue from the broker's loop to the thread that commits.

    After a group of several items, items that are put in a running loop are gathered while the loop has work: until a
    turn of the loop puts no further item, but at most for GATHER_LIMIT_S. After a single item, the next one is taken at
    once.

    Attributes:
        accepted: Number of items that have been accepted. This is the last item's ticket.
    """

    def __init__(self) -> None:
        self.accepted = 0
        # `put` takes the lock itself, because entering the condition would cost one more call.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._items: deque[Item] = deque()
        # Whether several items are likely to come together, and whether the committer must wait for them now.
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
            # The committer sleeps only while the queue is empty or gathers items.
            self._changed.notify()

    def _gather(self) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            # No loop runs in this thread, so no further item will follow in this turn.
            self._changed.notify()
        else:
            self._is_gathering = True
            loop.call_soon(self._end_turn, loop, len(self._items), loop.time() + GATHER_LIMIT_S)

    def _end_turn(self, loop: asyncio.AbstractEventLoop, count: int, until_s: float) -> None:
        """Wake the committer, unless the last turn of the loop added to the `count` items before it."""
        with self._lock:
            if len(self._items) > count and loop.time() < until_s:
                loop.call_soon(self._end_turn, loop, len(self._items), until_s)
            else:
                self._is_gathering = False
                self._changed.notify()

    def take(self, most: int, wait_s: float | None) -> list[Item]:
        """Return the oldest items, at most `most`.

        Waits up to `wait_s` seconds for the first item; None means without a limit. The result is empty if none came,
        or if the queue is closed and empty.
        """
        with self._changed:
            # A single wait suffices: after a spurious wakeup the group is smaller, or empty, and the committer calls
            # again.
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
        work: One commit, in words: "a commit".
        doing: The thread's work, in words, for the log: "writing the journal".
        max_group: Maximum number of items in one commit, which limits how long these items wait for each other.
        idle_s: Time between two calls of `on_idle` while nothing is queued; None for no such calls.
        expected: Exceptions that mean a broken disk. Any other exception is a bug, and is logged as one.
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

        After a failure, the next call has the same items first. A group may be empty.
        """

    @abstractmethod
    def on_failure(self, error: Exception, problem: str, *, is_first: bool) -> None:
        """Handle a failed commit. `is_first` tells whether the previous commit succeeded."""

    @abstractmethod
    def on_recovery(self) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Release everything, because the committer has stopped."""

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
        # Use a daemon thread: a disk that hangs in fsync must not keep the process from exiting.
        self._thread = threading.Thread(target=self._run, name=target.thread_name, daemon=True)

    @property
    def accepted(self) -> int:
        """The ticket of the last item that was put."""
        return self._queue.accepted

    def commit_first(self) -> None:
        """Make the first commit in the calling thread, before `start`.

        Raises the target's errors. An OSError then counts as a failed commit, which the thread tries again.
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

        If the committer was never started, this returns True: the daemon did not start, and nothing was reported to any
        client.
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
        # Read this field only once, because the committer's thread may change it between two reads.
        since_ns = self._busy_since_ns
        if since_ns and time.monotonic_ns() - since_ns > STALLED_AFTER_S * NS_PER_S:
            return f"{self._target.work} has lasted for more than {STALLED_AFTER_S:g} s"
        return self._failure

    # --- the thread ---

    def _run(self) -> None:
        target, queue = self._target, self._queue
        while True:
            # After a failure, pause before the next try. A daemon that stops does not wait for the pause.
            if self._failure:
                queue.wait_for_close(RETRY_S)
            # Read this before emptying the queue, so that every item that was put before the close is taken.
            is_last = queue.is_closed
            # A group that failed is kept and filled up: its items keep their order, and come first.
            if len(self._group) < target.max_group:
                self._group += queue.take(target.max_group - len(self._group), 0 if self._failure else target.idle_s)
            self._try_to_commit()
            # The last round ends when everything is written, or when the disk still refuses. There is no second attempt
            # at the exit.
            if is_last and (self._failure or not len(queue)):
                target.close()
                return

    def _try_to_commit(self) -> None:
        try:
            # After a failure, commit even an empty group: its success is the only sign that the disk works again.
            if self._group or self._failure:
                self._commit()
            else:
                self._busy_since_ns = time.monotonic_ns()
                self._target.on_idle()
        except Exception as error:
            if not isinstance(error, self._target.expected):
                # This is a bug of ours. Without this thread, nothing more would be granted, and no log line would
                # explain why.
                log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing=self._target.doing)
            self._fail(error)
        finally:
            self._busy_since_ns = 0

    def _commit(self) -> None:
        self._busy_since_ns = time.monotonic_ns()
        # From here until `_busy_since_ns` changes, `problem` counts how long the disk takes.
        self._target.commit(self._group)
        # The disk works again. Notify the operator before any held reply is sent.
        if self._failure:
            self._target.on_recovery()
            self._failure = ""
        # Tickets are counted, so the durable ticket is the number of items on the disk.
        self.durable += len(self._group)
        self._group.clear()
        # A slow commit that succeeded is no longer a problem.
        self._busy_since_ns = time.monotonic_ns()
        # Wake the replies first. Rotating files and similar work can wait.
        self._on_change()
        self._target.after_commit()

    def _fail(self, error: Exception) -> None:
        problem = reason_of(error) or type(error).__name__
        try:
            self._target.on_failure(error, problem, is_first=not self._failure)
        finally:
            # Whatever happens to the thread now, nothing more is granted.
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
    """Holds each reply until everything that it reports is on the disk. Used in one event loop, from `attach` on.

    A reply's callback receives "" when the reply is durable or, if that takes longer than MAX_WAIT_S, the problem, as a
    clause.

    Args:
        durable: Returns the ticket of the last item that is on the disk.
        problem: Returns why nothing can be written now, as a clause; "" if it can.
    """

    def __init__(self, durable: Callable[[], int], problem: Callable[[], str]) -> None:
        self._durable = durable
        self._problem = problem
        self._loop: asyncio.AbstractEventLoop | None = None
        self._post: Callable[[Event], None] = lambda _: None
        # In the order of arrival, and so of their times: no reply overtakes another.
        self._held: deque[_Held] = deque()
        # The replies that wait without a time limit, in the order of arrival.
        self._lasting: deque[_Held] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def attach(self, post: Callable[[Event], None]) -> None:
        """Begin to hold replies in the running loop. `post` takes the revocation of a grant that was never reported."""
        self._loop = asyncio.get_running_loop()
        self._post = post

    def hold(self, ticket: int, on_done: Callable[[str], None]) -> None:
        """Call `on_done` when the item with this ticket is durable or can't be; at once if that is known."""
        # Three cases are known at once: already durable, impossible now, or before the broker's loop runs.
        if self._durable() >= ticket:
            on_done("")
        elif problem := self._problem():
            on_done(problem)
        elif self._loop is None:
            on_done("the daemon has not begun")
        else:
            # Otherwise wait, with one timer for all replies: the first in the queue is the first to time out.
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
        # First send, in order, every reply whose ticket is on the disk.
        durable = self._durable()
        for waiting in (self._held, self._lasting):
            while waiting and waiting[0].ticket <= durable:
                _finish(waiting.popleft(), "")
        # If nothing can be written now, give the other replies the problem at once, rather than at the time limit.
        if self._held and (problem := self._problem()):
            while self._held:
                _finish(self._held.popleft(), problem)

    def _give_up(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give up replies that have waited too long, and set the timer for the first of the remaining ones."""
        self._timer = None
        # A reply that timed out is refused even if its commit succeeds later: the grant behind it is revoked.
        while self._held and self._held[0].until_s <= loop.time():
            _finish(self._held.popleft(), self._problem() or too_long())
        # A reply's callback may have added another reply, which has set the timer already.
        if self._held and self._timer is None:
            self._timer = loop.call_at(self._held[0].until_s, self._give_up, loop)


def too_long() -> str:
    """Return the problem of a reply that waited for MAX_WAIT_S."""
    return f"it took more than {MAX_WAIT_S:g} s"


def _finish(batch: _Held, problem: str) -> None:
    try:
        batch.on_done(problem)
    except Exception:
        # This is a bug. All others that wait must still get their replies.
        log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing="reporting an outcome")
