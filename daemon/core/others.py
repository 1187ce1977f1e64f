"""What others than leases hold of a card, beyond what they held when its capacity was measured.

1. There are two kinds. Unowned bytes belong to no process: the driver's own, of which some last until the card's last
   context ends (150 MiB for managed memory on an H200), and for some 0.1 s those of a process that has just died.
   Outside bytes belong to processes that are none of the daemon's workers.
2. Both are booked, and the card's capacity is less by what is booked. What is seen is booked once it has lasted for
   SETTLE_NS, up or down: until then, the bytes of a dead worker are still charged to its lease. More outside bytes are
   booked at once, because they can't be a worker's.
3. A reaped worker's bytes are proved free once the card does not list its process, and the unowned bytes are within
   what is booked. If they are still more after SETTLE_NS, they are not the worker's to answer for: what there was of
   them at every look since is booked first, so that nothing of it can be granted, and then the proof stands.
4. A look is compared with what is booked within the card's slack, which the reserve of its capacity covers.
"""

from typing import Final

SETTLE_NS: Final = 2_000_000_000
"""For how long bytes must be seen before they are booked. The bytes of a dead process with 60 GiB were unowned for
74 ms on an H100: fewer would take capacity away at the end of every large lease."""


class Growth:
    """Bytes of one kind, beyond those at the start.

    Attributes:
        booked_bytes: Off the card's capacity.

    Args:
        slack_bytes: How far what is seen may be from what is booked.
        settles: Whether more must last before it is booked.
    """

    __slots__ = ("_extreme_bytes", "_is_rising", "_settles", "_since_ns", "_slack_bytes", "booked_bytes")

    def __init__(self, slack_bytes: int, *, settles: bool = True) -> None:
        self.booked_bytes = 0
        self._slack_bytes = slack_bytes
        self._settles = settles
        # Since when every look showed more than is booked, or less; None if the last one did not.
        self._since_ns: int | None = None
        self._is_rising = False
        # The least of these looks if they show more, else the most.
        self._extreme_bytes = 0

    def is_within(self, seen_bytes: int) -> bool:
        """Whether no more is seen than is booked, but for the slack."""
        return seen_bytes <= self.booked_bytes + self._slack_bytes

    def look(self, seen_bytes: int, looked_ns: int, *, is_first: bool = False) -> None:
        """Take in one look; the first one is booked as it is."""
        is_rising = not self.is_within(seen_bytes)
        if not is_rising and not self._is_less(seen_bytes):
            self._since_ns = None
            return
        if self._since_ns is None or is_rising is not self._is_rising:
            self._since_ns, self._is_rising, self._extreme_bytes = looked_ns, is_rising, seen_bytes
        self._extreme_bytes = (min if is_rising else max)(self._extreme_bytes, seen_bytes)
        is_at_once = is_first or (is_rising and not self._settles)
        if is_at_once or looked_ns - self._since_ns >= SETTLE_NS:
            self._book(self._extreme_bytes)

    def book_at_least(self, seen_bytes: int) -> None:
        """Book what has settled already."""
        if not self.is_within(seen_bytes):
            self._book(seen_bytes)

    def _is_less(self, seen_bytes: int) -> bool:
        # Half the slack is none, so that a figure just about the slack is not booked and let go in turns.
        is_none = self.booked_bytes > 0 and seen_bytes <= self._slack_bytes // 2
        return is_none or seen_bytes < self.booked_bytes - self._slack_bytes

    def _book(self, seen_bytes: int) -> None:
        self.booked_bytes = seen_bytes if seen_bytes > self._slack_bytes else 0
        self._since_ns = None


class Others:
    """What others hold of one card.

    Attributes:
        unowned: What no process has.
        outside: What processes have that are no workers.

    Args:
        spare_bytes: What the operator leaves of the card besides its capacity: others may have so much of it for free.
        slack_bytes: See `Growth`.
    """

    __slots__ = ("_is_first", "_looked_ns", "_spare_bytes", "outside", "unowned")

    def __init__(self, spare_bytes: int, slack_bytes: int) -> None:
        self.unowned = Growth(slack_bytes)
        self.outside = Growth(slack_bytes, settles=False)
        self._spare_bytes = spare_bytes
        self._is_first = True
        self._looked_ns = 0

    @property
    def booked_bytes(self) -> int:
        """All that is booked."""
        return self.unowned.booked_bytes + self.outside.booked_bytes

    @property
    def taken_bytes(self) -> int:
        """How much less of the card can be leased than at the start."""
        return max(0, self.booked_bytes - self._spare_bytes)

    def look(self, unowned_bytes: int, outside_bytes: int, looked_ns: int) -> bool:
        """Take in one look at the whole card, and return whether the booked bytes changed.

        A look from before the last proof is ignored: it lacks the bytes of a worker that died since.
        """
        if looked_ns < self._looked_ns:
            return False
        is_first, self._is_first, self._looked_ns = self._is_first, False, looked_ns
        before = self.unowned.booked_bytes, self.outside.booked_bytes
        self.unowned.look(unowned_bytes, looked_ns, is_first=is_first)
        self.outside.look(outside_bytes, looked_ns, is_first=is_first)
        return before != (self.unowned.booked_bytes, self.outside.booked_bytes)

    def is_shown_free(self, unowned_bytes: int, least_bytes: int, since_ns: int, looked_ns: int) -> bool:
        """Whether the bytes of a process are free that the card has not listed since `since_ns`.

        Book first what has outlasted the settling time. `least_bytes`: the least that was unowned at a look since.
        """
        self._looked_ns = max(looked_ns, self._looked_ns)
        if self.unowned.is_within(unowned_bytes):
            return True
        if looked_ns - since_ns < SETTLE_NS:
            return False
        self.unowned.book_at_least(least_bytes)
        return True
