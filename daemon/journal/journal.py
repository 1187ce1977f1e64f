"""The broker's side of the journal: it is told everything, and holds outcomes back until they are on the disk.

Nothing here decides what the lease table does, with one exception: a grant that can't be written down in time is
revoked before anybody hears of it.
"""

import asyncio
import contextlib
import heapq
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from gpulease.daemon.core import (
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
    LeaseTable,
    Outcome,
    Past,
    Renewed,
    RevokeDone,
    RevokeRequested,
    SubmitReady,
)
from gpulease.daemon.core.denials import done_but_not_kept, not_kept
from gpulease.daemon.journal.contents import Contents, Spent
from gpulease.daemon.journal.folder import prepare
from gpulease.daemon.journal.following import Follower
from gpulease.daemon.journal.rows import Change, KeptRelay, RowKind, number_key, spent_key
from gpulease.daemon.journal.store import Store
from gpulease.daemon.journal.writer import Writer
from gpulease.daemon.logs.catalogue import LogEvent
from gpulease.daemon.logs.telling import tell

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

    def __init__(self, writer: Writer, contents: Contents, lock_fd: int) -> None:
        self.kept = tuple(contents.leases)
        self.past = contents.past()
        self.spent = tuple(contents.spent)
        self.revoked_tokens = tuple(contents.revoked_tokens)
        self.cards = dict(contents.cards)
        self.relays = tuple(contents.relays.values())
        self._writer = writer
        self._lock_fd = lock_fd
        self._follower = Follower(contents.leases, contents.next_tombstone)
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
            tell(LogEvent.DAEMON_FAULT, is_fault=True, doing=f"following {event!r}")
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
            tell(LogEvent.JOURNAL_SHORT, reason=self.problem() or "the disk is too slow")
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
            tell(LogEvent.DAEMON_FAULT, is_fault=True, doing="telling an outcome")


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
    return FileJournal(Writer(store), contents, lock_fd)
