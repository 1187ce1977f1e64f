"""Clock rates: a node whose clock runs at another rate than the others' refuses itself.

Every horizon and every wait of the fleet is right only while no clock's rate is wrong by more than rho. So up to 16
nodes write into slots what they know of their last beat: its revision, and between which times of their own clock etcd
did it. Every node knows, from its own beats, between which times of its clock that revision was. Two such revisions
give an interval for the rate of one clock to the other, however late requests and answers are; it narrows with time. A
node is refused only if the whole interval of the median lies outside.
"""

from collections import deque
from dataclasses import dataclass
from json import JSONDecodeError, dumps, loads
from statistics import median
from typing import Final, NamedTuple
from zlib import crc32

from gpulease.daemon.fleet.etcd.transactions import Get, KeyValue, ModRevisionIs, Put, Transaction
from gpulease.daemon.fleet.fleet_records import CLOCKS
from gpulease.daemon.fleet.rules.membership import NS_PER_S, Membership

SLOTS: Final = 16
"""Clocks that all nodes compare theirs with. Bounds what a beat reads."""

MIN_CLOCKS: Final = 3
"""Clocks, this node's among them, of which the median can tell who is wrong."""

WINDOW_NS: Final = 3 * 3600 * NS_PER_S
"""After so long a clock's rate is measured anew, so that one that changed is noticed."""


MAX_POLLS: Final = 16
"""Own beats that are remembered: a slot names a revision that is about one beat old."""


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
    seen_ns: int

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
        self._polls.clear()
        self._slot = None

    def saw(self, found: tuple[KeyValue, ...], revision: int, asked_ns: int, now_ns: int) -> float | None:
        """Take the slots as an acknowledged beat of that revision read them.

        Returns the others' rate if this node's clock is surely wrong.
        """
        self._polls.append(_Poll(revision, asked_ns, now_ns))
        mine = None
        for kv in found:
            if (told := _told(kv.value)) is None:
                continue
            if told[0] == self._instance:
                mine = kv.key
            else:
                self._take(kv.key, *told, now_ns)
        self._slot = mine
        if mine is None:
            self._take_slot({kv.key: kv.mod_revision for kv in found}, now_ns)
        return self._judge()

    def _take(self, key: bytes, instance: str, revision: int, low_ns: int, high_ns: int, now_ns: int) -> None:
        clock = self._clocks.get(key)
        if clock and (clock.last.instance, clock.last.revision) == (instance, revision):
            return
        before = [poll.asked_ns for poll in self._polls if poll.revision < revision]
        after = [poll.answered_ns for poll in self._polls if poll.revision >= revision]
        if not before or not after:
            return
        reading = _Reading(instance, revision, low_ns, high_ns, before[-1], after[0])
        if clock and clock.first.instance == instance and now_ns - clock.first.high_ns < WINDOW_NS:
            clock.last, clock.seen_ns = reading, now_ns
        else:
            self._clocks[key] = _Clock(reading, reading, now_ns)

    def _put(self, slot: bytes) -> Put:
        poll = self._polls[-1]
        record = {
            "instance": self._instance,
            "revision": poll.revision,
            "low_ns": poll.asked_ns,
            "high_ns": poll.answered_ns,
        }
        return Put(slot, dumps(record, separators=(",", ":")).encode())

    def _take_slot(self, revisions: dict[bytes, int], now_ns: int) -> None:
        """Write into a slot that nobody writes; the next beat shows whether that was done."""
        start = crc32(self._membership.node_id.encode())
        for step in range(SLOTS):
            key = CLOCKS + b"%02d" % ((start + step) % SLOTS)
            clock = self._clocks.get(key)
            if key not in revisions or (clock and now_ns - clock.seen_ns > self._membership.wait_ns):
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
        if low > 1 + self._membership.rho / 2:
            return low
        return high if high < 1 - self._membership.rho / 2 else None


def _told(value: bytes) -> tuple[str, int, int, int] | None:
    """Read a slot: who wrote it, a revision, and between which times it was; None: a foreign writer's."""
    try:
        record = loads(value)
        return str(record["instance"]), int(record["revision"]), int(record["low_ns"]), int(record["high_ns"])
    except (JSONDecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError, ValueError):
        return None
