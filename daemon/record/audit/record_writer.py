"""Writes records to the audit log in a thread, from a bounded queue.

If a write fails, the thread tries every second to open the log again. After the log is open, the thread determines
which records reached the disk, writes a `resume` record about the failure, and continues.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.record.audit.files import AuditLog, FolderInUse
from gpulease.daemon.record.audit.log_reader import found_text
from gpulease.daemon.record.audit.records import FORMAT, ChainEnd, Draft, RecordKind
from gpulease.daemon.record.group_commit import CommitQueue, CommitTarget, GroupCommitter
from gpulease.protocol.time_units import NS_PER_S, NS_PER_US

BEAT_S: Final = 1.0
"""Seconds between two writes of the head while no records are written. If the daemon is killed, the head shows when, to
this precision."""


class AuditWriter:
    """Writes a log in a separate thread, from `start` to `stop`.

    Args:
        open_log: Opens the log, given the last record that is known to be in it. Called again after every failure.
            Raises OSError or FolderInUse.
        start_fields: The particulars of the daemon's `start` record.
        on_change: Called in the thread when records become durable, and when the log can no longer be written.
    """

    def __init__(
        self, open_log: Callable[[ChainEnd], AuditLog], start_fields: dict[str, Any], on_change: Callable[[], None]
    ) -> None:
        self._on_change = on_change
        self._queue = RecordQueue()
        begin = draft_of(RecordKind.START, {"format": FORMAT} | start_fields)
        self._committer = GroupCommitter(_LogTarget(open_log, begin, self._queue), self._queue)

    def start(self, *, must_work: bool) -> None:
        """Open the log, record that the daemon starts, and start the thread.

        Raises FolderInUse, NoThread, or OSError if the log must work but can't be written.
        """
        # Write once before the thread starts, so that a daemon that requires its log fails at its start with the
        # reason.
        try:
            self._committer.commit_first()
        except OSError:
            if must_work:
                raise
        self._committer.start(self._on_change)

    def put(self, kind: RecordKind, data: dict[str, Any], now_ns: int = 0) -> int:
        """Queue a record. Returns its ticket, or 0 if the queue is full. Never waits for the disk."""
        return self._committer.put(draft_of(kind, data, now_ns))

    @property
    def durable(self) -> int:
        """The ticket of the last record that is on the disk."""
        return self._committer.durable

    def is_durable(self, ticket: int) -> bool:
        """Return whether the record with this ticket is on the disk."""
        return 0 < ticket <= self._committer.durable

    def problem(self) -> str:
        """Return why nothing can be written now, as a clause; "" if it can."""
        return self._committer.problem()

    def figures(self) -> dict[str, int]:
        """Count the records that wait, that are durable, and that were dropped."""
        return {"waiting": len(self._queue), "durable": self.durable, "dropped": self._queue.dropped}

    def stop(self, data: dict[str, Any]) -> bool:
        """Write the queued records and a `stop` record. Returns whether all of them reached the disk in time."""
        last = self.put(RecordKind.STOP, data)
        self._committer.stop()
        return self.is_durable(last)


def draft_of(kind: RecordKind, data: dict[str, Any], now_ns: int = 0) -> Draft:
    """Return a record of an event that happens now. `now_ns` is the monotonic time; 0 to read the clock here."""
    return Draft(kind, data, time.time_ns() // NS_PER_US, (now_ns or time.monotonic_ns()) // NS_PER_US)


MAX_QUEUED: Final = 32_768
"""Maximum number of queued records, about 30 MB, so that a hung disk can't use up the broker's memory."""

MAX_QUEUED_MINOR: Final = MAX_QUEUED // 2
"""Maximum length of the queue for which minor records are still accepted. Tenants can cause any number of those, so the
rest of the room is for grants and ends."""


class RecordQueue(CommitQueue[Draft]):
    """A bounded queue. A gap record, which counts records for which there is no room, takes their place.

    Attributes:
        accepted: Number of records accepted so far, gap records included. It is the last record's ticket.
        dropped: Number of records for which there was no room.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dropped = 0
        self._gap: Draft | None = None

    def put(self, item: Draft) -> int:
        """Queue a record and return its ticket, 0 if the queue is full. Never waits for the disk."""
        with self._lock:
            # Minor records may use only half the room, so that they can't displace a grant or an end.
            if len(self._items) >= (MAX_QUEUED_MINOR if item.kind.is_minor else MAX_QUEUED):
                self._drop(item)
                return 0
            self._append(item)
            return self.accepted

    def _on_taken(self, taken: list[Draft]) -> None:
        # The gap record has left the queue, and its counts are final. The next dropped record begins another gap.
        if self._gap is not None and any(draft is self._gap for draft in taken):
            self._gap = None

    def _drop(self, draft: Draft) -> None:
        # A dropped grant or end needs a gap record at its place in the order. Minor records are added to any queued gap
        # record.
        gap = self._gap
        if gap is None or (not draft.kind.is_minor and self._items[-1] is not gap):
            gap = self._gap = Draft(
                RecordKind.GAP, {"dropped": {}, "since_us": draft.mono_us}, draft.wall_us, draft.mono_us
            )
            self._items.append(gap)
            self.accepted += 1
        # The gap record is already queued. Its counts grow in place until the thread takes it.
        counts = gap.data["dropped"]
        counts[draft.kind.value] = counts.get(draft.kind.value, 0) + 1
        self.dropped += 1


