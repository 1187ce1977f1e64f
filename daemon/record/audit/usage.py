"""Sums lease seconds and byte seconds of every tenant from the records of a log alone.

The rules:

- A lease counts from its grant to the moment at which its work was refused, for whatever cause. The time until its
  memory was proved free, and a fence, are charged to the node. Its byte seconds are its bytes times that time.
- A region's bytes belong to its lease: no record with a `parent` counts.
- A lease that was resized (`resize`) counts with each size for as long as it had it.
- Renewals change nothing: the sum counts time that a tenant had, not time that it was promised.
- A daemon's leases end with it, unless the next one adopts them (`adopt`): adopted leases continue. If the daemon
  stopped, they ended at its `stop` record. If it died, the next `start` record has the last time at which it was known
  to live (`data.previous.alive_us`, at most a second before its end if the host kept running). Without that, or on
  another boot, they count to their last record.
- If records of ends were dropped (`gap`), a lease without a later record counts until the first was dropped
  (`data.since_us`).
- Open leases count to the last record, or to the head's `alive_us` if that is given.

Only the monotonic clock counts, and only differences inside one boot: the wall clock may step.
"""

from dataclasses import dataclass, field
from typing import Any

from gpulease.daemon.record.audit.records import ENDS, Head, Record, RecordKind


@dataclass(slots=True)
class Used:
    """The sums of one tenant.

    Attributes:
        leases: Number of leases that count.
        lease_us: Microseconds, summed over leases.
        byte_us: Bytes times microseconds.
        open_leases: Number of those `leases` that no record ends.
    """

    leases: int = 0
    lease_us: int = 0
    byte_us: int = 0
    open_leases: int = 0


@dataclass(slots=True)
class _Open:
    tenant: str
    size_bytes: int
    since_us: int
    boot: str
    seen_us: int
    doubt_us: int | None = None
    sized_us: int = 0
    earlier_byte_us: int = 0

    def resize(self, size_bytes: int, at_us: int) -> None:
        """Count the bytes so far, and continue with another size."""
        # Both at once: `byte_us` still uses the old size and time.
        self.earlier_byte_us, self.sized_us = self.byte_us(at_us), max(at_us, self._sized_us)
        self.size_bytes = size_bytes

    def byte_us(self, until_us: int) -> int:
        return self.earlier_byte_us + max(0, until_us - self._sized_us) * self.size_bytes

    @property
    def _sized_us(self) -> int:
        return self.sized_us or self.since_us


@dataclass(slots=True)
class _Left:
    """A lease of a dead daemon. Unless a later daemon of the same boot adopts it, it counts to `end_us`."""

    opened: _Open
    end_us: int


