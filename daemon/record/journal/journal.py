"""Records events of the lease table in the journal, and holds outcomes until the events before them are on the disk.

`JournalProjector` turns events and their effects into changes of rows, a `GroupCommitter` writes the changes, and
`DurableReplies` holds outcomes. A grant that can't be recorded in time is revoked before its tenant receives it. In no
other case does the journal influence the lease table.
"""

import asyncio
import heapq
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from gpulease.daemon.leases import events
from gpulease.daemon.leases.acquire_steps import Checked
from gpulease.daemon.leases.denials import Denial, DenialReason, done_but_not_kept, not_kept
from gpulease.daemon.leases.epochs import HighestEpochs
from gpulease.daemon.leases.events import Effect, Event
from gpulease.daemon.leases.model import Cause, LeaseSnapshot, LeaseState, WorkerKind, kind_of
from gpulease.daemon.leases.persisted import CardRow, LeaseRow, RecoveredState, RegionRow
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.leases.table_state import mark_of
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.record.group_commit import CommitTarget, DurableReplies, GroupCommitter, reason_of
from gpulease.daemon.record.journal.database import Store, prepare
from gpulease.daemon.record.journal.rows import (
    DRAIN_KEY,
    MEMBERSHIP_KEY,
    Change,
    Contents,
    MembershipRow,
    RelayRow,
    RowKind,
    Spent,
    lease_key,
    number_key,
    spent_key,
    warm_key,
)
from gpulease.protocol.time_units import NS_PER_MS

OnOutcome = Callable[[events.Outcome], None]
Changes = Sequence[Change]


class Journal:
    """The interface of a journal. A daemon without a journal uses this class, which does nothing.

    Attributes:
        kept: Leases that an earlier daemon left, for `LeaseRestored`.
        regions: Regions of these leases, for `RegionRestored`.
        recovered: Everything else that an earlier daemon left for the lease table.
        spent: Tokens that were used: lease, nonce, and the monotonic time in ms at which tokens with this nonce expire.
        revoked_tokens: Tokens that were revoked, with the same three members.
        cards: Measurements of the GPUs in this boot of the host, by uuid.
        relays: Relays of remote tenants that may still live.
        membership: The node's last membership in a fleet; None if it had none.
    """

    kept: tuple[LeaseRow, ...] = ()
    regions: tuple[RegionRow, ...] = ()
    recovered: RecoveredState = RecoveredState()
    spent: tuple[Spent, ...] = ()
    revoked_tokens: tuple[Spent, ...] = ()
    cards: Mapping[str, CardRow] = {}
    relays: tuple[RelayRow, ...] = ()
    membership: MembershipRow | None = None

    def observe(self, table: LeaseTable, pid_of: Callable[[int], int], post: Callable[[Event], None]) -> None:
        """Begin to record a table's events. `pid_of` returns a lease's worker's process id; `post` receives events."""

    def on_event(self, event: Event, effects: Sequence[Effect]) -> None:
        """Record the result of an event. Called before any effect is executed."""

    def answer(self, outcome: events.Outcome, on_outcome: OnOutcome) -> None:
        """Call `on_outcome` with the outcome when all events so far are durable, or else with a `RequestDenied`."""
        on_outcome(outcome)

    def denial(self) -> Denial | None:
        """Return why nothing can be granted or renewed now, if the journal is the reason."""
        return None

    def problem(self) -> str:
        """Return why the journal can't be written now, as a clause; "" if it can be, or if none is kept."""
        return ""

    def spend(self, lease_id: int, nonce: bytes, expires_ms: int, on_done: Callable[[bool], None]) -> None:
        """Record that a token was used. Calls `on_done` with True when the record is durable, or with False."""
        on_done(True)

    def unspend(self, lease_id: int, nonce: bytes) -> None:
        """Remove a token from those that were used."""

    def revoke_token(self, lease_id: int, nonce: bytes, expires_ms: int, on_done: Callable[[bool], None]) -> None:
        """Record that a token was revoked. Calls `on_done` with True when the record is durable, or with False."""
        on_done(True)

    def remember_cards(self, cards: Sequence[CardRow]) -> None:
        """Keep measurements of the GPUs for the next daemon of this boot."""

    def remember_relay(self, relay: RelayRow) -> None:
        """Keep the relay of a remote tenant, so that the next daemon can end it if its certificate is revoked."""

    def forget_relay(self, pid: int) -> None: ...

    def remember_membership(self, membership: MembershipRow) -> None:
        """Keep the node's membership in its fleet, with which the next daemon continues."""

    def once_kept(self, do: Callable[[], None]) -> None:
        """Call `do` when all events so far are durable, however long that takes."""
        do()

    def once_decided(self, do: Callable[[str], None]) -> None:
        """Call `do` with "" when all events so far are durable, or with the reason why they can't be in time."""
        do("")

    async def stop(self) -> None: ...


