"""Passes the broker's records to the audit log, limits records that tenants can repeat, and holds grants.

If the operator requires the log, a grant is held until its record is durable. A grant that can't be recorded in time is
revoked before its tenant receives it. In no other case does the log influence the lease table.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from gpulease.daemon.capabilities.claims import Claims
from gpulease.daemon.leases.denials import (
    NO_AUDIT_LOG,
    Denial,
    invalid_note,
    not_recorded,
    note_not_recorded,
    too_many_notes,
)
from gpulease.daemon.leases.events import Event, Granted, RegionGranted, RequestDenied
from gpulease.daemon.leases.model import LeaseSnapshot
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.record.audit.files import LastRecords
from gpulease.daemon.record.audit.projector import Entry
from gpulease.daemon.record.audit.record_writer import AuditWriter
from gpulease.daemon.record.audit.records import ENDS, NotCanonical, RecordKind, clean_text, value_of
from gpulease.daemon.record.group_commit import DurableReplies, too_long
from gpulease.protocol.capabilities import names_of
from gpulease.protocol.lease_ids import lease_text
from gpulease.protocol.log_budget import LogBudget
from gpulease.protocol.time_units import NS_PER_S, NS_PER_US, US_PER_MS

Grant = Granted | RegionGranted
OnOutcome = Callable[[Grant | RequestDenied], None]
OnNoteRecorded = Callable[[Denial | None], None]


class FactRecorder:
    """The interface of fact recorders. This class is used without an audit log, and does nothing."""

    @property
    def keeps_records(self) -> bool:
        return False

    def attach(self, post: Callable[[Event], None]) -> None:
        """Begin to record. Called in the running event loop; `post` takes events for the lease table."""

    def record(self, entry: Entry, now_ns: int) -> None:
        """Record the result of an event. Called before any of its effects is executed."""

    def find_without_end_record(self, tombstones: Sequence[LeaseSnapshot]) -> list[LeaseSnapshot]:
        """Return the leases of an earlier daemon whose ends are not in the log, oldest end first."""
        return []

    def attached(self, lease_id: int, tenant: str) -> None:
        """Record that a connection was handed to a lease's worker."""

    def issued(self, tenant: str, by: str, grant: Claims, audience: str | None) -> None:
        """Record that `by` received a token for a lease of `tenant` or, if the token names no lease, for the node.

        `audience` is the tenant that may use the token; None if unknown.
        """

    def token_revoked(self, tenant: str, by: str, lease_id: int, nonce: bytes) -> None:
        """Record that `by` revoked the token with this nonce. `lease_id` is 0 if the token concerns the node."""

    def refused(self, operation: str, tenant: str, lease_id: int, message: str) -> None:
        """Record a request that was refused before it reached the lease table. `lease_id` is 0 if it named none."""

    def reloaded(self, config: str) -> None:
        """Record that the settings were read again. `config` is the digest of the new settings."""

    def denial(self) -> Denial | None:
        """Return why no lease can be granted now, if the log is the reason."""
        return None

    def problem(self) -> str:
        """Return why the log can't be written now, as a clause; "" if it can be, or if none is kept."""
        return ""

    def figures(self) -> dict[str, int] | None:
        """Count the records that wait, are durable, and were dropped; None if no log is kept."""
        return None

    def answer(self, granted: Grant, on_outcome: OnOutcome) -> None:
        """Call `on_outcome` with a grant when it may be reported to its tenant, or with a `RequestDenied` instead."""
        on_outcome(granted)

    def note(self, lease_id: int, tenant: str, note: bytes, on_noted: OnNoteRecorded) -> None:
        """Record a tenant's note about its lease.

        `on_noted` gets None when the note is durable, or the reason why it never will be.
        """
        on_noted(NO_AUDIT_LOG)

    async def stop(self) -> None: ...


