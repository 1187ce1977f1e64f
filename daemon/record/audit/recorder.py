"""The broker's side of the audit log: takes records, bounds what tenants repeat, and holds grants until durable.

Nothing here decides what the lease table does, with one exception: where the operator demands the log, a grant that
can't be recorded in time is revoked before its tenant hears of it.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from gpulease.daemon.capabilities.claims import Claims
from gpulease.daemon.leases import Denial, Denied, Event, Granted, LeaseSnapshot
from gpulease.daemon.leases.denials import not_recorded
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.record.audit.files import ToldLately
from gpulease.daemon.record.audit.projector import Lookup, Told
from gpulease.daemon.record.audit.record_writer import MINOR, AuditWriter
from gpulease.daemon.record.audit.records import ENDS, Kind, clean_text
from gpulease.daemon.record.durable import DurableReplies, too_long
from gpulease.protocol.capabilities import names_of
from gpulease.protocol.lease_ids import lease_text

NS_PER_S: Final = 1_000_000_000
US_PER_MS: Final = 1000
NS_PER_US: Final = 1000

BURST_RECORDS: Final = 600
"""Of a tenant, before anything is omitted: more than an honest one has in minutes."""

RECORDS_PER_S: Final = 1
"""From then on: 30 MB a day of a tenant that does nothing but be denied."""

MAX_TENANTS: Final = 4096
"""Told apart; more than a host has users. The others share one budget."""


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
        cost_ns = NS_PER_S // RECORDS_PER_S
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
        self._writer: AuditWriter | None = None
        self._replies = DurableReplies(lambda: 0 if self._writer is None else self._writer.durable, self.problem)
        self._budgets = Budgets()
        # Of grants whose tenants are not told yet, by lease.
        self._tickets: dict[int, int] = {}

    def write_with(self, writer: AuditWriter) -> None:
        """Where records go."""
        self._writer = writer

    def on_change(self) -> None:
        """Look again which grants are recorded. Called in the writer's thread."""
        if self._is_required:
            self._replies.on_change()

    # --- what the broker tells ---

    def observe(self, lookup: Lookup, post: Callable[[Event], None]) -> None:
        """See `Recorder.observe`."""
        self._replies.attach(post)

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
        ticket = self._tickets.pop(granted.lease.lease_id, 0)
        if not self._is_required:
            on_outcome(granted)
        elif not ticket:
            self._finish(granted, on_outcome, self.problem() or too_long())
        else:
            self._replies.hold(ticket, partial(self._finish, granted, on_outcome))

    def _finish(self, granted: Granted, on_outcome: OnOutcome, problem: str) -> None:
        if not problem:
            on_outcome(granted)
            return
        denial = not_recorded(problem)
        lease = granted.lease
        told = {"operation": "acquire", "tenant": lease.tenant, "lease": lease_text(lease.lease_id)}
        self._record((Kind.DENY, told | {"reason": denial.reason.value, "message": denial.message}))
        on_outcome(self._replies.refuse(granted, denial))

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
