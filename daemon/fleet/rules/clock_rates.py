"""Measures the rates of other nodes' clocks, so that a node whose own clock is too fast or too slow can compensate.

The fleet's deadlines and waits are correct only if the error of every clock's rate is at most rho. So up to 16 nodes
each publish a reading in a slot: the revision of their last heartbeat, and a time on their clock before it and one
after it. From its own heartbeats, every node also has a time on its own clock before that revision and one after it.
Two readings of a slot give an interval for the rate of the slot's clock relative to this node's. Late answers make the
interval wider, but never wrong. A node compensates if the median interval is completely outside the tolerance.

Slots may be forged. So they only make deadlines earlier and waits longer, within limits (`Membership.make_up_for`).
"""

from collections import deque
from statistics import median
from typing import Final, NamedTuple
from zlib import crc32

from gpulease.daemon.fleet.etcd.transactions import Get, KeyValue, ModRevisionIs, Put, Transaction
from gpulease.daemon.fleet.records.fleet_records import CLOCKS
from gpulease.daemon.fleet.records.record_reader import Number, StoredRecord, Text
from gpulease.daemon.fleet.rules.membership import Membership
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.time_units import NS_PER_S

SLOTS: Final = 16
"""Number of slots, all of which each heartbeat reads."""

_SLOT_KEYS: Final = tuple(CLOCKS + b"%02d" % number for number in range(SLOTS))

MIN_CLOCKS: Final = 3
"""Minimum number of clocks, this node's included, for a median."""

WINDOW_NS: Final = 3 * 3600 * NS_PER_S
"""Nanoseconds after which the measurement of a clock's rate begins again, to notice a changed rate."""

MAX_POLLS: Final = 16
"""Maximum number of this node's latest heartbeats (polls) kept to find those before and after a slot's revision, which
is about one heartbeat old."""


@dataclass(frozen=True, slots=True)
class ClockRecord(StoredRecord):
    """A slot's value.

    Attributes:
        instance: A random text, new for each run of the writer's fleet process and each time its clock stopped.
        revision: The store's revision at the writer's previous heartbeat.
        low_ns: A time on the writer's clock before that revision.
        high_ns: A time on the writer's clock after that revision.
    """

    instance: Text
    revision: Number
    low_ns: Number
    high_ns: Number

    def __post_init__(self) -> None:
        if self.low_ns > self.high_ns:
            raise ValueError(f"low_ns is {self.low_ns}, after high_ns, {self.high_ns}")


class _Poll(NamedTuple):
    """One of this node's heartbeats: the store reached the revision between two times."""

    revision: int
    sent_ns: int
    answered_ns: int


class _Reading(NamedTuple):
    """A revision on two clocks: a time before it and one after it, on the slot's clock and on this node's clock."""

    instance: str
    revision: int
    their_low_ns: int
    their_high_ns: int
    low_ns: int
    high_ns: int


@dataclass(slots=True)
class _Clock:
    """A slot's clock, with the first reading of the window and the latest one."""

    first: _Reading
    last: _Reading

    def rate(self) -> tuple[float, float] | None:
        """Return the lowest and highest possible rate relative to this node's clock; None if readings are too close."""
        # The shortest possible time between the readings on this node's clock gives the highest rate, and the longest
        # the lowest.
        shortest = self.last.low_ns - self.first.high_ns
        longest = self.last.high_ns - self.first.low_ns
        if shortest <= 0:
            return None
        least = self.last.their_low_ns - self.first.their_high_ns
        return least / longest, (self.last.their_high_ns - self.first.their_low_ns) / shortest