_LASTING_DENIALS: Final = frozenset({DenialReason.FENCED, DenialReason.REVOKED})
"""Reasons of denials that are permanent. Their cause must be durable before they are reported."""


class FileJournal(Journal):
    """A journal in a file, made by `open_journal`. From `observe` on it is used in one event loop."""

    def __init__(self, store: Store, contents: Contents, lock_fd: int) -> None:
        self.kept = tuple(contents.leases)
        self.regions = tuple(contents.regions)
        self.recovered = contents.recovered()
        self.spent = tuple(contents.spent)
        self.revoked_tokens = tuple(contents.revoked_tokens)
        self.cards = dict(contents.cards)
        self.relays = tuple(contents.relays.values())
        self.membership = contents.membership
        self._folder = _folder_of(lock_fd)
        self._committer = GroupCommitter(_StoreTarget(store))
        self._replies = DurableReplies(lambda: self._committer.durable, self.problem)
        self._lock_fd = lock_fd
        self._projector = JournalProjector(
            contents.leases,
            contents.next_tombstone,
            contents.regions,
            contents.next_region_tombstone,
            contents.epochs,
        )
        # A heap of tokens by time of expiry, from which `_keep_token` removes expired tokens.
        key_sets = ((RowKind.SPENT, contents.spent), (RowKind.REVOKED_TOKEN, contents.revoked_tokens))
        self._token_ends = [
            (ends_ms, kind, spent_key(tenant, nonce)) for kind, rows in key_sets for tenant, nonce, ends_ms in rows
        ]
        heapq.heapify(self._token_ends)
        self._fault = ""
        self._table: LeaseTable | None = None
        self._pid_of: Callable[[int], int] = lambda _: 0

    # --- events and facts to keep ---

    def observe(self, table: LeaseTable, pid_of: Callable[[int], int], post: Callable[[Event], None]) -> None:
        """Begin to follow a table, and start the thread that commits. Raises NoThread."""
        # Set the table before the thread starts, because the thread may report a commit at once.
        self._table, self._pid_of = table, pid_of
        self._replies.attach(post)
        self._committer.start(self._replies.on_change)

    def on_event(self, event: Event, effects: Sequence[Effect]) -> None:
        """Record an event. After a bug here, effects are still executed, but nothing more is granted."""
        # Events before `observe` come from the journal itself.
        if self._table is None:
            return
        try:
            changes = self._projector.changes(event, effects, self._table, self._pid_of)
        except Exception:
            log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing=f"following {event!r}")
            # Rows may now be wrong. Until a restart, no reply counts as durable.
            self._fault = "the daemon failed to record what happened to a lease"
            return
        # `answer` waits for all items so far, so the ticket is not needed.
        if changes:
            self._committer.put(changes)

    def spend(self, lease_id: int, nonce: bytes, expires_ms: int, on_done: Callable[[bool], None]) -> None:
        self._keep_token(RowKind.SPENT, spent_key(lease_id, nonce), expires_ms, on_done)

    def unspend(self, lease_id: int, nonce: bytes) -> None:
        self._committer.put([Change(RowKind.SPENT, spent_key(lease_id, nonce), None)])

    def revoke_token(self, lease_id: int, nonce: bytes, expires_ms: int, on_done: Callable[[bool], None]) -> None:
        self._keep_token(RowKind.REVOKED_TOKEN, spent_key(lease_id, nonce), expires_ms, on_done)

    def _keep_token(self, kind: RowKind, key: bytes, expires_ms: int, on_done: Callable[[bool], None]) -> None:
        changes = [Change(kind, key, expires_ms)]
        # Each new token removes up to two expired ones, so that the file does not grow.
        now_ms = time.monotonic_ns() // NS_PER_MS
        while self._token_ends and self._token_ends[0][0] < now_ms and len(changes) < 3:
            _, expired_kind, expired_key = heapq.heappop(self._token_ends)
            changes.insert(0, Change(expired_kind, expired_key, None))
        heapq.heappush(self._token_ends, (expires_ms, kind, key))
        self._committer.put(changes)
        # Wait for this token's row, because after a crash the token must not be accepted again.
        self._hold(lambda problem: on_done(not problem))

    def remember_cards(self, cards: Sequence[CardRow]) -> None:
        self._committer.put([Change(RowKind.CARD, card.uuid.encode(), card) for card in cards])

    def remember_relay(self, relay: RelayRow) -> None:
        """Keep a relay. While nothing can be written, relays are skipped, because tenants could make the queue grow."""
        if not self.problem():
            self._committer.put([Change(RowKind.RELAY, number_key(relay.pid), relay)])

    def forget_relay(self, pid: int) -> None:
        """Remove a relay. If its row remains after a crash, the next daemon finds that the process has ended."""
        if not self.problem():
            self._committer.put([Change(RowKind.RELAY, number_key(pid), None)])

    def remember_membership(self, membership: MembershipRow) -> None:
        row = replace(membership, folder=self._folder)
        self._committer.put([Change(RowKind.MEMBERSHIP, MEMBERSHIP_KEY, row)])

    async def stop(self) -> None:
        """Write the remaining changes and close the files. The lease table must cause no more changes."""
        # The last commit waits for the disk while other tasks run, so stop the committer in a thread.
        is_whole = await asyncio.to_thread(self._committer.stop)
        if not is_whole:
            log_event(LogEvent.JOURNAL_SHORT, reason=self.problem() or "the disk is too slow")
        # Release the lock last: the next daemon must not open the files while this one writes.
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    # --- replies ---

    def problem(self) -> str:
        return self._fault or self._committer.problem()

    def denial(self) -> Denial | None:
        problem = self.problem()
        return not_kept(problem) if problem else None

    def once_kept(self, do: Callable[[], None]) -> None:
        # After a bug, rows may be wrong, so nothing counts as durable.
        if not self._fault:
            self._replies.hold_until_durable(self._committer.accepted, do)

    def once_decided(self, do: Callable[[str], None]) -> None:
        self._hold(do)

    def answer(self, outcome: events.Outcome, on_outcome: OnOutcome) -> None:
        """Hold an outcome until every event so far is durable, including events that do not concern it."""
        if isinstance(outcome, (events.SubmitReady, Checked)):
            # The journal has no rows about checks, nor about submits, whose workers report them to the next daemon.
            on_outcome(outcome)
            return
        # Most denials change no row, so they need not be durable.
        if isinstance(outcome, events.RequestDenied) and outcome.denial.reason not in _LASTING_DENIALS:
            on_outcome(outcome)
            return
        self._hold(partial(self._finish, outcome, on_outcome))

    def _hold(self, on_done: Callable[[str], None]) -> None:
        if self._fault:
            on_done(self._fault)
        else:
            self._replies.hold(self._committer.accepted, on_done)

    def _finish(self, outcome: events.Outcome, on_outcome: OnOutcome, problem: str) -> None:
        on_outcome(self._not_kept(outcome, problem) if problem else outcome)

    def _not_kept(self, outcome: events.Outcome, problem: str) -> events.RequestDenied:
        """Return the answer in place of an outcome that can't be recorded."""
        match outcome:
            # A grant is revoked. Any other outcome has already taken effect. The answer says that a restart may undo
            # it.
            case events.Granted() | events.RegionGranted():
                return self._replies.refuse(outcome, not_kept(problem))
            case events.Renewed(request, lease):
                return events.RequestDenied(
                    request, done_but_not_kept(f"Lease {lease.lease_id:032x} was renewed", problem)
                )
            case events.FreeDone(request, lease):
                return events.RequestDenied(
                    request, done_but_not_kept(f"Lease {lease.lease_id:032x} was freed", problem)
                )
            case events.RevokeDone(request):
                return events.RequestDenied(request, done_but_not_kept("The lease has ended", problem))
            case events.SlicesCleared(request, count):
                return events.RequestDenied(request, done_but_not_kept(f"{count} fences were cleared", problem))
            case events.Resized(request, lease):
                return events.RequestDenied(
                    request, done_but_not_kept(f"Lease {lease.lease_id:032x} has its new size", problem)
                )
            case events.SessionMoved(request, lease):
                return events.RequestDenied(
                    request, done_but_not_kept(f"Lease {lease.lease_id:032x} was moved", problem)
                )
            case events.SessionParkDone(request, lease):
                return events.RequestDenied(
                    request, done_but_not_kept(f"Lease {lease.lease_id:032x} is parked", problem)
                )
            case events.RegionCancelSet(request):
                return events.RequestDenied(request, done_but_not_kept("The region was cancelled or resumed", problem))
            case events.DrainSet(request):
                return events.RequestDenied(request, done_but_not_kept("The drain was set", problem))
            case events.SubmitReady(request) | Checked(request):
                return events.RequestDenied(request, not_kept(problem))
            case events.RequestDenied():
                return outcome