class _LogTarget(CommitTarget[Draft]):
    """The open log, and the values that are needed to open it again."""

    thread_name = "gpulease-audit"
    work = "a write"
    doing = "writing the audit log"
    max_group = 2048
    idle_s = BEAT_S
    expected = (OSError, FolderInUse)

    def __init__(self, open_log: Callable[[ChainEnd], AuditLog], begin: Draft, queue: RecordQueue) -> None:
        self._open_log = open_log
        self._begin = begin
        self._queue = queue
        self._known = ChainEnd()
        self._log: AuditLog | None = None
        self._is_begun = False
        self._opening: Draft | None = None
        self._attempted: list[ChainEnd] = []
        # Number of records of the group that are already in the log, but not synced.
        self._written = 0
        self._problem = ""
        self._failed_us = 0
        self._logged_dropped = 0
        self._head_synced_ns = 0

    def commit(self, group: Sequence[Draft]) -> None:
        # Step 1: after a failure, open the log again and find out what reached the disk.
        log = self._log or self._open()
        before = log.end
        # Step 2: collect the START or RESUME record, if one is due, and the group's records that are not yet in the
        # log.
        drafts = [*([] if self._opening is None else [self._opening]), *group[self._written :]]
        # Step 3: append. If it fails, the next try compares the file's end with `attempted`.
        try:
            log.append(drafts, time.monotonic_ns() // NS_PER_US)
        finally:
            self._attempted = log.attempted
        self._is_begun = True
        # Step 4: the log works. Report how it continues, and the problems that were found when it was opened.
        if self._opening is not None:
            log_event(LogEvent.AUDIT_CONTINUED, record=before.seq, hash=before.hash)
            if log.findings:
                log_event(LogEvent.AUDIT_NOT_AS_LEFT, reason=found_text(log.findings))
        self._opening, self._attempted, self._written = None, [], 0

    def after_commit(self) -> None:
        # Log dropped records only now. When they are dropped, the disk is slow, and log lines would make it slower.
        if self._queue.dropped > self._logged_dropped:
            log_event(LogEvent.AUDIT_DROPPED, count=self._queue.dropped)
            self._logged_dropped = self._queue.dropped
        if (log := self._log) is None:
            return
        # Make the `prune` record durable before the file is deleted. A crash in between then leaves an extra file and
        # no gap.
        while (superfluous := log.superfluous()) is not None:
            path, data = superfluous
            log.append([draft_of(RecordKind.PRUNE, data)], time.monotonic_ns() // NS_PER_US)
            log.remove(path)
        self._known = log.end
        self._sync_head(log)

    def on_idle(self) -> None:
        if (log := self._log) is not None:
            log.beat(time.monotonic_ns() // NS_PER_US)
            self._sync_head(log)

    def on_failure(self, error: Exception, problem: str, *, is_first: bool) -> None:
        # The RESUME record has the time of the first failure, after which records may be missing.
        if is_first:
            self._failed_us = time.monotonic_ns() // NS_PER_US
            log_event(LogEvent.AUDIT_FAILING, reason=str(error))
        self._problem = problem
        # After a failed write, read the file again, because its contents are unknown.
        if self._log is not None:
            self._log.close()
            self._log = None

    def on_recovery(self) -> None:
        log_event(LogEvent.AUDIT_BACK)

    def close(self) -> None:
        if self._log is None:
            return
        # The log is durable. If the head can't be synced, it is out of date but valid.
        try:
            self._log.sync_head()
        except OSError as error:
            log_event(LogEvent.AUDIT_HEAD_FAILING, reason=str(error))
        log_event(LogEvent.AUDIT_CLOSED, record=self._log.end.seq, hash=self._log.end.hash)
        self._log.close()
        self._log = None

    def _sync_head(self, log: AuditLog) -> None:
        # Sync the head at most once in BEAT_S, because no reply waits for it.
        now_ns = time.monotonic_ns()
        if now_ns - self._head_synced_ns >= BEAT_S * NS_PER_S:
            log.sync_head()
            self._head_synced_ns = now_ns

    def _open(self) -> AuditLog:
        # Read the end of the file, which may be the end of any record of the append that failed.
        log = self._log = self._open_log(self._known)
        if log.end in self._attempted:
            # The failed append wrote some or all of its records to the file. These need only a sync.
            written_count = self._attempted.index(log.end) + 1
            # The first of them was the START or RESUME record, which is not part of the group.
            if self._opening is not None:
                self._is_begun = True
                written_count -= 1
            self._written += written_count
            log.rewrite()
        self._attempted = []
        self._opening = self._opening_draft(log)
        return log

    def _opening_draft(self, log: AuditLog) -> Draft:
        if self._is_begun:
            return draft_of(RecordKind.RESUME, {"problem": self._problem, "since_us": self._failed_us} | log.findings)
        previous: dict[str, Any] = {}
        if log.previous is not None:
            previous["previous"] = {"boot": log.previous.boot, "alive_us": log.previous.alive_us}
        begin = self._begin
        return Draft(begin.kind, begin.data | previous | log.findings, begin.wall_us, begin.mono_us)