class ClockRates:
    """Rates of the fleet's clocks, relative to this node's clock."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._clocks: dict[bytes, _Clock] = {}
        self._writes: dict[bytes, tuple[int, int]] = {}
        """Each slot's mod revision, and the time at which this node first read it."""
        self._slot: bytes | None = None
        self._instance = membership.instance
        self._polls: deque[_Poll] = deque(maxlen=MAX_POLLS)

    def read(self) -> Get:
        return Get(CLOCKS, is_prefix=True)

    def write(self) -> tuple[Put, ...]:
        """Return the writes for a heartbeat: the reading of the previous heartbeat, if this node has a slot."""
        return () if self._slot is None or not self._polls else (self._put(self._slot),)

    def lose_slot(self) -> None:
        """Stop writing until a read shows that this node has a slot. Called if a heartbeat was not acknowledged."""
        self._slot = None

    def forget(self, instance: str = "") -> None:
        """Restart the measurement. Called if the store is another one, or if this node's clock has stopped for a while.

        Args:
            instance: A new random text for this node's readings, so that other nodes restart too; "" if its clock did
            not stop.
        """
        self._instance = instance or self._instance
        self._clocks.clear()
        self._writes.clear()
        self._polls.clear()
        self._slot = None

    def observe(self, items: tuple[KeyValue, ...], revision: int, sent_ns: int, now_ns: int) -> float | None:
        """Process the slots that an acknowledged heartbeat read.

        Returns the rate of the other clocks relative to this node's if it shows that this node's clock is wrong; else
        None.
        """
        # Step 1: remember this heartbeat as a revision between two times on this node's clock.
        self._polls.append(_Poll(revision, sent_ns, now_ns))
        own_key = None
        present: set[bytes] = set()
        # Step 2: compare each slot's revision with this node's heartbeats before and after it.
        for item in items:
            if item.key not in _SLOT_KEYS:
                self._membership.distrust(item, "its key must be one of the slots")
                continue
            present.add(item.key)
            # Remember when each slot last changed. A slot that does not change for long is abandoned.
            write = self._writes.get(item.key)
            if write is None or write[0] != item.mod_revision:
                self._writes[item.key] = item.mod_revision, now_ns
            record = self._membership.read(ClockRecord.read, item)
            if record is None:
                continue
            # By the instance, this node recognises its own slot.
            if record.instance == self._instance:
                own_key = item.key
            else:
                self._take(item.key, record, now_ns)
        # Forget clocks without a slot.
        self._clocks = {key: clock for key, clock in self._clocks.items() if key in present}
        # Step 3: if this node has no slot, try to take an abandoned one.
        self._slot = own_key
        if own_key is None:
            self._take_slot({item.key: item.mod_revision for item in items}, now_ns)
        # Step 4: compare the median with the tolerance.
        return self._judge()

    def _take(self, key: bytes, record: ClockRecord, now_ns: int) -> None:
        clock = self._clocks.get(key)
        # The slot has not been written since the last reading.
        if clock and (clock.last.instance, clock.last.revision) == (record.instance, record.revision):
            return
        # This node's heartbeats directly before and after the slot's revision give times on this node's clock.
        before = [poll.sent_ns for poll in self._polls if poll.revision < record.revision]
        later_polls = [poll.answered_ns for poll in self._polls if poll.revision >= record.revision]
        if not before or not later_polls:
            return
        reading = _Reading(record.instance, record.revision, record.low_ns, record.high_ns, before[-1], later_polls[0])
        # Keep the window's first reading, because the interval becomes narrower with more time between readings.
        if clock and clock.first.instance == record.instance and now_ns - clock.first.high_ns < WINDOW_NS:
            clock.last = reading
        else:
            self._clocks[key] = _Clock(reading, reading)

    def _put(self, slot: bytes) -> Put:
        poll = self._polls[-1]
        record = ClockRecord(self._instance, poll.revision, poll.sent_ns, poll.answered_ns)
        return Put(slot, record.encode())

    def _take_slot(self, revisions: dict[bytes, int], now_ns: int) -> None:
        """Write into an abandoned slot. The next heartbeat shows whether that succeeded."""
        start = crc32(self._membership.node_id.encode())
        for step in range(SLOTS):
            key = _SLOT_KEYS[(start + step) % SLOTS]
            if key not in revisions or now_ns - self._writes[key][1] > self._membership.wait_ns:
                # Forget the clock of the abandoned slot.
                self._clocks.pop(key, None)
                compare = ModRevisionIs(key, revisions.get(key, 0))
                transaction = Transaction((compare,), (self._put(key),))
                self._membership.ask(now_ns, transaction, lambda outcome, sent_ns, now_ns: None)
                return

    def _judge(self) -> float | None:
        rates = [rate for clock in self._clocks.values() if (rate := clock.rate())]
        if len(rates) + 1 < MIN_CLOCKS:
            return None
        # This node's own rate is 1. A minority of wrong or forged clocks can't move the median out of the tolerance.
        low = median([1.0, *(rate[0] for rate in rates)])
        high = median([1.0, *(rate[1] for rate in rates)])
        # If the interval is outside the tolerance, return its limit that is further from 1.
        if low > 1 + self._membership.rho / 2:
            return high
        return low if high < 1 - self._membership.rho / 2 else None