def open_journal(folder: Path, boot_id: str) -> FileJournal:
    """Open the journal in a folder, or create one. Waits for the disk, so call this in a thread.

    The folder is locked until `stop`, or the end of this process.

    Args:
        folder: The folder. It is made, with mode 0700, if only its parent exists.
        boot_id: The id of the host's boot (random(4)). Leases of another boot have ended; their fences stay. A fleet
            membership from another boot or from another folder is forgotten, because the journal may be a copy.

    Raises:
        JournalBroken: It can't be used.
    """
    # Step 1: lock the folder before reading, because another daemon could be writing.
    lock_fd = prepare(folder)
    try:
        # Step 2: read and check all rows. This changes no file.
        contents = Contents()
        store = Store(folder, boot_id, contents.take)
        # Step 3: remove rows that are invalid after a restart of the host, or in a copy of the folder.
        membership = contents.membership
        if store.last_boot != boot_id:
            changes = contents.cross_boot()
        elif membership is not None and membership.folder not in ("", _folder_of(lock_fd)):
            changes = contents.forget_membership()
        else:
            changes = []
        # Step 4: make the first commit, so that the start fails if the disk can't be written.
        store.begin(changes)
    except BaseException:
        os.close(lock_fd)
        raise
    return FileJournal(store, contents, lock_fd)


