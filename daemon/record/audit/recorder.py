"""How often one tenant is written of: what it can repeat at will must not fill the log, nor push others out of it.

Records that wait for the disk: a bounded queue between the broker's loop and the writer's thread.

The thread that puts records on the disk, and what happens if it can't.

It takes all that is queued, writes it and syncs once: while a sync lasts, the next group gathers. If the disk refuses,
it keeps what it has, opens the log anew every second, finds out what reached the disk after all, and goes on with a
record that says what happened.

The broker's side of the audit log: it is told what to record, and holds a grant back until its record is durable.

Nothing here decides what the lease table does, with one exception: where the operator demands the log, a grant that
can't be recorded in time is revoked before anybody hears of it.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpulease.daemon.capabilities.claims import Claims
from gpulease.daemon.host.processes import start_thread
from gpulease.daemon.leases import Denial, Denied, Event, Granted, LeaseSnapshot, RevokeRequested
from gpulease.daemon.leases.denials import not_recorded
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.record.audit.files import AuditLog, FolderInUse, ToldLately
from gpulease.daemon.record.audit.projector import Lookup, Told
from gpulease.daemon.record.audit.reading import found_text
from gpulease.daemon.record.audit.records import ENDS, FORMAT, Draft, Kind, Link, clean_text
from gpulease.protocol.capabilities import names_of
from gpulease.protocol.lease_ids import lease_text

BURST_RECORDS: Final = 600
"""Of a tenant, before anything is omitted: more than an honest one has in minutes."""

RECORDS_PER_S: Final = 1
"""From then on: 30 MB a day of a tenant that does nothing but be denied."""

MAX_TENANTS: Final = 4096
"""Told apart; more than a host has users. The others share one budget."""

_NS_PER_S: Final = 1_000_000_000


@dataclass(slots=True)
class _Budget:
    left_ns: int
    at_ns: int
    omitted: int = 0


class Budgets:
    """A token bucket for each tenant, and how much of it was omitted."""

    def __init__(self) -> None:
        self._budgets: dict[str, _Budget] = {}

    def spend(self, tenant: str, now_ns: int) -> int | None:
        """How many were omitted before this one if it is to be written, else None: it is omitted too."""
        cost_ns = _NS_PER_S // RECORDS_PER_S
        full_ns = BURST_RECORDS * cost_ns
        if tenant not in self._budgets and len(self._budgets) >= MAX_TENANTS:
            tenant = ""
        budget = self._budgets.setdefault(tenant, _Budget(full_ns, now_ns))
        budget.left_ns = min(full_ns, budget.left_ns + now_ns - budget.at_ns)
        budget.at_ns = now_ns
        if budget.left_ns < cost_ns:
            budget.omitted += 1
            return None
        budget.left_ns -= cost_ns
        omitted, budget.omitted = budget.omitted, 0
        return omitted

    def take_omitted(self) -> dict[str, int]:
        """What was omitted and not told yet, by tenant."""
        left = {tenant: budget.omitted for tenant, budget in self._budgets.items() if budget.omitted}
        for budget in self._budgets.values():
            budget.omitted = 0
        return left


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


class AuditWriter:
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
                log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing="writing the audit log")
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
            log_event(LogEvent.AUDIT_CONTINUED, record=before.seq, hash=before.hash)
            if log.found:
                log_event(LogEvent.AUDIT_NOT_AS_LEFT, reason=found_text(log.found))
        if self._failure:
            log_event(LogEvent.AUDIT_BACK)
            self._failure = ""
        self._durable += self._unsynced + len(self._pending)
        self._pending, self._opening, self._attempted, self._unsynced = [], None, [], 0
        self._on_change()
        if self._inbox.dropped > self._told_dropped:
            log_event(LogEvent.AUDIT_DROPPED, count=self._inbox.dropped)
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
            log_event(LogEvent.AUDIT_FAILING, reason=str(error))
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
                log_event(LogEvent.AUDIT_HEAD_FAILING, reason=str(error))
            log_event(LogEvent.AUDIT_CLOSED, record=self._log.link.seq, hash=self._log.link.hash)
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


MAX_WAIT_S: Final = 5.0
"""For a grant's record to become durable. A tenant that waits longer is better off elsewhere."""

US_PER_MS: Final = 1000


OnOutcome = Callable[[Granted | Denied], None]


