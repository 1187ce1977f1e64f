"""What of the lease table's life goes into the journal: events and effects in, changes of rows out. No I/O.

The thread that commits: all that is queued in one transaction, and while that syncs the next group gathers.

If the disk refuses, nothing is dropped: the same changes are tried again every second, and those that came since.

The broker's side of the journal: it is told everything, and holds outcomes back until they are on the disk.

Nothing here decides what the lease table does, with one exception: a grant that can't be written down in time is
revoked before anybody hears of it.
"""

import asyncio
import contextlib
import heapq
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from gpulease.daemon.host.processes import start_thread
from gpulease.daemon.leases import (
    Cause,
    Denial,
    DenialReason,
    Denied,
    DrainSet,
    Effect,
    Event,
    FenceCleared,
    Freed,
    Granted,
    KeptCard,
    KeptLease,
    LeaseEnded,
    LeaseRestored,
    LeaseSnapshot,
    LeaseState,
    LeaseTable,
    Outcome,
    Past,
    RefuseWork,
    Renewed,
    RevokeDone,
    RevokeRequested,
    SessionFaulted,
    SubmitReady,
    WarmEnded,
)
from gpulease.daemon.leases.denials import done_but_not_kept, not_kept
from gpulease.daemon.leases.store import mark_of
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.record.journal.rows import (
    DRAIN_KEY,
    Change,
    Contents,
    KeptRelay,
    RowKind,
    Spent,
    lease_key,
    number_key,
    spent_key,
    warm_key,
)
from gpulease.daemon.record.journal.store import Store, prepare

KEPT_TOMBSTONES: Final = 8192
"""The last leases that ended: their tenants are told why after a restart too. Bounds the file, and how long it is read
at the start; the table itself remembers more."""

_KEPT: Final = frozenset({Granted, Renewed, RefuseWork, LeaseEnded, FenceCleared, WarmEnded, DrainSet})
"""Effects that may change rows: most are passed over by their kind."""


class JournalProjector:
    """Knows which leases have rows.

    Args:
        kept: Those that have one already.
        next_tombstone: The place of the tombstone that comes next.
    """

    def __init__(self, kept: Iterable[KeptLease] = (), next_tombstone: int = 0) -> None:
        self._pids = {lease.lease_id: lease.worker_pid for lease in kept}
        self._next_tombstone = next_tombstone

    def changes(
        self, event: Event, effects: Sequence[Effect], table: LeaseTable, pid_of: Callable[[int], int]
    ) -> list[Change]:
        """What one event, which `table` has handled, changes in the rows."""
        out: list[Change] = []
        if isinstance(event, SessionFaulted | LeaseRestored):
            lease_id = event.worker_id if isinstance(event, SessionFaulted) else event.kept.lease_id
            self._update(lease_id, table, out)
        for effect in effects:
            if type(effect) not in _KEPT:
                continue
            match effect:
                case Granted(lease=lease):
                    self._pids[lease.lease_id] = pid_of(lease.lease_id)
                    self._update(lease.lease_id, table, out)
                case Renewed(lease=lease):
                    self._update(lease.lease_id, table, out)
                case RefuseWork(lease_id, cause):
                    self._update(lease_id, table, out)
                    if cause is Cause.REVOKED:
                        out.append(Change(RowKind.REVOKED, number_key(mark_of(lease_id)), 1))
                case LeaseEnded(lease=lease) if lease.state is LeaseState.FENCED:
                    self._pids.setdefault(lease.lease_id, 0)
                    self._update(lease.lease_id, table, out)
                case LeaseEnded(lease=lease):
                    self._bury(lease.lease_id, lease, out)
                case FenceCleared(lease_ids=lease_ids, warm_ids=warm_ids):
                    for lease_id in lease_ids:
                        self._bury(lease_id, table.get(lease_id), out)
                        out.append(Change(RowKind.CLEARED, number_key(mark_of(lease_id)), 1))
                    out += [Change(RowKind.WARM, warm_key(warm_id), None) for warm_id in warm_ids]
                case WarmEnded(warm_id=warm_id, is_fenced=True):
                    out.append(Change(RowKind.WARM, warm_key(warm_id), table.keep_warm(warm_id)))
                case DrainSet(deadline_ns=deadline_ns):
                    out.append(Change(RowKind.DRAIN, DRAIN_KEY, deadline_ns))
        return out

    def _update(self, lease_id: int, table: LeaseTable, out: list[Change]) -> None:
        """Write a lease that has a row, as it is now."""
        worker_pid = self._pids.get(lease_id)
        if worker_pid is not None and (kept := table.keep(lease_id, worker_pid)) is not None:
            out.append(Change(RowKind.LEASE, lease_key(lease_id), kept))

    def _bury(self, lease_id: int, lease: LeaseSnapshot | None, out: list[Change]) -> None:
        """A lease is torn down: of one that had a row and was a tenant's, a tombstone stays."""
        if self._pids.pop(lease_id, None) is None:
            return
        out.append(Change(RowKind.LEASE, lease_key(lease_id), None))
        if lease is None or not lease.tenant:
            return
        out.append(Change(RowKind.TOMBSTONE, number_key(self._next_tombstone), lease))
        if self._next_tombstone >= KEPT_TOMBSTONES:
            out.append(Change(RowKind.TOMBSTONE, number_key(self._next_tombstone - KEPT_TOMBSTONES), None))
        self._next_tombstone += 1