def _folder_of(fd: int) -> str:
    """Return an open folder's device and inode, which differ in every copy of the folder (inode(7))."""
    status = os.fstat(fd)
    return f"{status.st_dev:x}:{status.st_ino:x}"


KEPT_TOMBSTONES: Final = 8192
"""Number of the latest ended leases that have a row, so that tenants can ask for the reason after a restart. The lease
table remembers more leases."""

KEPT_REGION_TOMBSTONES: Final = 2048
"""The same number for regions. They are counted separately, so that a tenant that opens regions in a loop displaces no
lease."""

_CHANGING: Final = frozenset(
    {
        events.AdoptSession,
        events.StaySession,
        events.Granted,
        events.Renewed,
        events.ResizeSlice,
        events.Resized,
        events.LeaseParked,
        events.LeaseLeft,
        events.LeaseMoved,
        events.RestartWorker,
        events.ReturnSession,
        events.LeaseReturned,
        events.RefuseWaitingOperations,
        events.RefuseWork,
        events.LeaseEnded,
        events.SlicesCleared,
        events.WarmEnded,
        events.DrainSet,
        events.OpenRegion,
        events.SetRegion,
    }
)
"""Effects that may change rows. Most effects are skipped by their type."""

_REGION_EVENTS: Final = (events.RegionEnded, events.RegionProved, events.RegionReleased, events.RegionRefused)
"""Events that may change a region's row without any effect."""


