"""Clock rates: a node whose clock runs faster or slower than the other nodes' clocks compensates for the difference.

The fleet's deadlines and waits are correct only while no clock's rate is wrong by more than rho. So up to 16 nodes
publish facts about their last heartbeat in slots: its revision, and two times on their own clock between which etcd
executed it. From its own heartbeats, every node knows a time on its own clock before that revision and one after it.
Two such revisions give an interval for the rate of one clock relative to the other, however late requests and answers
are. The interval becomes narrower with time. A node compensates only if the median interval lies completely outside the
tolerance.

The slots of other nodes may be forged. So they never cause a node to leave the fleet. They only make the node more
careful, within limits (`Membership.make_up_for`): deadlines on a slow clock come earlier, and waits on a fast clock
last longer.
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
"""Maximum number of clocks with which nodes compare their own. Limits the number of values that a heartbeat reads."""

_SLOT_KEYS: Final = tuple(CLOCKS + b"%02d" % number for number in range(SLOTS))

MIN_CLOCKS: Final = 3
"""Minimum number of clocks, including this node's, from which the median can show that one is wrong."""

WINDOW_NS: Final = 3 * 3600 * NS_PER_S
"""Nanoseconds after which the measurement of a clock's rate begins again, so that a changed rate is noticed."""

MAX_POLLS: Final = 16
"""Maximum number of heartbeats of this node that are remembered. That is enough, because the revision in a slot is
about one heartbeat old."""


@dataclass(frozen=True, slots=True)
class ClockRecord(StoredRecord):
    """A slot's value.

    Attributes:
        instance: The run of the process that wrote it.
        revision: The store's revision at its previous heartbeat.
        low_ns: A time on its clock before that revision.
        high_ns: A time on its clock after that revision.
    """

    instance: Text
    revision: Number
    low_ns: Number
    high_ns: Number

    def __post_init__(self) -> None:
        if self.low_ns > self.high_ns:
            raise ValueError(f"low_ns is {self.low_ns}, after high_ns, {self.high_ns}")


class _Poll(NamedTuple):
    """One of this node's heartbeats: a revision that the store reached between two times."""

    revision: int
    sent_ns: int
    answered_ns: int


class _Reading(NamedTuple):
    """A revision on two clocks: the times before and after it on the slot's clock and on this node's."""

    instance: str
    revision: int
    their_low_ns: int
    their_high_ns: int
    low_ns: int
    high_ns: int


@dataclass(slots=True)
class _Clock:
    """A slot's clock, with its first and its latest reading."""

    first: _Reading
    last: _Reading

    def rate(self) -> tuple[float, float] | None:
        """Return the limits of this clock's rate relative to this node's; None if the readings are too close."""
        # Each reading is an interval. The shortest possible time on this node's clock gives the highest rate, and the
        # longest gives the lowest.
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
        """By slot, its mod revision, and the time since which this node knows the revision."""
        self._slot: bytes | None = None
        self._instance = membership.instance
        self._polls: deque[_Poll] = deque(maxlen=MAX_POLLS)

    def read(self) -> Get:
        return Get(CLOCKS, is_prefix=True)

    def write(self) -> tuple[Put, ...]:
        """Return the writes for a heartbeat: facts about the previous heartbeat, if this node has a slot."""
        return () if self._slot is None or not self._polls else (self._put(self._slot),)

    def lose_slot(self) -> None:
        """Stop writing until a read shows that the slot is this node's, because a heartbeat was not acknowledged."""
        self._slot = None

    def forget(self, instance: str = "") -> None:
        """Restart the measurement, because the store is another one or this node's clock has stopped for a while.

        Args:
            instance: A new random text for its readings, so that others restart theirs; "" if its clock continued.
        """
        self._instance = instance or self._instance
        self._clocks.clear()
        self._writes.clear()
        self._polls.clear()
        self._slot = None

    def observe(self, items: tuple[KeyValue, ...], revision: int, sent_ns: int, now_ns: int) -> float | None:
        """Process the slots that an acknowledged heartbeat of that revision read.

        Returns the rate of the others' clocks if their readings show that this node's clock is wrong; otherwise None.
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
            # Remember when each slot last changed. A slot that no longer changes is abandoned.
            write = self._writes.get(item.key)
            if write is None or write[0] != item.mod_revision:
                self._writes[item.key] = item.mod_revision, now_ns
            record = self._membership.read(ClockRecord.read, item)
            if record is None:
                continue
            # The instance shows whether this node still owns the slot. The heartbeat that wrote it may have failed.
            if record.instance == self._instance:
                own_key = item.key
            else:
                self._take(item.key, record, now_ns)
        # A clock counts only while its slot exists.
        self._clocks = {key: clock for key, clock in self._clocks.items() if key in present}
        # Step 3: keep this node's slot, or take an abandoned one.
        self._slot = own_key
        if own_key is None:
            self._take_slot({item.key: item.mod_revision for item in items}, now_ns)
        # Step 4: judge by the median.
        return self._judge()

    def _take(self, key: bytes, record: ClockRecord, now_ns: int) -> None:
        clock = self._clocks.get(key)
        # The reading is the same as before, because the slot was not written since.
        if clock and (clock.last.instance, clock.last.revision) == (record.instance, record.revision):
            return
        # This node's heartbeats directly before and after the slot's revision give its times on this clock.
        before = [poll.sent_ns for poll in self._polls if poll.revision < record.revision]
        later_polls = [poll.answered_ns for poll in self._polls if poll.revision >= record.revision]
        if not before or not later_polls:
            return
        reading = _Reading(record.instance, record.revision, record.low_ns, record.high_ns, before[-1], later_polls[0])
        # For the same clock, keep the first reading within the window, so that the interval becomes narrower.
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
                # The slot is abandoned, so its clock no longer counts.
                self._clocks.pop(key, None)
                compare = ModRevisionIs(key, revisions.get(key, 0))
                transaction = Transaction((compare,), (self._put(key),))
                self._membership.ask(now_ns, transaction, lambda outcome, sent_ns, now_ns: None)
                return

    def _judge(self) -> float | None:
        rates = [rate for clock in self._clocks.values() if (rate := clock.rate())]
        if len(rates) + 1 < MIN_CLOCKS:
            return None
        # This node's own rate is 1 by definition. The median does not let a minority of wrong or forged clocks decide.
        low = median([1.0, *(rate[0] for rate in rates)])
        high = median([1.0, *(rate[1] for rate in rates)])
        # If the interval lies outside the tolerance, return the limit that demands more care.
        if low > 1 + self._membership.rho / 2:
            return high
        return low if high < 1 - self._membership.rho / 2 else None
