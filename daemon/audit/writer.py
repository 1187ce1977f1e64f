"""The thread that puts records on the disk, and what happens if it can't.

It takes all that is queued, writes it and syncs once: while a sync lasts, the next group gathers. If the disk refuses,
it keeps what it has, opens the log anew every second, finds out what reached the disk after all, and goes on with a
record that says what happened.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from gpulease.daemon.audit.files import AuditLog, FolderInUse
from gpulease.daemon.audit.inbox import Inbox
from gpulease.daemon.audit.records import FORMAT, Draft, Kind, Link
from gpulease.daemon.audit.showing import found_text
from gpulease.daemon.logs.catalogue import LogEvent
from gpulease.daemon.logs.telling import tell
from gpulease.daemon.threads import start_thread

MAX_GROUP: Final = 2048
"""Records of one sync: bounds how long those in it wait for each other."""

BEAT_S: Final = 1.0
"""Between two writes of the head while nothing happens: how exactly a later start knows when this life ended."""

RETRY_S: Final = 1.0
"""Between two tries to open a log that could not be written."""

STALLED_AFTER_S: Final = 5.0
"""A write or sync that lasts longer counts as a disk that does not work."""

STOP_TIMEOUT_S: Final = 5.0
"""For the last records when the daemon stops; a hung disk must not keep it."""

NS_PER_S: Final = 1_000_000_000
NS_PER_US: Final = 1000


def draft_of(kind: Kind, data: dict[str, Any], now_ns: int = 0) -> Draft:
    """Of what happens now, at monotonic time `now_ns` if the caller has looked already."""
    return Draft(kind, data, time.time_ns() // NS_PER_US, (now_ns or time.monotonic_ns()) // NS_PER_US)


class Writer:
    """Writes a log in a thread of its own, from `start` to `stop`.

    Args:
        open_log: Opens the log, given the last record that is known to be in it; called again after every failure.
            Raises OSError or FolderInUse.
        about: What the daemon's `start` record tells.
        on_change: Called in the thread whenever records became durable, and when they can't be written any more.
    """

    def __init__(
        self, open_log: Callable[[Link], AuditLog], about: dict[str, Any], on_change: Callable[[], None]
    ) -> None:
        self._open_log = open_log
        self._known = Link()
        self._on_change = on_change
        self._begin = draft_of(Kind.START, {"format": FORMAT} | about)
        self._inbox = Inbox()
        self._log: AuditLog | None = None
        self._is_begun = False
        self._opening: Draft | None = None
        self._pending: list[Draft] = []
        self._attempted: list[Link] = []
        self._durable = 0
        self._unsynced = 0
        self._failure = ""
        self._failed_us = 0
        self._told_dropped = 0
        self._busy_since_ns = 0
        self._head_synced_ns = 0
        self._thread = threading.Thread(target=self._run, name="gpulease-audit", daemon=True)

    # --- the broker's side ---

    def start(self, *, must_work: bool) -> None:
        """Open the log, write that the daemon starts, and go on.

        Raises FolderInUse, NoThread, or OSError if it can't be written although it must.
        """
        try:
            self._work()
        except OSError as error:
            self._fail(error)
            if must_work:
                raise
        start_thread(self._thread)

    def put(self, kind: Kind, data: dict[str, Any], now_ns: int = 0) -> int:
        """Queue a record of what happens now; its ticket, 0 if there was no room. Waits for no disk."""
        return self._inbox.put(draft_of(kind, data, now_ns))

    def is_durable(self, ticket: int) -> bool:
        """Whether the record with this ticket is on the disk."""
        return 0 < ticket <= self._durable

    def problem(self) -> str:
        """Why nothing can be written now, in a clause; "" if all is well."""
        since_ns = self._busy_since_ns
        if since_ns and time.monotonic_ns() - since_ns > STALLED_AFTER_S * NS_PER_S:
            return f"a write has lasted for more than {STALLED_AFTER_S:g} s"
        return self._failure

    def figures(self) -> dict[str, int]:
        """Records that wait, that are durable, and that were dropped."""
        return {"waiting": len(self._inbox), "durable": self._durable, "dropped": self._inbox.dropped}

    def stop(self, data: dict[str, Any]) -> bool:
        """Write what is queued and that the daemon stops; whether all of it reached the disk in time."""
        last = self.put(Kind.STOP, data)
        self._inbox.close()
        self._thread.join(STOP_TIMEOUT_S)
        return self.is_durable(last)

    # --- the thread's side ---

    def _run(self) -> None:
        while True:
            if self._failure:
                self._inbox.wait_for_close(RETRY_S)
            is_last = self._inbox.is_closed
            if len(self._pending) < MAX_GROUP:
                self._pending += self._inbox.take(MAX_GROUP, 0 if self._failure else BEAT_S)
            try:
                self._work()
            except (OSError, FolderInUse) as error:
                self._fail(error)
            except Exception as error:
                # A fault of ours. Without this thread nothing would be written any more, and nothing would say so.
                tell(LogEvent.DAEMON_FAULT, is_fault=True, doing="writing the audit log")
                self._fail(error)
            if is_last and (self._failure or not len(self._inbox)):
                self._close()
                return

    def _work(self) -> None:
        now_ns = self._busy_since_ns = time.monotonic_ns()
        try:
            if self._pending or self._log is None:
                self._write(self._log or self._open(), now_ns)
            else:
                self._log.beat(now_ns // NS_PER_US)
                self._sync_head(self._log, now_ns)
        finally:
            self._busy_since_ns = 0

    def _write(self, log: AuditLog, now_ns: int) -> None:
        before = log.link
        drafts = [*([] if self._opening is None else [self._opening]), *self._pending]
        try:
            log.append(drafts, now_ns // NS_PER_US)
        finally:
            self._attempted = log.attempted
        self._succeed(log, before, now_ns)

    def _succeed(self, log: AuditLog, before: Link, now_ns: int) -> None:
        self._is_begun = True
        if self._opening is not None:
            tell(LogEvent.AUDIT_CONTINUED, record=before.seq, hash=before.hash)
            if log.found:
                tell(LogEvent.AUDIT_NOT_AS_LEFT, reason=found_text(log.found))
        if self._failure:
            tell(LogEvent.AUDIT_BACK)
            self._failure = ""
        self._durable += self._unsynced + len(self._pending)
        self._pending, self._opening, self._attempted, self._unsynced = [], None, [], 0
        self._on_change()
        if self._inbox.dropped > self._told_dropped:
            tell(LogEvent.AUDIT_DROPPED, count=self._inbox.dropped)
            self._told_dropped = self._inbox.dropped
        while (superfluous := log.superfluous()) is not None:
            path, told = superfluous
            log.append([draft_of(Kind.PRUNE, told)], now_ns // NS_PER_US)
            log.remove(path)
        self._known = log.link
        self._sync_head(log, now_ns)

    def _fail(self, error: Exception) -> None:
        if not self._failure:
            self._failed_us = time.monotonic_ns() // NS_PER_US
            tell(LogEvent.AUDIT_FAILING, reason=str(error))
        said = error.strerror if isinstance(error, OSError) else str(error)
        self._failure = said or type(error).__name__
        self._on_change()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _sync_head(self, log: AuditLog, now_ns: int) -> None:
        if now_ns - self._head_synced_ns >= BEAT_S * NS_PER_S:
            log.sync_head()
            self._head_synced_ns = now_ns

    def _close(self) -> None:
        if self._log is not None:
            try:
                self._log.sync_head()
            except OSError as error:
                tell(LogEvent.AUDIT_HEAD_FAILING, reason=str(error))
            tell(LogEvent.AUDIT_CLOSED, record=self._log.link.seq, hash=self._log.link.hash)
            self._log.close()
            self._log = None

    # --- opening ---

    def _open(self) -> AuditLog:
        log = self._log = self._open_log(self._known)
        if log.link in self._attempted:
            # What failed had been written in part, or all of it: what is there is not appended again, only synced.
            there = self._attempted.index(log.link) + 1
            if self._opening is not None:
                self._is_begun = True
                there -= 1
            del self._pending[:there]
            self._unsynced += there
            log.rewrite()
        self._attempted = []
        self._opening = self._opening_draft(log)
        return log

    def _opening_draft(self, log: AuditLog) -> Draft:
        if self._is_begun:
            return draft_of(Kind.RESUME, {"problem": self._failure, "since_us": self._failed_us} | log.found)
        previous: dict[str, Any] = {}
        if log.previous is not None:
            previous["previous"] = {"boot": log.previous.boot, "alive_us": log.previous.alive_us}
        begin = self._begin
        return Draft(begin.kind, begin.data | previous | log.found, begin.wall_us, begin.mono_us)
