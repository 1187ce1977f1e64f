"""Clock rates: a node whose clock runs at another rate than the others' makes up for it.

Every horizon and every wait of the fleet is right only while no clock's rate is wrong by more than rho. So up to 16
nodes write into slots what they know of their last beat: its revision, and between which times of their own clock etcd
did it. Every node knows, from its own beats, between which times of its clock that revision was. Two such revisions
give an interval for the rate of one clock to the other, however late requests and answers are; it narrows with time. A
node makes up only for a median whose whole interval lies outside.

What lies in the slots is others' word, and may be forged. So it never takes a node out of the fleet. It only makes it
more careful, within bounds (`Membership.make_up_for`): horizons of a slow clock end earlier, waits on a fast one last
longer.
"""

from collections import deque
from dataclasses import asdict, dataclass
from json import dumps
from statistics import median
from typing import Final, NamedTuple
from zlib import crc32

from gpulease.daemon.fleet.etcd.transactions import Get, KeyValue, ModRevisionIs, Put, Transaction
from gpulease.daemon.fleet.records.fleet_records import CLOCKS
from gpulease.daemon.fleet.records.record_reader import Number, Text, Unreadable, read_record
from gpulease.daemon.fleet.rules.membership import Membership
from gpulease.protocol.time_units import NS_PER_S

SLOTS: Final = 16
"""Clocks that all nodes compare theirs with. Bounds what a beat reads."""

_SLOT_KEYS: Final = tuple(CLOCKS + b"%02d" % number for number in range(SLOTS))

MIN_CLOCKS: Final = 3
"""Clocks, this node's among them, of which the median can tell who is wrong."""

WINDOW_NS: Final = 3 * 3600 * NS_PER_S
"""After so long a clock's rate is measured anew, so that one that changed is noticed."""


MAX_POLLS: Final = 16
"""Own beats that are remembered: a slot names a revision that is about one beat old."""


@dataclass(frozen=True, slots=True)
class ClockRecord:
    """A slot's value.

    Attributes:
        instance: The run of the process that wrote it.
        revision: The store's revision as of its beat before.
        low_ns: A time of its clock before that revision.
        high_ns: A time of its clock after that.
    """

    instance: Text
    revision: Number
    low_ns: Number
    high_ns: Number

    def __post_init__(self) -> None:
        if self.low_ns > self.high_ns:
            raise ValueError(f"low_ns is {self.low_ns}, after high_ns, {self.high_ns}")

    def encode(self) -> bytes:
        """Encode the record as JSON."""
        return dumps(asdict(self), separators=(",", ":")).encode()


def read_clock(value: bytes) -> ClockRecord | Unreadable:
    """Read a slot's value."""
    return read_record(ClockRecord, value)


class _Poll(NamedTuple):
    """An own beat: a revision that the store had between two times."""

    revision: int
    asked_ns: int
    answered_ns: int


class _Reading(NamedTuple):
    """A revision on two clocks: between which times it was, of the slot's clock and of this node's."""

    instance: str
    revision: int
    their_low_ns: int
    their_high_ns: int
    low_ns: int
    high_ns: int


@dataclass(slots=True)
class _Clock:
    """A slot's clock: its first and its latest reading."""

    first: _Reading
    last: _Reading

    def rate(self) -> tuple[float, float] | None:
        """Return the bounds of its seconds for each own second; None: too early to tell."""
        shortest = self.last.low_ns - self.first.high_ns
        longest = self.last.high_ns - self.first.low_ns
        if shortest <= 0:
            return None
        least = self.last.their_low_ns - self.first.their_high_ns
        return least / longest, (self.last.their_high_ns - self.first.their_low_ns) / shortest


