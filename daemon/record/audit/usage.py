"""Sums up every tenant's lease seconds, byte seconds and GPU seconds from the records of a log.

The rules:

- A lease counts from its grant until its work is refused, for whatever cause. The time after that, until its memory is
  proved free or while it is fenced, is not counted. Byte seconds are the lease's bytes times the counted time.
- A region's bytes belong to its lease, so records with a `parent` are skipped.
- A lease that was resized (`resize`) counts with each size for the time that it had this size.
- A parked lease has no bytes on its card. From its `park` until its return was ordered (`took_us` before the `return`
  record), only its lease seconds count. If records of returns were dropped (`gap`), its bytes count again from
  `data.since_us` on.
- A lease that was moved (`move`) counts on each card for the time that it was there.
- Renewals change nothing, because only time that has passed counts.
- Leases end with their daemon, unless the next daemon adopts them (`adopt`). If the daemon stopped, they end at its
  `stop` record. If it was killed, they end at the last time at which it was known to run, at most a second before its
  end: `data.previous.alive_us` of the next `start` record. Without that time, or on another boot, they count to their
  last record.
- If records of ends were dropped (`gap`), a lease without a later record counts until the first of them was dropped
  (`data.since_us`).
- Leases without an end count to the last record of the log, or to the head's `alive_us` if there is a head.
- The records `use`, `move`, `end` and `fence` have the lease's GPU time so far (`gpu_us`). Each counts the amount by
  which it exceeds the lease's earlier records. The amount of a `move` counts on the card that the lease left.

All durations are differences of the monotonic clock within one boot. The wall clock, which may step, only decides the
day (UTC) on which time counts. For lease time this is the wall clock of the grant plus the time since then. For GPU
time it is the wall clock of the record, so GPU time of up to ten minutes before midnight may count on the next day.
"""

from collections.abc import Iterator
from dataclasses import field
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final, NamedTuple

from gpulease.daemon.record.audit.records import ENDS, AuditRecord, Head, RecordKind
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.time_units import US_PER_S


@dataclass(slots=True)
class Used:
    """The sums of one tenant.

    Attributes:
        leases: Number of leases that count.
        lease_us: Microseconds, summed over leases.
        byte_us: Bytes times microseconds.
        open_leases: Number of these leases that no record ends.
        gpu_us: Microseconds of GPU time.
    """

    leases: int = 0
    lease_us: int = 0
    byte_us: int = 0
    open_leases: int = 0
    gpu_us: int = 0


class DayOfTenant(NamedTuple):
    """The key of one day's sums. `day` is a date of ISO 8601, in UTC."""

    day: str
    tenant: str
    card: str


@dataclass(slots=True)
class DayUse:
    """The sums of a tenant on a card in one day, in microseconds."""

    lease_us: int = 0
    byte_us: int = 0
    gpu_us: int = 0


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
US_PER_DAY: Final = 86_400 * US_PER_S

MAX_DAYS: Final = 3660
"""Maximum number of days over which the time of one lease is divided. A forged record may state thousands of years."""


@dataclass(slots=True)
class _Open:
    """A lease that has not ended. Its time before `part_us` is already in the sums.

    Attributes:
        part_us: When its size, its card or its parked state last changed.
        seen_us: When the lease's last record was written.
        doubt_us: When records of ends were dropped, if the lease has no later record; else None.
    """

    tenant: str
    size_bytes: int
    part_us: int
    boot: str
    seen_us: int
    card: str
    wall_offset_us: int
    doubt_us: int | None = None
    is_parked: bool = False


@dataclass(slots=True)
class _Left:
    """A lease of a daemon that has ended. It counts to `end_us`, unless a later daemon of the same boot adopts it."""

    opened: _Open
    end_us: int