MAX_GROUP: Final = 1024
"""Batches of changes in one commit: bounds how long those in it wait for each other."""

RETRY_S: Final = 1.0
"""Between two tries to write to a disk that refused."""

STALLED_AFTER_S: Final = 5.0
"""A commit that lasts longer counts as a disk that does not work."""

STOP_TIMEOUT_S: Final = 5.0
"""For the last changes when the daemon stops; a hung disk must not keep it."""

NS_PER_S: Final = 1_000_000_000


class JournalWriter:
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
            log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing="writing the journal")
            self._fail(error)
        else:
            self.durable += len(group)
            self.commits += 1
            group.clear()
            if self._failure:
                log_event(LogEvent.JOURNAL_BACK)
                self._failure = ""
        finally:
            self._busy_since_ns = 0
        self._on_change()

    def _fail(self, error: Exception) -> None:
        said = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        if not self._failure:
            log_event(LogEvent.JOURNAL_FAILING, reason=said)
        self._failure = said or type(error).__name__


def _nobody() -> None:
    """Told before anybody listens."""


MAX_WAIT_S: Final = 5.0
"""For what an outcome says to become durable. A tenant that waits longer is better off elsewhere."""

NS_PER_MS: Final = 1_000_000

OnOutcome = Callable[[Outcome], None]


class Journal:
    """Of a daemon that keeps none: forgets everything, holds nothing back.

    Attributes:
        kept: The leases that an earlier daemon left, for `LeaseRestored`.
        past: What else it left, for the lease table.
        spent: Tokens that were used: lease, nonce, and until when no token of that nonce can be valid (monotonic ms).
        revoked_tokens: The same of those that were revoked.
        cards: What was measured of the cards in this boot of the host, by uuid.
        relays: Relays of remote tenants that may still live.
    """

    kept: tuple[KeptLease, ...] = ()
    past: Past = Past()
    spent: tuple[Spent, ...] = ()
    revoked_tokens: tuple[Spent, ...] = ()
    cards: Mapping[str, KeptCard] = {}
    relays: tuple[KeptRelay, ...] = ()

    def observe(self, table: LeaseTable, pid_of: Callable[[int], int], post: Callable[[Event], None]) -> None:
        """Which table is kept, which process a lease's worker is, and where events go."""

    def saw(self, event: Event, effects: Sequence[Effect], now_ns: int) -> None:
        """What an event brought about; told before any of it is carried out."""

    def answer(self, outcome: Outcome, on_outcome: OnOutcome) -> None:
        """Tell an outcome once all before it is on the disk; a `Denied` in its place if it can't be brought there."""
        on_outcome(outcome)

    def denial(self) -> Denial | None:
        """Why nothing can be granted or renewed at present, if it is for want of the journal."""
        return None

    def problem(self) -> str:
        """Why it can't be written now, in a clause; "" if it can, or if none is kept."""
        return ""

    def spend(self, lease_id: int, nonce: bytes, expires_ms: int, on_done: Callable[[bool], None]) -> None:
        """Write down that a token was used, then say whether that is on the disk."""
        on_done(True)

    def unspend(self, lease_id: int, nonce: bytes) -> None:
        """Strike out that a token was used."""

    def revoke_token(self, lease_id: int, nonce: bytes, expires_ms: int, on_done: Callable[[bool], None]) -> None:
        """The same of one that was revoked."""
        on_done(True)

    def remember_cards(self, cards: Sequence[KeptCard]) -> None:
        """What was measured of the cards, for the next daemon of this boot."""

    def remember_relay(self, relay: KeptRelay) -> None:
        """A remote tenant has come, whose certificate the next daemon may find revoked."""

    def forget_relay(self, pid: int) -> None:
        """It has gone."""

    def once_kept(self, do: Callable[[], None]) -> None:
        """Do something when all that was seen before is on the disk; never, if it can't be brought there."""
        do()

    async def stop(self) -> None:
        """Write what is left."""