class ClockRates:
    """Clocks of the fleet as this node sees them."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._clocks: dict[bytes, _Clock] = {}
        self._writes: dict[bytes, tuple[int, int]] = {}
        """Of each slot its mod revision, and since when that is known."""
        self._slot: bytes | None = None
        self._instance = membership.instance
        self._polls: deque[_Poll] = deque(maxlen=MAX_POLLS)

    def read(self) -> Get:
        """Return the read that a beat makes."""
        return Get(CLOCKS, is_prefix=True)

    def write(self) -> tuple[Put, ...]:
        """Return what a beat writes: the beat before it, if this node has a slot."""
        return () if self._slot is None or not self._polls else (self._put(self._slot),)

    def lose_slot(self) -> None:
        """Write no more until the slot is seen to be this node's: a beat was not acknowledged."""
        self._slot = None

    def forget(self, instance: str = "") -> None:
        """Measure anew: in another store the same revision is of another time, or this node's clock stood still.

        Args:
            instance: Another random text for its readings, so that others measure anew; "" where its clock went on.
        """
        self._instance = instance or self._instance
        self._clocks.clear()
        self._writes.clear()
        self._polls.clear()
        self._slot = None

    def saw(self, found: tuple[KeyValue, ...], revision: int, asked_ns: int, now_ns: int) -> float | None:
        """Take the slots as an acknowledged beat of that revision read them.

        Returns the others' rate if this node's clock is wrong by their word; None: it is not.
        """
        self._polls.append(_Poll(revision, asked_ns, now_ns))
        mine = None
        there: set[bytes] = set()
        for item in found:
            if item.key not in _SLOT_KEYS:
                self._membership.distrust(item, "its key is no slot")
                continue
            there.add(item.key)
            known = self._writes.get(item.key)
            if known is None or known[0] != item.mod_revision:
                self._writes[item.key] = item.mod_revision, now_ns
            record = self._membership.read(read_clock, item)
            if record is None:
                continue
            if record.instance == self._instance:
                mine = item.key
            else:
                self._take(item.key, record, now_ns)
        # What a slot told counts for as long as it is there.
        self._clocks = {key: clock for key, clock in self._clocks.items() if key in there}
        self._slot = mine
        if mine is None:
            self._take_slot({item.key: item.mod_revision for item in found}, now_ns)
        return self._judge()

    def _take(self, key: bytes, record: ClockRecord, now_ns: int) -> None:
        clock = self._clocks.get(key)
        if clock and (clock.last.instance, clock.last.revision) == (record.instance, record.revision):
            return
        before = [poll.asked_ns for poll in self._polls if poll.revision < record.revision]
        after = [poll.answered_ns for poll in self._polls if poll.revision >= record.revision]
        if not before or not after:
            return
        reading = _Reading(record.instance, record.revision, record.low_ns, record.high_ns, before[-1], after[0])
        if clock and clock.first.instance == record.instance and now_ns - clock.first.high_ns < WINDOW_NS:
            clock.last = reading
        else:
            self._clocks[key] = _Clock(reading, reading)

    def _put(self, slot: bytes) -> Put:
        poll = self._polls[-1]
        record = ClockRecord(self._instance, poll.revision, poll.asked_ns, poll.answered_ns)
        return Put(slot, record.encode())

    def _take_slot(self, revisions: dict[bytes, int], now_ns: int) -> None:
        """Write into a slot that nobody writes; the next beat shows whether that was done."""
        start = crc32(self._membership.node_id.encode())
        for step in range(SLOTS):
            key = _SLOT_KEYS[(start + step) % SLOTS]
            if key not in revisions or now_ns - self._writes[key][1] > self._membership.wait_ns:
                # What nobody writes tells nothing of a clock any more.
                self._clocks.pop(key, None)
                compare = ModRevisionIs(key, revisions.get(key, 0))
                transaction = Transaction((compare,), (self._put(key),))
                self._membership.ask(now_ns, transaction, lambda outcome, asked_ns, now_ns: None)
                return

    def _judge(self) -> float | None:
        rates = [rate for clock in self._clocks.values() if (rate := clock.rate())]
        if len(rates) + 1 < MIN_CLOCKS:
            return None
        low = median([1.0, *(rate[0] for rate in rates)])
        high = median([1.0, *(rate[1] for rate in rates)])
        # Of an interval that lies outside, the end that asks for more care.
        if low > 1 + self._membership.rho / 2:
            return high
        return low if high < 1 - self._membership.rho / 2 else None