@dataclass(slots=True)
class UsageSum:
    """Takes records, oldest first. Invalid records are skipped, because `verify` reports them.

    Attributes:
        tenants: The sums, by tenant. Open leases are in them once `finish` was called.
    """

    tenants: dict[str, Used] = field(default_factory=dict)
    _open: dict[str, _Open] = field(default_factory=dict)
    _left: dict[str, _Left] = field(default_factory=dict)
    _ending: set[str] = field(default_factory=set)
    _last_us: dict[str, int] = field(default_factory=dict)

    def take(self, record: Record) -> None:
        # The last time of each boot at which a record shows that its daemon lived.
        last_us = max(record.mono_us, self._last_us.get(record.boot, 0))
        if record.kind == RecordKind.START:
            self._on_start(record.data.get("previous"), record.boot)
        # Only the present boot is remembered: no earlier one continues.
        self._last_us = {record.boot: last_us}
        if record.kind == RecordKind.GAP:
            self._on_gap(record)
        elif record.kind == RecordKind.STOP:
            self._leave_all(record.boot, record.mono_us)
        # A STOP or GAP names no lease; any other record about a lease is also evidence that it was alive.
        lease = record.data.get("lease")
        if isinstance(lease, str):
            self._on_lease(lease, record)

    def finish(self, head: Head | None = None) -> dict[str, Used]:
        """Count the open leases to the end of the log, or to the head's `alive_us`, and return all sums."""
        for opened in self._open.values():
            self._used(opened.tenant).open_leases += 1
        self._leave_all("" if head is None else head.boot, 0 if head is None else head.alive_us)
        self._count_left()
        return self.tenants

    # --- kinds of records ---

    def _on_lease(self, lease: str, record: Record) -> None:
        data = record.data
        # A region is part of its lease, which counts already.
        if "parent" in data:
            return
        if record.kind == RecordKind.GRANT:
            self._open[lease] = _Open(
                _text(data, "tenant"), _count(data, "size_bytes"), record.mono_us, record.boot, record.mono_us
            )
        elif record.kind == RecordKind.ADOPT:
            self._adopt(lease, record)
        # The lease stops counting here. Its END follows and must not count it a second time.
        elif record.kind == RecordKind.OVER:
            self._close_by(lease, record)
            self._ending.add(lease)
        elif record.kind in ENDS:
            if lease not in self._ending:
                self._close_by(lease, record)
            self._ending.discard(lease)
        # Any other record about an open lease proves that it was alive then.
        elif (opened := self._open.get(lease)) is not None and opened.boot == record.boot:
            opened.seen_us = max(opened.seen_us, record.mono_us)
            if record.kind == RecordKind.RESIZE:
                opened.resize(_count(data, "size_bytes"), record.mono_us)
            if record.kind != RecordKind.DENY:
                opened.doubt_us = None

    def _close_by(self, lease: str, record: Record) -> None:
        """End a lease by a record that reports it. If the log lacks its grant, that record is sufficient."""
        data = record.data
        over_us = _count(data, "over_us") or record.mono_us
        # Not adopted by this daemon: it ended with the daemon that had it.
        if (left := self._left.pop(lease, None)) is not None:
            self._count(left.opened, left.end_us)
            return
        opened = self._open.pop(lease, None)
        # The grant's record was dropped or pruned, but the end has all that is needed.
        if opened is None and _count(data, "granted_us"):
            granted_us = _count(data, "granted_us")
            opened = _Open(_text(data, "tenant"), _count(data, "size_bytes"), granted_us, record.boot, granted_us)
        if opened is not None:
            self._count(opened, over_us if opened.boot == record.boot else opened.seen_us)

    def _on_start(self, previous: Any, boot: str) -> None:
        # Step 1: the earlier daemon's leases end at the last moment at which it was known to live.
        known: dict[str, Any] = previous if isinstance(previous, dict) else {}
        self._leave_all(_text(known, "boot"), _count(known, "alive_us"))
        # Step 2: those of another boot can't be adopted, so they are final.
        self._count_left(boot)
        self._ending.clear()

    def _adopt(self, lease: str, record: Record) -> None:
        """Let a lease continue. If the log lacks its grant, it counts from here."""
        # Adopted within the same boot: the lease never stopped, and counts from its grant on.
        left = self._left.get(lease)
        if left is not None and left.opened.boot == record.boot:
            self._open[lease] = self._left.pop(lease).opened
        elif lease not in self._open:
            size_bytes = _count(record.data, "size_bytes")
            opened = _Open(_text(record.data, "tenant"), size_bytes, record.mono_us, record.boot, record.mono_us)
            self._open[lease] = opened
        self._open[lease].seen_us = record.mono_us
        self._open[lease].doubt_us = None

    def _on_gap(self, record: Record) -> None:
        dropped = record.data.get("dropped")
        if not isinstance(dropped, dict) or not dropped.keys() & ENDS:
            return
        # Some end may be among the records that were dropped. A later record about a lease clears the doubt.
        since_us = _count(record.data, "since_us")
        for opened in self._open.values():
            if opened.doubt_us is None and opened.boot == record.boot:
                opened.doubt_us = since_us

    # --- sums ---

    def _leave_all(self, boot: str, until_us: int) -> None:
        """Handle the end of a daemon: open leases end with it, unless they are adopted."""
        for lease, opened in self._open.items():
            # The latest time at which the lease is known to have lived, or its daemon did.
            end_us = max(opened.seen_us, self._last_us.get(opened.boot, 0), until_us if boot == opened.boot else 0)
            # Its end may have been dropped in a gap: it counts to the gap, or to a later record of its own.
            if opened.doubt_us is not None:
                end_us = max(opened.seen_us, min(end_us, opened.doubt_us))
            if (twice := self._left.pop(lease, None)) is not None:
                self._count(twice.opened, twice.end_us)
            self._left[lease] = _Left(opened, end_us)
        self._open.clear()

    def _count_left(self, boot: str = "") -> None:
        """Count leases that no daemon of this boot can adopt."""
        for lease, left in list(self._left.items()):
            if left.opened.boot != boot:
                self._count(left.opened, left.end_us)
                del self._left[lease]

    def _count(self, opened: _Open, until_us: int) -> None:
        used, span_us = self._used(opened.tenant), max(0, until_us - opened.since_us)
        used.leases += 1
        used.lease_us += span_us
        used.byte_us += opened.byte_us(until_us)

    def _used(self, tenant: str) -> Used:
        return self.tenants.setdefault(tenant, Used())


def _count(data: dict[str, Any], key: str) -> int:
    value = data.get(key)
    return value if isinstance(value, int) and value > 0 else 0


def _text(data: dict[str, Any], key: str) -> str:
    value = data.get(key)
    return value if isinstance(value, str) else ""