class LogRecorder(FactRecorder):
    """The recorder of a daemon that keeps an audit log.

    Args:
        is_required: Whether a grant is reported only when its record is durable.
        last: The last records of the log. An earlier daemon may have been killed when it had written the end of a lease
            to only one of journal and log. These records show which ends the log lacks.
    """

    def __init__(self, is_required: bool, last: LastRecords | None = None) -> None:
        self._is_required = is_required
        self._last = last or LastRecords()
        self._writer: AuditWriter | None = None
        self._replies = DurableReplies(lambda: 0 if self._writer is None else self._writer.durable, self.problem)
        self._budgets = Budgets()
        self._note_budgets = Budgets(NOTE_BURST_BYTES, NOTE_BYTES_PER_S)
        self._notes_waiting = 0
        # Tickets of the grants that were not yet reported to their tenants, by lease.
        self._tickets: dict[int, int] = {}

    @property
    def keeps_records(self) -> bool:
        return True

    def write_with(self, writer: AuditWriter) -> None:
        """Set the writer. Until then nothing is recorded, and a required log denies every grant."""
        self._writer = writer

    def on_change(self) -> None:
        """Check again which grants and notes are recorded. Called in the writer's thread."""
        if self._is_required or self._notes_waiting:
            self._replies.on_change()

    # --- records ---

    def attach(self, post: Callable[[Event], None]) -> None:
        self._replies.attach(post)

    def record(self, entry: Entry, now_ns: int) -> None:
        """Record an entry. A bug here must not delay effects, so an exception is only logged."""
        try:
            self._record(entry, now_ns)
        except Exception:
            log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing=f"recording {entry[0].value}")

    def find_without_end_record(self, tombstones: Sequence[LeaseSnapshot]) -> list[LeaseSnapshot]:
        """Return the leases whose ends are not in the log, oldest end first.

        Within a boot, records and tombstones are in chronological order. So if the last records do not name a lease,
        its end is missing only if it came after them.
        """
        lease_ids = []
        cut_us = self._last.cut_us
        # Go from the newest end to the oldest. At the time of its last record, the log was complete. So leases that
        # ended earlier and are not in `last` need no record.
        for lease in reversed(tombstones):
            if cut_us is not None and (lease.ended_ns or 0) // NS_PER_US < cut_us:
                cut_us = None
            kind = self._last.kinds.get(lease_text(lease.lease_id))
            # A lease that the records do not name may have begun when the daemon kept no log.
            is_cut_off = cut_us is not None and lease.created_ns // NS_PER_US <= cut_us
            # The end is missing if the lease's last record is not an end. Without any record of the lease, it is
            # missing if the lease began before the cut.
            if is_cut_off if kind is None else kind not in (RecordKind.END, RecordKind.FENCE):
                lease_ids.append(lease)
        return lease_ids[::-1]

    def attached(self, lease_id: int, tenant: str) -> None:
        self._record((RecordKind.ATTACH, {"lease": lease_text(lease_id), "tenant": tenant}))

    def issued(self, tenant: str, by: str, grant: Claims, audience: str | None) -> None:
        lease = {"lease": lease_text(grant.lease_id), "generation": grant.generation} if grant.lease_id else {}
        particulars = {
            "tenant": tenant,
            "by": by,
            "permissions": list(names_of(grant.permissions)),
            "audience": audience,
            "expires_us": grant.expires_ms * US_PER_MS,
            "nonce": grant.nonce.hex(),
        }
        self._record((RecordKind.ISSUE, lease | particulars))

    def token_revoked(self, tenant: str, by: str, lease_id: int, nonce: bytes) -> None:
        lease = {"lease": lease_text(lease_id)} if lease_id else {}
        self._record((RecordKind.WITHDRAW, lease | {"tenant": tenant, "by": by, "nonce": nonce.hex()}))

    def refused(self, operation: str, tenant: str, lease_id: int, message: str) -> None:
        lease = {"lease": lease_text(lease_id)} if lease_id else {}
        details = {
            "operation": operation.lower(),
            "tenant": tenant,
            "reason": "refused",
            "message": clean_text(message),
        }
        self._record((RecordKind.DENY, details | lease))

    def reloaded(self, config: str) -> None:
        self._record((RecordKind.OPERATOR, {"action": "reload", "config": config}))

    def figures(self) -> dict[str, int] | None:
        return None if self._writer is None else self._writer.figures()

    async def stop(self) -> None:
        """Write the queued records, and close the log. The lease table must cause no more records."""
        if self._writer is None:
            return
        # Later records of a tenant would report how many records were omitted. There will be none, so STOP has the
        # counts.
        omitted = [[tenant, count] for tenant, count in sorted(self._budgets.take_omitted().items())]
        is_whole = await asyncio.to_thread(self._writer.stop, {"omitted": omitted} if omitted else {})
        if not is_whole:
            log_event(LogEvent.AUDIT_SHORT, reason=self._writer.problem() or "the disk is too slow")

    def _record(self, entry: Entry, now_ns: int = 0) -> None:
        if self._writer is None:
            return
        kind, data = entry
        # An earlier daemon recorded this end. This daemon only found it in the journal again.
        if kind is RecordKind.END and self._last.kinds.get(data["lease"]) is RecordKind.END:
            return
        # A minor record is charged to the tenant's budget. The next one within the budget reports how many were
        # omitted.
        if kind.is_minor:
            omitted = self._budgets.spend(str(data.get("tenant", "")), now_ns or time.monotonic_ns())
            if omitted is None:
                return
            if omitted:
                data = data | {"omitted": omitted}
        ticket = self._writer.put(kind, data, now_ns)
        # Keep the ticket for `answer`, which is called when the grant's effect is executed.
        if kind is RecordKind.GRANT and self._is_required:
            self._tickets[int(data["lease"], 16)] = ticket
        elif self._tickets and kind in ENDS:
            self._tickets.pop(int(data["lease"], 16), None)

    # --- notes ---

    def note(self, lease_id: int, tenant: str, note: bytes, on_noted: OnNoteRecorded) -> None:
        # The note's bytes come from the tenant, so check that they are canonical.
        try:
            value = value_of(note, NOTE_DEPTH)
        except NotCanonical as error:
            on_noted(invalid_note(str(error)))
            return
        if not isinstance(value, dict):
            on_noted(invalid_note("it is none"))
        elif denial := self._note_denial(tenant, len(note)):
            on_noted(denial)
        else:
            self._put_note({"lease": lease_text(lease_id), "tenant": tenant, "note": value}, on_noted)

    def _note_denial(self, tenant: str, size_bytes: int) -> Denial | None:
        # First check the problems that concern all tenants, then this tenant's problems.
        if problem := self.problem():
            return note_not_recorded(problem)
        if self._notes_waiting >= MAX_NOTES_WAITING:
            return too_many_notes(f"{MAX_NOTES_WAITING} notes are waiting to be written, the maximum")
        cost_bytes = size_bytes + NOTE_FRAME_BYTES
        if self._note_budgets.spend(tenant, time.monotonic_ns(), cost_bytes) is None:
            return too_many_notes(f"a tenant may write {NOTE_BYTES_PER_S} bytes per second")
        return None

    def _put_note(self, data: dict[str, Any], on_noted: OnNoteRecorded) -> None:
        def on_done(problem: str) -> None:
            self._notes_waiting -= 1
            on_noted(note_not_recorded(problem) if problem else None)

        # Count the note first, because the thread may write it before this method returns.
        self._notes_waiting += 1
        ticket = 0 if self._writer is None else self._writer.put(RecordKind.NOTE, data)
        if ticket:
            self._replies.hold(ticket, on_done)
        else:
            on_done("its queue in memory is full")

    # --- grants ---

    def problem(self) -> str:
        return "it is not open" if self._writer is None else self._writer.problem()

    def denial(self) -> Denial | None:
        problem = self.problem() if self._is_required else ""
        return not_recorded(problem) if problem else None

    def answer(self, granted: Grant, on_outcome: OnOutcome) -> None:
        ticket = self._tickets.pop(granted.lease.lease_id, 0)
        if not self._is_required:
            on_outcome(granted)
        elif not ticket:
            # The grant has no record, for lack of room or because of a bug.
            self._finish(granted, on_outcome, self.problem() or too_long())
        else:
            self._replies.hold(ticket, partial(self._finish, granted, on_outcome))

    def _finish(self, granted: Grant, on_outcome: OnOutcome, problem: str) -> None:
        if not problem:
            on_outcome(granted)
            return
        # The grant's record may still reach the disk. The denial's record shows that the tenant never got the lease.
        denial = not_recorded(problem)
        lease = granted.lease
        operation = "region_open" if isinstance(granted, RegionGranted) else "acquire"
        particulars = {"operation": operation, "tenant": lease.tenant, "lease": lease_text(lease.lease_id)}
        self._record((RecordKind.DENY, particulars | {"reason": denial.reason.value, "message": denial.message}))
        on_outcome(self._replies.refuse(granted, denial))