_LASTING_DENIALS: Final = frozenset({DenialReason.FENCED, DenialReason.REVOKED})
"""Refusals that hold for ever: what they say of a lease must be on the disk as much as an outcome."""


class _Held(NamedTuple):
    """Somebody waits for a ticket to be durable, until then. `tell` gets the journal's problem, "" for none."""

    ticket: int
    until_s: float
    tell: Callable[[str], None]


class FileJournal(Journal):
    """Of a daemon that keeps one; made by `open_journal`, used in one event loop from `observe` on."""

    def __init__(self, writer: JournalWriter, contents: Contents, lock_fd: int) -> None:
        self.kept = tuple(contents.leases)
        self.past = contents.past()
        self.spent = tuple(contents.spent)
        self.revoked_tokens = tuple(contents.revoked_tokens)
        self.cards = dict(contents.cards)
        self.relays = tuple(contents.relays.values())
        self._writer = writer
        self._lock_fd = lock_fd
        self._follower = JournalProjector(contents.leases, contents.next_tombstone)
        kept = ((RowKind.SPENT, contents.spent), (RowKind.REVOKED_TOKEN, contents.revoked_tokens))
        self._token_ends = [(ends_ms, kind, spent_key(of, nonce)) for kind, rows in kept for of, nonce, ends_ms in rows]
        heapq.heapify(self._token_ends)
        # By their tickets, and so by their times too.
        self._held: deque[_Held] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._fault = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._table: LeaseTable | None = None
        self._pid_of: Callable[[int], int] = lambda _: 0
        self._post: Callable[[Event], None] = lambda _: None

    # --- what the broker tells ---

    def observe(self, table: LeaseTable, pid_of: Callable[[int], int], post: Callable[[Event], None]) -> None:
        """As above."""
        self._loop = asyncio.get_running_loop()
        self._table, self._pid_of, self._post = table, pid_of, post
        self._writer.start(self._on_change)

    def saw(self, event: Event, effects: Sequence[Effect], now_ns: int) -> None:
        """As above. A fault here must not keep the effects from being carried out; but nothing is granted any more."""
        if self._table is None:
            return
        try:
            changes = self._follower.changes(event, effects, self._table, self._pid_of)
        except Exception:
            log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing=f"following {event!r}")
            self._fault = "the daemon could not follow what happened to a lease"
            return
        if changes:
            self._writer.put(changes)

    def spend(self, lease_id: int, nonce: bytes, expires_ms: int, on_done: Callable[[bool], None]) -> None:
        """As above."""
        self._keep_token(RowKind.SPENT, spent_key(lease_id, nonce), expires_ms, on_done)

    def unspend(self, lease_id: int, nonce: bytes) -> None:
        """As above."""
        self._writer.put([Change(RowKind.SPENT, spent_key(lease_id, nonce), None)])

    def revoke_token(self, lease_id: int, nonce: bytes, expires_ms: int, on_done: Callable[[bool], None]) -> None:
        """As above."""
        self._keep_token(RowKind.REVOKED_TOKEN, spent_key(lease_id, nonce), expires_ms, on_done)

    def _keep_token(self, kind: RowKind, key: bytes, expires_ms: int, on_done: Callable[[bool], None]) -> None:
        changes = [Change(kind, key, expires_ms)]
        # Each that comes takes along two that are over, so that the file does not grow.
        now_ms = time.monotonic_ns() // NS_PER_MS
        while self._token_ends and self._token_ends[0][0] < now_ms and len(changes) < 3:
            _, over_kind, over_key = heapq.heappop(self._token_ends)
            changes.insert(0, Change(over_kind, over_key, None))
        heapq.heappush(self._token_ends, (expires_ms, kind, key))
        self._writer.put(changes)
        self._hold(lambda problem: on_done(not problem))

    def remember_cards(self, cards: Sequence[KeptCard]) -> None:
        """As above."""
        self._writer.put([Change(RowKind.CARD, card.uuid.encode(), card) for card in cards])

    def remember_relay(self, relay: KeptRelay) -> None:
        """As above. Not while nothing can be written: those who come and go then would make the queue grow."""
        if not self.problem():
            self._writer.put([Change(RowKind.RELAY, number_key(relay.pid), relay)])

    def forget_relay(self, pid: int) -> None:
        """As above. A row that stays is of a process that is not there, which the next daemon sees."""
        if not self.problem():
            self._writer.put([Change(RowKind.RELAY, number_key(pid), None)])

    def once_kept(self, do: Callable[[], None]) -> None:
        """As above."""
        self._hold(lambda problem: None if problem else do())

    # --- what is told ---

    def denial(self) -> Denial | None:
        """As above."""
        problem = self.problem()
        return not_kept(problem) if problem else None

    def answer(self, outcome: Outcome, on_outcome: OnOutcome) -> None:
        """As above. It waits for all that happened before, which is simpler than to know what of it matters."""
        if isinstance(outcome, SubmitReady):
            # Nothing is kept of a submit: whoever ends this daemon learns of it from its worker.
            on_outcome(outcome)
            return
        if isinstance(outcome, Denied) and outcome.denial.reason not in _LASTING_DENIALS:
            on_outcome(outcome)
            return
        self._hold(partial(self._tell_outcome, outcome, on_outcome))

    def _tell_outcome(self, outcome: Outcome, on_outcome: OnOutcome, problem: str) -> None:
        on_outcome(self._without(outcome, problem) if problem else outcome)

    async def stop(self) -> None:
        """As above. The lease table is at rest by now."""
        is_whole = await asyncio.to_thread(self._writer.stop)
        if not is_whole:
            log_event(LogEvent.JOURNAL_SHORT, reason=self.problem() or "the disk is too slow")
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _without(self, outcome: Outcome, problem: str) -> Denied:
        """What is told in the place of an outcome that can't be written down."""
        match outcome:
            case Granted(request, lease):
                denial = not_kept(problem)
                self._post(RevokeRequested(0, lease.lease_id, denial.message))
                return Denied(request, denial)
            case Renewed(request, lease):
                return Denied(request, done_but_not_kept(f"Lease {lease.lease_id:032x} was renewed", problem))
            case Freed(request, lease):
                return Denied(request, done_but_not_kept(f"Lease {lease.lease_id:032x} was given back", problem))
            case RevokeDone(request):
                return Denied(request, done_but_not_kept("The lease has ended", problem))
            case FenceCleared(request, count):
                return Denied(request, done_but_not_kept(f"{count} fences were cleared", problem))
            case DrainSet(request):
                return Denied(request, done_but_not_kept("The drain is set as it was asked for", problem))
            case SubmitReady(request):
                return Denied(request, not_kept(problem))
            case Denied():
                return outcome

    def _hold(self, tell: Callable[[str], None]) -> None:
        """Have somebody told once all that was put so far is durable, or why it is not."""
        ticket, problem = self._writer.accepted, self.problem()
        if self._fault or (problem and self._writer.durable < ticket):
            tell(problem)
        elif self._writer.durable >= ticket or self._loop is None:
            tell("")
        else:
            self._held.append(_Held(ticket, self._loop.time() + MAX_WAIT_S, tell))
            if self._timer is None:
                self._timer = self._loop.call_later(MAX_WAIT_S, self._give_up, self._loop)

    def problem(self) -> str:
        """As above."""
        return self._fault or self._writer.problem()

    def _on_change(self) -> None:
        """For the writer's thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # The loop has ended: nobody waits.
                self._loop.call_soon_threadsafe(self._release)

    def _release(self) -> None:
        durable = self._writer.durable
        while self._held and self._held[0].ticket <= durable:
            self._tell(self._held.popleft(), "")
        if self._held and (problem := self.problem()):
            while self._held:
                self._tell(self._held.popleft(), problem)

    def _give_up(self, loop: asyncio.AbstractEventLoop) -> None:
        """Those have waited too long; the timer goes on with the first of the others."""
        self._timer = None
        while self._held and self._held[0].until_s <= loop.time():
            self._tell(self._held.popleft(), self.problem() or f"it took more than {MAX_WAIT_S:g} s")
        if self._held and self._timer is None:
            self._timer = loop.call_at(self._held[0].until_s, self._give_up, loop)

    def _tell(self, held: _Held, problem: str) -> None:
        try:
            held.tell(problem)
        except Exception:
            # A bug of ours; whoever else waits must be told all the same.
            log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing="telling an outcome")


def open_journal(folder: Path, boot_id: str) -> FileJournal:
    """The journal in a folder, made if there is none. Waits for the disk: belongs in a thread, or before the loop.

    The folder is locked until `stop`, or the end of this process.

    Args:
        folder: Made, with mode 0700, if only it is missing.
        boot_id: The host's (random(4)). Leases of another boot have ended with it; their fences stay.

    Raises:
        JournalBroken: It can't be used.
    """
    lock_fd = prepare(folder)
    try:
        contents = Contents()
        store = Store(folder, boot_id, contents.take)
        store.begin(contents.cross_boot() if store.last_boot != boot_id else [])
    except BaseException:
        os.close(lock_fd)
        raise
    return FileJournal(JournalWriter(store), contents, lock_fd)