class Recorder:
    """Of a daemon that keeps no audit log: forgets everything, holds nothing back."""

    def observe(self, lookup: Lookup, post: Callable[[Event], None]) -> None:
        """Which lease table is told of, and where events for it go."""

    def record(self, told: Told, now_ns: int) -> None:
        """What the witness tells of an event, before any of what it brought about is carried out."""

    def without_end(self, tombstones: Sequence[LeaseSnapshot]) -> list[LeaseSnapshot]:
        """Those of an earlier daemon's leases, oldest end first, of whose ends the log does not tell."""
        return []

    def attached(self, lease_id: int, tenant: str) -> None:
        """A connection was handed to a lease's worker."""

    def issued(self, tenant: str, by: str, grant: Claims, audience: str | None) -> None:
        """A token was given to `by`, about a lease of `tenant` or, if it has none, about the node.

        `audience` is the tenant that may use it, if it is one that is known here.
        """

    def token_revoked(self, tenant: str, by: str, lease_id: int, nonce: bytes) -> None:
        """`by` ended the token of that nonce, about a lease of `tenant`, or about the node if `lease_id` is 0."""

    def refused(self, operation: str, tenant: str, lease_id: int, message: str) -> None:
        """A request that never got to the lease table; `lease_id` is 0 if it named none."""

    def reloaded(self, config: str) -> None:
        """The settings were read again; `config` is the digest of those that hold now."""

    def denial(self) -> Denial | None:
        """Why no lease can be granted at present, if it is for want of the log."""
        return None

    def problem(self) -> str:
        """Why the log can't be written now, in a clause; "" if it can, or if none is kept."""
        return ""

    def figures(self) -> dict[str, int] | None:
        """How many records wait, are durable, and were dropped; None if no log is kept."""
        return None

    def answer(self, granted: Granted, on_outcome: OnOutcome) -> None:
        """Tell a tenant of its grant, once that may be."""
        on_outcome(granted)

    async def stop(self) -> None:
        """Write what is left."""


@dataclass(slots=True)
class _Held:
    ticket: int
    granted: Granted
    on_outcome: OnOutcome
    timer: asyncio.TimerHandle