BURST_RECORDS: Final = 600
"""Number of minor records that a tenant may cause in a burst. Normal use causes fewer in minutes."""

RECORDS_PER_S: Final = 1
"""Number of minor records per second that a tenant may cause after the burst. For denials, this is 30 MB a day."""

NOTE_BYTES_PER_S: Final = 1 << 20
"""Maximum number of bytes of one tenant's notes per second, for example 500 notes of 1.5 KB each. Without a limit, a
tenant could fill the disk in minutes."""

NOTE_BURST_BYTES: Final = 8 << 20
"""Maximum number of bytes of one tenant's notes in a burst. A server sends a burst of notes if the daemon was not
running.
"""

NOTE_FRAME_BYTES: Final = 512
"""Number of bytes by which each note counts more than its own size, for the record around it."""

NOTE_DEPTH: Final = 2
"""Number of objects around the note in its record."""

MAX_NOTES_WAITING: Final = 4096
"""Maximum number of notes of all tenants that wait for the disk. They take 16 MiB, and a quarter of the queue's room
for minor records."""

MAX_TENANTS: Final = 4096
"""Maximum number of tenants with separate budgets, more than a host has users. The other tenants share one budget."""


class Budgets:
    """A budget for each tenant.

    Args:
        burst: The amount that a tenant may spend at once; None for BURST_RECORDS.
        per_s: The amount by which a budget grows per second, up to `burst`.
    """

    def __init__(self, burst: int | None = None, per_s: int = RECORDS_PER_S) -> None:
        self._burst = BURST_RECORDS if burst is None else burst
        self._token_ns = NS_PER_S // per_s
        self._budgets: dict[str, LogBudget] = {}

    def spend(self, tenant: str, now_ns: int, cost: int = 1) -> int | None:
        """Take a record's cost from a tenant's budget.

        Returns how many records were omitted since the last one that was not, or None if this one must be omitted too.
        """
        budget = self._budgets.get(tenant)
        # Tenants beyond MAX_TENANTS share one budget, under the name "".
        if budget is None:
            if len(self._budgets) >= MAX_TENANTS:
                tenant = ""
            budget = self._budgets.setdefault(tenant, LogBudget(self._burst, self._token_ns))
        return budget.spend(now_ns, cost)

    def take_omitted(self) -> dict[str, int]:
        """Return, by tenant, how many records were omitted and not yet reported, and count from 0 again."""
        omitted = {tenant: budget.omitted for tenant, budget in self._budgets.items() if budget.omitted}
        for budget in self._budgets.values():
            budget.omitted = 0
        return omitted