class JournalProjector:
    """Turns events and effects into changes of rows. Does no I/O.

    Args:
        rows: Leases that have a row at the start.
        next_tombstone: The number of the next lease's tombstone.
        regions: Regions that have a row at the start.
        next_region_tombstone: The number of the next region's tombstone.
        epochs: Names that have a row, with their highest epochs.
    """

    def __init__(
        self,
        rows: Iterable[LeaseRow] = (),
        next_tombstone: int = 0,
        regions: Iterable[RegionRow] = (),
        next_region_tombstone: int = 0,
        epochs: Iterable[tuple[str, int]] = (),
    ) -> None:
        # Leases with a row, and each one's worker's pid, or 0. A lease gets a row when it is granted, or fenced before
        # that.
        self._pids = {lease.lease_id: lease.worker_pid for lease in rows}
        self._next_tombstone = next_tombstone
        self._epochs = HighestEpochs(epochs)
        self._next_region_tombstone = next_region_tombstone
        # By lease, its regions that have a row.
        self._regions: dict[int, set[int]] = {}
        for region in regions:
            self._regions.setdefault(region.lease_id, set()).add(region.region_id)

    def changes(
        self, event: Event, effects: Sequence[Effect], table: LeaseTable, pid_of: Callable[[int], int]
    ) -> list[Change]:
        """Return the changes of rows by an event. `table` has already handled the event."""
        changes: list[Change] = []
        # Some events change a row without an effect.
        if isinstance(event, (events.SessionFaulted, events.LeaseRestored)):
            lease_id = event.worker_id if isinstance(event, events.SessionFaulted) else event.kept.lease_id
            self._update(lease_id, table, changes)
        elif isinstance(event, _REGION_EVENTS):
            self._update_region(event.region_id, table, changes)
        elif isinstance(event, events.RegionRestored):
            self._update_region(event.kept.region_id, table, changes)
        # All other changes come from effects. Rows are written from `table`, which has the state after the event.
        for effect in effects:
            if type(effect) in _CHANGING:
                self._on_effect(effect, table, pid_of, changes)
        return changes

    def _on_effect(
        self, effect: Effect, table: LeaseTable, pid_of: Callable[[int], int], changes: list[Change]
    ) -> None:
        match effect:
            case events.Granted(lease=lease):
                # The row has the worker's process id, by which the next daemon finds the worker.
                self._pids[lease.lease_id] = pid_of(lease.lease_id)
                self._update(lease.lease_id, table, changes)
                # A name's epoch is kept when its lease ends, because a later claim of the name must have a higher one.
                if lease.name:
                    changed = self._epochs.note(lease.name, lease.epoch)
                    changes += [Change(RowKind.EPOCH, name.encode(), epoch) for name, epoch in changed]
            case events.OpenRegion(lease_id=lease_id, region_id=region_id):
                # The lease's row has the number of its last region, so it changes, too.
                self._update(lease_id, table, changes)
                self._update_region(region_id, table, changes)
            case events.AdoptSession(lease_id=lease_id) | events.StaySession(lease_id=lease_id):
                # The row shows which of a session's two workers may serve it.
                self._update(lease_id, table, changes)
            case events.RestartWorker(lease_id=lease_id) | events.ReturnSession(lease_id=lease_id):
                # The session may return to another card. Its row must name that card before the worker gets the order.
                self._update(lease_id, table, changes)
            case events.ResizeSlice(lease_id=lease_id):
                # The row must have a larger size before the worker gets the order.
                self._update(lease_id, table, changes)
            case events.SetRegion(region_id=region_id):
                self._update_region(region_id, table, changes)
            case events.LeaseLeft(lease=lease) | events.LeaseReturned(lease=lease):
                # The lease now has no worker, or a different one.
                if lease.lease_id in self._pids:
                    self._pids[lease.lease_id] = 0 if isinstance(effect, events.LeaseLeft) else pid_of(lease.lease_id)
                self._update(lease.lease_id, table, changes)
            case events.RefuseWaitingOperations(lease_id=lease_id) if self._pids.get(lease_id) == 0:
                # A session that was cold may now be parked in a new worker. Other failures change no row.
                row = table.lease_row(lease_id, 0)
                if row is not None and not row.is_cold:
                    self._pids[lease_id] = pid_of(lease_id)
                    self._update(lease_id, table, changes)
            case (
                events.Renewed(lease=lease)
                | events.Resized(lease=lease)
                | events.LeaseParked(lease=lease)
                | events.LeaseMoved(lease=lease)
            ):
                self._update(lease.lease_id, table, changes)
            case events.RefuseWork(lease_id, cause):
                self._update(lease_id, table, changes)
                # A revoked lease must stay revoked, but the number of tombstones is limited. So its id gets a row of
                # its own.
                if cause is Cause.REVOKED and kind_of(lease_id) is WorkerKind.LEASE:
                    changes.append(Change(RowKind.REVOKED, number_key(mark_of(lease_id)), 1))
            # A region that ends: a fenced one keeps its row, any other becomes a tombstone.
            case events.LeaseEnded(lease=lease) if lease.parent_id:
                self._update_region(lease.lease_id, table, changes)
                if lease.state is not LeaseState.FENCED:
                    self._add_region_tombstone(lease, changes)
            case events.LeaseEnded(lease=lease) if lease.state is LeaseState.FENCED:
                # A lease that is fenced before its grant gets a row without a worker, because its bytes must stay
                # fenced.
                self._pids.setdefault(lease.lease_id, 0)
                self._update(lease.lease_id, table, changes)
            case events.LeaseEnded(lease=lease):
                self._add_tombstone(lease.lease_id, lease, changes)
            case events.SlicesCleared(lease_ids=lease_ids, warm_ids=warm_ids):
                # An operator has cleared the fences. They become tombstones, and their ids are kept as cleared.
                for lease_id in lease_ids:
                    self._update_region(lease_id, table, changes)
                    self._add_tombstone(lease_id, table.get(lease_id), changes)
                    changes.append(Change(RowKind.CLEARED, number_key(mark_of(lease_id)), 1))
                changes += [Change(RowKind.WARM, warm_key(warm_id), None) for warm_id in warm_ids]
            case events.WarmEnded(warm_id=warm_id, is_fenced=True):
                changes.append(Change(RowKind.WARM, warm_key(warm_id), table.warm_row(warm_id)))
            case events.DrainSet(deadline_ns=deadline_ns, card_uuid=card_uuid) if card_uuid:
                changes.append(Change(RowKind.CARD_DRAIN, card_uuid.encode(), deadline_ns))
            case events.DrainSet(deadline_ns=deadline_ns):
                changes.append(Change(RowKind.DRAIN, DRAIN_KEY, deadline_ns))

    def _update(self, lease_id: int, table: LeaseTable, changes: list[Change]) -> None:
        """Write the row of a lease that has one, with its present state."""
        worker_pid = self._pids.get(lease_id)
        if worker_pid is not None and (row := table.lease_row(lease_id, worker_pid)) is not None:
            changes.append(Change(RowKind.LEASE, lease_key(lease_id), row))

    def _add_tombstone(self, lease_id: int, lease: LeaseSnapshot | None, changes: list[Change]) -> None:
        """Remove the row of a lease whose teardown has ended. A tenant's lease gets a tombstone."""
        # A lease without a row was never granted.
        if self._pids.pop(lease_id, None) is None:
            return
        changes.append(Change(RowKind.LEASE, lease_key(lease_id), None))
        # Regions are parts of their lease, so their rows are removed with it.
        changes += [Change(RowKind.REGION, lease_key(region), None) for region in self._regions.pop(lease_id, ())]
        if lease is None or not lease.tenant:
            return
        changes.append(Change(RowKind.TOMBSTONE, number_key(self._next_tombstone), lease))
        # Each new tombstone removes the one that is KEPT_TOMBSTONES older.
        if self._next_tombstone >= KEPT_TOMBSTONES:
            changes.append(Change(RowKind.TOMBSTONE, number_key(self._next_tombstone - KEPT_TOMBSTONES), None))
        self._next_tombstone += 1

    def _update_region(self, region_id: int, table: LeaseTable, changes: list[Change]) -> None:
        """Write a region's row from the table, or remove the row if the region has ended."""
        row = table.regions.get(region_id)
        if row is not None:
            self._regions.setdefault(row.lease_id, set()).add(region_id)
            changes.append(Change(RowKind.REGION, lease_key(region_id), row))
            return
        # The table has dropped the region, so remove its row.
        snapshot = table.get(region_id)
        with_rows = set() if snapshot is None else self._regions.get(snapshot.parent_id, set())
        if region_id in with_rows:
            with_rows.discard(region_id)
            changes.append(Change(RowKind.REGION, lease_key(region_id), None))

    def _add_region_tombstone(self, region: LeaseSnapshot, changes: list[Change]) -> None:
        changes.append(Change(RowKind.REGION_TOMBSTONE, number_key(self._next_region_tombstone), region))
        if self._next_region_tombstone >= KEPT_REGION_TOMBSTONES:
            oldest = number_key(self._next_region_tombstone - KEPT_REGION_TOMBSTONES)
            changes.append(Change(RowKind.REGION_TOMBSTONE, oldest, None))
        self._next_region_tombstone += 1


class _StoreTarget(CommitTarget[Changes]):
    """Commits changes of rows. While nothing can be written, nothing is granted, so the queue stays small."""

    thread_name = "gpulease-journal"
    work = "a commit"
    doing = "writing the journal"
    max_group = 1024
    expected = (sqlite3.Error, OSError, ValueError)

    def __init__(self, store: Store) -> None:
        self._store = store

    def commit(self, group: Sequence[Changes]) -> None:
        self._store.apply([change for changes in group for change in changes])

    def on_failure(self, error: Exception, problem: str, *, is_first: bool) -> None:
        if is_first:
            log_event(LogEvent.JOURNAL_FAILING, reason=reason_of(error))

    def on_recovery(self) -> None:
        log_event(LogEvent.JOURNAL_BACK)

    def close(self) -> None:
        self._store.close()