class LogRecorder(Recorder):
    """Of a daemon that keeps one.

    Args:
        is_required: No grant without its record on the disk.
        told: What the log tells already: the earlier daemon may have been killed between this log and its journal, in
            which leases have ended, or have not.
    """

    def __init__(self, is_required: bool, told: ToldLately | None = None) -> None:
        self._is_required = is_required
        self._told = told or ToldLately()
        self._loop = asyncio.get_running_loop()
        self._writer: AuditWriter | None = None
        self._post: Callable[[Event], None] = lambda _: None
        self._budgets = Budgets()
        self._tickets: dict[int, int] = {}
        self._held: dict[int, _Held] = {}

    def write_with(self, writer: AuditWriter) -> None:
        """Where records go."""
        self._writer = writer

    def on_change(self) -> None:
        """For the writer's thread."""
        if self._is_required:
            with contextlib.suppress(RuntimeError):  # The loop has ended: nobody waits.
                self._loop.call_soon_threadsafe(self._release)

    # --- what the broker tells ---

    def observe(self, lookup: Lookup, post: Callable[[Event], None]) -> None:
        """As above."""
        self._post = post

    def record(self, told: Told, now_ns: int) -> None:
        """As above. A fault here must not keep the effects from being carried out; an unrecorded grant is held."""
        try:
            self._record(told, now_ns)
        except Exception:
            log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing=f"recording {told[0].value}")

    def without_end(self, tombstones: Sequence[LeaseSnapshot]) -> list[LeaseSnapshot]:
        """As above. Records and tombstones are in the order of time, but for tombstones of earlier boots.

        So of a lease of which the last records do not tell at all, the end is missing only if it came behind them.
        """
        found = []
        cut_us = self._told.cut_us
        for lease in reversed(tombstones):
            if cut_us is not None and (lease.ended_ns or 0) // NS_PER_US < cut_us:
                cut_us = None
            kind = self._told.kinds.get(lease_text(lease.lease_id))
            # The log may not have been kept when one began of which it does not tell.
            is_cut_off = cut_us is not None and lease.created_ns // NS_PER_US <= cut_us
            if is_cut_off if kind is None else kind not in (Kind.END, Kind.FENCE):
                found.append(lease)
        return found[::-1]

    def attached(self, lease_id: int, tenant: str) -> None:
        """As above."""
        self._record((Kind.ATTACH, {"lease": lease_text(lease_id), "tenant": tenant}))

    def issued(self, tenant: str, by: str, grant: Claims, audience: str | None) -> None:
        """As above."""
        lease = {"lease": lease_text(grant.lease_id), "generation": grant.generation} if grant.lease_id else {}
        told = {
            "tenant": tenant,
            "by": by,
            "permissions": list(names_of(grant.permissions)),
            "audience": audience,
            "expires_us": grant.expires_ms * US_PER_MS,
            "nonce": grant.nonce.hex(),
        }
        self._record((Kind.ISSUE, lease | told))

    def token_revoked(self, tenant: str, by: str, lease_id: int, nonce: bytes) -> None:
        """As above."""
        lease = {"lease": lease_text(lease_id)} if lease_id else {}
        self._record((Kind.WITHDRAW, lease | {"tenant": tenant, "by": by, "nonce": nonce.hex()}))

    def refused(self, operation: str, tenant: str, lease_id: int, message: str) -> None:
        """As above."""
        lease = {"lease": lease_text(lease_id)} if lease_id else {}
        told = {"operation": operation.lower(), "tenant": tenant, "reason": "refused", "message": clean_text(message)}
        self._record((Kind.DENY, told | lease))

    def reloaded(self, config: str) -> None:
        """As above."""
        self._record((Kind.OPERATOR, {"action": "reload", "config": config}))

    # --- what the log demands ---

    def denial(self) -> Denial | None:
        """As above."""
        problem = self.problem() if self._is_required else ""
        return not_recorded(problem) if problem else None

    def answer(self, granted: Granted, on_outcome: OnOutcome) -> None:
        """As above."""
        lease_id = granted.lease.lease_id
        ticket = self._tickets.pop(lease_id, 0)
        if not self._is_required or (self._writer is not None and self._writer.is_durable(ticket)):
            on_outcome(granted)
            return
        timer = self._loop.call_later(MAX_WAIT_S, self._give_up, lease_id)
        self._held[lease_id] = _Held(ticket, granted, on_outcome, timer)
        if not ticket or self.problem():
            self._give_up(lease_id)

    async def stop(self) -> None:
        """As above. The lease table is at rest by now."""
        if self._writer is None:
            return
        omitted = [[tenant, count] for tenant, count in sorted(self._budgets.take_omitted().items())]
        is_whole = await asyncio.to_thread(self._writer.stop, {"omitted": omitted} if omitted else {})
        if not is_whole:
            why = self._writer.problem() or "the disk is too slow"
            log_event(LogEvent.AUDIT_SHORT, reason=why)

    def _record(self, told: Told, now_ns: int = 0) -> None:
        if self._writer is None:
            return
        kind, data = told
        if kind is Kind.END and self._told.kinds.get(data["lease"]) is Kind.END:
            return
        if kind in MINOR:
            omitted = self._budgets.spend(str(data.get("tenant", "")), now_ns or time.monotonic_ns())
            if omitted is None:
                return
            if omitted:
                data["omitted"] = omitted
        ticket = self._writer.put(kind, data, now_ns)
        if kind is Kind.GRANT and self._is_required:
            self._tickets[int(data["lease"], 16)] = ticket
        elif self._tickets and kind in ENDS:
            self._tickets.pop(int(data["lease"], 16), None)

    def problem(self) -> str:
        """As above."""
        return "it is not open" if self._writer is None else self._writer.problem()

    def figures(self) -> dict[str, int] | None:
        """As above."""
        return None if self._writer is None else self._writer.figures()

    def _release(self) -> None:
        if self._writer is None:
            return
        for lease_id, held in list(self._held.items()):
            if self._writer.is_durable(held.ticket):
                del self._held[lease_id]
                held.timer.cancel()
                held.on_outcome(held.granted)
            elif self._writer.problem():
                self._give_up(lease_id)

    def _give_up(self, lease_id: int) -> None:
        held = self._held.pop(lease_id, None)
        if held is None:
            return
        held.timer.cancel()
        denial = not_recorded(self.problem() or f"it took more than {MAX_WAIT_S:g} s")
        lease = held.granted.lease
        told = {"operation": "acquire", "tenant": lease.tenant, "lease": lease_text(lease_id)}
        self._record((Kind.DENY, told | {"reason": denial.reason.value, "message": denial.message}))
        self._post(RevokeRequested(0, lease_id, denial.message))
        held.on_outcome(Denied(held.granted.request, denial))