@dataclass(slots=True)
class UsageSum:
    """Takes records, oldest first. Invalid records are skipped, because `verify` reports them.

    Attributes:
        tenants: The sums, by tenant. They include leases without an end once `finish` was called.
        days: The sums by day, tenant and card, likewise.
    """

    tenants: dict[str, Used] = field(default_factory=dict)
    days: dict[DayOfTenant, DayUse] = field(default_factory=dict)
    _gpu_us: dict[str, int] = field(default_factory=dict)
    _open: dict[str, _Open] = field(default_factory=dict)
    _left: dict[str, _Left] = field(default_factory=dict)
    _ending: set[str] = field(default_factory=set)
    _last_us: dict[str, int] = field(default_factory=dict)

    def take(self, record: AuditRecord) -> None:
        # Keep the time of the boot's latest record. The daemon ran at least until then.
        last_us = max(record.mono_us, self._last_us.get(record.boot, 0))
        if record.kind == RecordKind.START:
            self._on_start(record.data.get("previous"), record.boot)
        # Forget other boots, because no lease of an earlier boot continues.
        self._last_us = {record.boot: last_us}
        if record.kind == RecordKind.GAP:
            self._on_gap(record)
        elif record.kind == RecordKind.STOP:
            self._leave_all(record.boot, record.mono_us)
        # All other records that concern a lease name it.
        lease = record.data.get("lease")
        if isinstance(lease, str):
            self._on_lease(lease, record)

    def finish(self, head: Head | None = None) -> dict[str, Used]:
        """Count leases without an end to the log's end, or to the head's `alive_us`, and return all sums."""
        for opened in self._open.values():
            self._used(opened.tenant).open_leases += 1
        self._leave_all("" if head is None else head.boot, 0 if head is None else head.alive_us)
        self._count_left()
        return self.tenants

    # --- kinds of records ---

    def _on_lease(self, lease: str, record: AuditRecord) -> None:
        data = record.data
        # A region is part of its lease, which counts already.
        if "parent" in data:
            return
        if "gpu_us" in data:
            self._add_gpu(lease, record)
        if record.kind == RecordKind.END:
            self._gpu_us.pop(lease, None)
        if record.kind == RecordKind.GRANT:
            self._open[lease] = _opened(record, record.mono_us)
        elif record.kind == RecordKind.ADOPT:
            self._adopt(lease, record)
        # The lease stops counting here. Its END record, which follows, must not count it again.
        elif record.kind == RecordKind.OVER:
            self._close_by(lease, record)
            self._ending.add(lease)
        elif record.kind in ENDS:
            if lease not in self._ending:
                self._close_by(lease, record)
            self._ending.discard(lease)
        # Any other record shows that the lease had not ended.
        elif (opened := self._open.get(lease)) is not None and opened.boot == record.boot:
            opened.seen_us = max(opened.seen_us, record.mono_us)
            self._follow(opened, record)
            if record.kind != RecordKind.DENY:
                opened.doubt_us = None

    def _follow(self, opened: _Open, record: AuditRecord) -> None:
        """Apply a record's change of a lease's size, card or parked state."""
        match record.kind:
            case RecordKind.RESIZE:
                self._count_part(opened, record.mono_us)
                opened.size_bytes = _count(record.data, "size_bytes")
            case RecordKind.PARK:
                self._count_part(opened, record.mono_us)
                opened.is_parked = True
            case RecordKind.RETURN:
                # The lease has had its bytes again since the return was ordered, on the card that the record names.
                self._count_part(opened, record.mono_us - _count(record.data, "took_us"))
                opened.is_parked, opened.card = False, _text(record.data, "card")
            case RecordKind.MOVE:
                self._count_part(opened, record.mono_us)
                opened.card = _text(record.data, "card")

    def _close_by(self, lease: str, record: AuditRecord) -> None:
        """End a lease by a record of its end, which is sufficient even if the log lacks the grant."""
        data = record.data
        over_us = _count(data, "over_us") or record.mono_us
        # This daemon did not adopt the lease, so the lease ended with its own daemon.
        if (left_record := self._left.pop(lease, None)) is not None:
            self._count(left_record.opened, left_record.end_us)
            return
        opened = self._open.pop(lease, None)
        # The grant's record was dropped or removed. The end's record has the time of the grant.
        if opened is None and _count(data, "granted_us"):
            opened = _opened(record, _count(data, "granted_us"))
        if opened is not None:
            self._count(opened, over_us if opened.boot == record.boot else opened.seen_us)

    def _on_start(self, previous: Any, boot: str) -> None:
        # Step 1: end the earlier daemon's leases at the last time at which it was known to run.
        states: dict[str, Any] = previous if isinstance(previous, dict) else {}
        self._leave_all(_text(states, "boot"), _count(states, "alive_us"))
        # Step 2: count leases of another boot, which can't be adopted.
        self._count_left(boot)
        self._ending.clear()

    def _adopt(self, lease: str, record: AuditRecord) -> None:
        """Continue a lease that a daemon adopts. If the log lacks its grant, it counts from this record on."""
        # Within one boot, the lease was never interrupted, so the time between the two daemons counts.
        left_record = self._left.get(lease)
        if left_record is not None and left_record.opened.boot == record.boot:
            self._open[lease] = self._left.pop(lease).opened
        elif lease not in self._open:
            self._open[lease] = _opened(record, record.mono_us)
        self._open[lease].seen_us = record.mono_us
        self._open[lease].doubt_us = None

    def _on_gap(self, record: AuditRecord) -> None:
        dropped = record.data.get("dropped")
        if not isinstance(dropped, dict):
            return
        since_us = _count(record.data, "since_us")
        for opened in self._open.values():
            if opened.boot != record.boot:
                continue
            # The dropped records may include this lease's return. Its bytes count from here on, so that no tenant saves
            # byte seconds by flooding the log.
            if RecordKind.RETURN in dropped and opened.is_parked:
                self._count_part(opened, since_us)
                opened.is_parked = False
            # The dropped records may include this lease's end, unless a later record of the lease follows.
            if opened.doubt_us is None and dropped.keys() & ENDS:
                opened.doubt_us = since_us

    # --- sums ---

    def _leave_all(self, boot: str, until_us: int) -> None:
        """Handle the end of a daemon: its leases end, unless the next daemon adopts them."""
        for lease, opened in self._open.items():
            # The latest time at which the lease or its daemon is known to have existed.
            end_us = max(opened.seen_us, self._last_us.get(opened.boot, 0), until_us if boot == opened.boot else 0)
            # The lease's end may have been dropped. Then the lease counts to the gap, or to its own latest record.
            if opened.doubt_us is not None:
                end_us = max(opened.seen_us, min(end_us, opened.doubt_us))
            if (earlier := self._left.pop(lease, None)) is not None:
                self._count(earlier.opened, earlier.end_us)
            self._left[lease] = _Left(opened, end_us)
        self._open.clear()

    def _count_left(self, boot: str = "") -> None:
        """Add leases that no daemon of this boot can adopt to the sums."""
        for lease, left_record in list(self._left.items()):
            if left_record.opened.boot != boot:
                self._count(left_record.opened, left_record.end_us)
                del self._left[lease]

    def _count(self, opened: _Open, until_us: int) -> None:
        self._used(opened.tenant).leases += 1
        self._count_part(opened, until_us)

    def _count_part(self, opened: _Open, until_us: int) -> None:
        """Add a lease's time from its last change to `until_us` to the sums, unless `until_us` is earlier."""
        used, from_us = self._used(opened.tenant), opened.part_us
        size_bytes = 0 if opened.is_parked else opened.size_bytes
        opened.part_us = until_us = max(until_us, from_us)
        used.lease_us += until_us - from_us
        used.byte_us += (until_us - from_us) * size_bytes
        for day, span_us in _by_day(from_us + opened.wall_offset_us, until_us + opened.wall_offset_us):
            of_day = self._of_day(day, opened.tenant, opened.card)
            of_day.lease_us += span_us
            of_day.byte_us += span_us * size_bytes

    def _add_gpu(self, lease: str, record: AuditRecord) -> None:
        """Add the GPU time since the lease's last record that states it to the sums."""
        data = record.data
        # Keep the highest value, so that no difference counts twice.
        before_us = self._gpu_us.get(lease, 0)
        self._gpu_us[lease] = so_far_us = max(before_us, _count(data, "gpu_us"))
        tenant, card = _text(data, "tenant"), _text(data, "from_card" if record.kind == RecordKind.MOVE else "card")
        self._used(tenant).gpu_us += so_far_us - before_us
        self._of_day(_day(_wall_us(record) // US_PER_DAY), tenant, card).gpu_us += so_far_us - before_us

    def _used(self, tenant: str) -> Used:
        return self.tenants.setdefault(tenant, Used())

    def _of_day(self, day: str, tenant: str, card: str) -> DayUse:
        return self.days.setdefault(DayOfTenant(day, tenant, card), DayUse())


def _opened(record: AuditRecord, since_us: int) -> _Open:
    data = record.data
    return _Open(
        _text(data, "tenant"),
        _count(data, "size_bytes"),
        since_us,
        record.boot,
        since_us,
        _text(data, "card"),
        _wall_us(record) - record.mono_us,
    )


def _wall_us(record: AuditRecord) -> int:
    """Return a record's time by the wall clock, in microseconds since 1970; 0 for an impossible date."""
    try:
        return (datetime.fromisoformat(record.at) - _EPOCH) // timedelta(microseconds=1)
    except ValueError:
        # A forged record may have the 30th of February.
        return 0


def _by_day(from_us: int, until_us: int) -> Iterator[tuple[str, int]]:
    """Divide a time on the wall clock by days. Yields each day and its part of the time in microseconds."""
    for _ in range(MAX_DAYS):
        number = from_us // US_PER_DAY
        end_us = min(until_us, (number + 1) * US_PER_DAY)
        if end_us <= from_us:
            return
        yield _day(number), end_us - from_us
        from_us = end_us
    yield _day(from_us // US_PER_DAY), max(0, until_us - from_us)


def _day(number: int) -> str:
    """Return the date of a day, given as the number of days since 1970."""
    ordinal = date(1970, 1, 1).toordinal() + number
    return date.fromordinal(min(max(ordinal, 1), date.max.toordinal())).isoformat()


def _count(data: dict[str, Any], key: str) -> int:
    value = data.get(key)
    return value if isinstance(value, int) and value > 0 else 0


def _text(data: dict[str, Any], key: str) -> str:
    value = data.get(key)
    return value if isinstance(value, str) else ""
