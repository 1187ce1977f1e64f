"""The node's cards: the bytes that leases hold on each, the choice of a card, and the memory of other programs."""

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Final

from gpulease.daemon.leases.model import (
    ALONE,
    FIRST_LEFTOVER_ID,
    YIELDING,
    Lease,
    LeaseTerms,
    WarmContext,
    WarmState,
    contexts_to_drop,
)
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.opcodes import Exclusivity

GPU_PREFIX: Final = "gpu-"

TABLE_BYTES: Final = 2 << 20
"""The smallest amount of memory that a card takes for page tables."""

PINNED_BYTES_PER_TABLE: Final = 1 << 30
"""Pinned host memory that TABLE_BYTES of page tables map."""


class PlacementOrder(Enum):
    """The order in which a lease prefers the cards that fit: the emptiest first, or the fullest first.

    PACK keeps large free blocks, and whole cards, for the leases that need them. SPREAD puts each lease on the emptiest
    card.
    """

    SPREAD = "spread"
    PACK = "pack"


@dataclass(frozen=True, slots=True)
class Card:
    """A card, or a MIG partition of a card.

    Attributes:
        index: The card's number on the node, which a selector may name.
        capacity_bytes: Bytes that may be held in total: the measured figure less the node's reserve.
        overhead_bytes: Bytes that one context takes in addition to its tenant's bytes. The node pays for them, once per
            context.
        spare_bytes: Bytes that the operator's bound leaves unused. Other programs may take that many before the
          capacity shrinks.
        slack_bytes: Tolerated difference between the bytes that other programs hold and those that are booked for them.
          The reserve covers it.
        pins_host_memory: Whether the host memory that a worker prepares for parking needs page tables on the card.
        peers: UUIDs of the cards whose memory this card reads at a high rate, so that sessions move directly between
            them.
        has_others: Whether programs other than the daemon's workers can hold memory of the card. Then nothing is
            granted on it before its first poll (`Others`).

    Raises:
        ValueError: A number is negative, or the uuid is empty.
    """

    uuid: str
    index: int
    name: str
    capacity_bytes: int
    overhead_bytes: int
    is_partition: bool = False
    spare_bytes: int = 0
    slack_bytes: int = 0
    pins_host_memory: bool = False
    peers: tuple[str, ...] = ()
    has_others: bool = False

    def __post_init__(self) -> None:
        numbers = (self.index, self.capacity_bytes, self.overhead_bytes, self.spare_bytes, self.slack_bytes)
        if not self.uuid or min(numbers) < 0:
            raise ValueError(f"Card {self.uuid!r} must have a uuid and no negative numbers: {self!r}.")

    @property
    def largest_slice_bytes(self) -> int:
        """Largest slice that a tenant could ever get: the whole card less the overhead of one context."""
        return max(0, self.capacity_bytes - self.overhead_bytes)

    def answers_to(self, selector: str) -> bool:
        """Return whether `selector` is this card's uuid (with or without "GPU-") or its index in decimal digits."""
        lowered = selector.lower()
        if lowered.removeprefix(GPU_PREFIX) == self.uuid.lower().removeprefix(GPU_PREFIX):
            return True
        return lowered == str(self.index)


@dataclass(frozen=True, slots=True)
class CardSnapshot:
    """State of one card at one moment.

    Attributes:
        capacity_bytes: Total bytes that leases, warm contexts and fences may hold now.
        free_bytes: Bytes that are neither held by a lease nor fenced. The bytes of warm contexts are included, because
            these end if a lease needs the bytes.
        available_bytes: Largest slice a tenant could get now: the free bytes less one context's overhead, and 0 while
            one lease has the card to itself or the card is drained.
        warm_contexts: Contexts that wait for any lease.
        recycled_contexts: Contexts that wait for a lease of the tenant they served.
        warm_wanted: Target number of contexts that wait for any lease (`warm_contexts`).
        warm_bytes: Bytes of all of the pool's contexts, including those being made or dropped.
        leases: Live leases, fenced ones included.
        is_exclusive: Whether a single lease has the whole card.
        unowned_bytes: Bytes in use that belong to no process, less the bytes that belonged to none when the card was
            measured. The capacity is reduced by them.
        outside_bytes: Bytes of programs outside the daemon, counted and subtracted in the same way.
        parked_bytes: Bytes of parked leases' slices, which other leases may use.
        drain_ns: Time at which the card's own drain ends its leases; None if there is none.
    """

    uuid: str
    index: int
    name: str
    capacity_bytes: int
    held_bytes: int
    free_bytes: int
    available_bytes: int
    fenced_bytes: int
    leases: int
    is_exclusive: bool
    warm_contexts: int
    recycled_contexts: int
    warm_wanted: int
    warm_bytes: int
    unowned_bytes: int = 0
    outside_bytes: int = 0
    parked_bytes: int = 0
    drain_ns: int | None = None


class CardAccount:
    """Running sums of one card. Bytes are charged when a lease is placed, and released only once they are proved free.

    Attributes:
        held_bytes: Bytes of leases, including bytes that become free only when warm contexts have been dropped.
        awaited_bytes: The part of the held bytes that no worker can use yet.
        stuck_bytes: Bytes of warm contexts that no lease can have, because they could not be proved free or are HELD.
        fenced_bytes: Bytes of leases and warm contexts that could not be proved free.
        pending_leases: Leases that wait for their worker.
        others: The account of the memory that others hold.
        warm: The pool's contexts on this card, by id.
        warm_wanted: Number of contexts that the card should have.
        awaiting: Pending leases and returning leases that wait for warm contexts to leave, in order of arrival.
        parkable_bytes: Sum of the slices of parkable leases, parked ones included.
        parked_bytes: The part of these bytes that is free on the card because the leases are parked.
        overcommit: Bound of `parkable_bytes`, as a multiple of the card's capacity.
        drain_ns: Time at which the card's own drain ends its leases. While the drain lasts, no lease is granted. None
            without a drain.
    """

    __slots__ = (
        "awaited_bytes",
        "awaiting",
        "card",
        "drain_ns",
        "exclusive_leases",
        "fenced_bytes",
        "held_bytes",
        "leases",
        "leases_by_tenant",
        "others",
        "overcommit",
        "parkable_bytes",
        "parked_bytes",
        "pending_leases",
        "stuck_bytes",
        "warm",
        "warm_wanted",
    )

    def __init__(self, card: Card, warm_wanted: int, overcommit: float = 1.0) -> None:
        self.card = card
        self.parkable_bytes = 0
        self.parked_bytes = 0
        self.overcommit = overcommit
        self.drain_ns: int | None = None
        # Bytes that leases hold, and the part of them that waits for warm contexts to leave.
        self.held_bytes = 0
        self.fenced_bytes = 0
        self.leases = 0
        self.exclusive_leases = 0
        self.pending_leases = 0
        self.awaited_bytes = 0
        self.stuck_bytes = 0
        # Memory that is not held by leases: that of other programs, and that of the pool.
        self.others = Others(card.spare_bytes, card.slack_bytes, card.capacity_bytes if card.has_others else 0)
        self.warm: dict[int, WarmContext] = {}
        self.warm_wanted = warm_wanted
        self.awaiting: dict[int, Lease] = {}
        # Tenants without a live lease here are absent.
        self.leases_by_tenant: Counter[str] = Counter()

    @property
    def capacity_bytes(self) -> int:
        """Bytes that may be held now: the measured capacity less the bytes that others have taken since."""
        return max(0, self.card.capacity_bytes - self.others.taken_bytes)

    @property
    def free_bytes(self) -> int:
        """Bytes that may be granted, including those of warm contexts.

        Negative if a fence or other programs have taken bytes that were already granted.
        """
        # Compute the capacity here, without another call, because each placement reads this for every card.
        capacity_bytes = self.card.capacity_bytes - self.others.taken_bytes
        return (capacity_bytes if capacity_bytes > 0 else 0) - self.held_bytes - self.stuck_bytes

    @property
    def warm_bytes(self) -> int:
        return sum(context.charge_bytes for context in self.warm.values())

    @property
    def leaving(self) -> int:
        """Number of the pool's contexts that served no tenant and are fenced or being dropped by this daemon."""
        # Do not count contexts left by leases of an earlier daemon, nor those that served a tenant.
        return sum(
            context.state is WarmState.FENCED or (context.state is WarmState.DROPPING and not context.is_restored)
            for context in self.warm.values()
            if context.tenant is None and context.warm_id < FIRST_LEFTOVER_ID
        )

    @property
    def recycled(self) -> int:
        """Number of contexts that wait for a lease of the tenant that they served."""
        return sum(context.waits_for_tenant for context in self.warm.values())

    @property
    def yielding_bytes(self) -> int:
        """Bytes of the contexts that the pool can still drop."""
        return sum(context.charge_bytes for context in self.yielding())

    @property
    def used_bytes(self) -> int:
        """Bytes that worker processes may hold by now."""
        return self.held_bytes - self.awaited_bytes + self.warm_bytes

    @property
    def promised_bytes(self) -> int:
        """Bytes that leases hold, or will hold once there is room; excludes leases that ended before they had room."""
        # Leave out leases that ended before they had room: the bytes still reserved for them will never be used.
        ended_bytes = self.awaited_bytes - sum(lease.awaited_bytes for lease in self.awaiting.values())
        return self.held_bytes - ended_bytes

    @property
    def available_bytes(self) -> int:
        """Largest slice that a tenant could get now."""
        if self.exclusive_leases or self.drain_ns is not None:
            return 0
        return max(0, self.free_bytes - self.card.overhead_bytes)

    def charge_bytes(self, terms: LeaseTerms) -> int:
        """Bytes that a lease of these terms holds on this card: its size and its contexts' overhead."""
        card = self.card
        charge_bytes = terms.size_bytes + (2 if terms.submit_bytes else 1) * card.overhead_bytes
        # A parkable session's context maps as much host memory as its slice has.
        if card.pins_host_memory and terms.is_parkable:
            charge_bytes += pinned_tables_bytes(terms.size_bytes)
        return charge_bytes

    def yielding(self) -> list[WarmContext]:
        """Return the warm contexts that the pool can still drop, oldest first."""
        return [context for context in self.warm.values() if context.state in YIELDING]

    def contexts_to_drop(self, tenant: str, max_idle: int) -> list[WarmContext] | None:
        """Apply `model.contexts_to_drop` to the contexts of this card that wait for a tenant."""
        return contexts_to_drop(
            [context for context in self.warm.values() if context.waits_for_tenant], tenant, max_idle
        )

    def await_bytes(self, lease: Lease, awaited_bytes: int) -> None:
        """Set how many bytes of a pending or returning lease are not usable yet; 0 once it may use all of them."""
        self.awaited_bytes += awaited_bytes - lease.awaited_bytes
        lease.awaited_bytes = awaited_bytes
        if awaited_bytes:
            self.awaiting[lease.lease_id] = lease
        else:
            self.awaiting.pop(lease.lease_id, None)

    def has_room_for_context(self, given_bytes: int) -> bool:
        """Return whether one more context has room now. If it replaces a warm context, that frees `given_bytes`."""
        # Two sums must fit: the bytes that processes use now, and the bytes promised to leases once contexts have left.
        needed_bytes = self.card.overhead_bytes - given_bytes
        kept_bytes = self.promised_bytes + self.stuck_bytes + self.yielding_bytes
        # A lease that ended before it had room keeps its bytes charged until its teardown is over.
        is_free = self.free_bytes >= self.card.overhead_bytes
        return is_free and max(self.used_bytes, kept_bytes) + needed_bytes <= self.capacity_bytes

    @property
    def room_bytes(self) -> int:
        """Bytes by which a lease may grow now.

        No lease or warm context holds these bytes, and no lease waits for them. Warm contexts are not dropped for
        growth.
        """
        # As for a new context, count the larger of the used and the promised bytes.
        kept_bytes = self.promised_bytes + self.stuck_bytes + self.yielding_bytes
        return min(self.free_bytes, self.capacity_bytes - max(self.used_bytes, kept_bytes))

    def lend_context(self, lease: Lease) -> None:
        """Charge an active lease for the context of its submit, for as long as the submit exists."""
        # Include the loan in the lease's charge, so that the charge alone says how much the lease may hold.
        lease.extra_bytes = self.card.overhead_bytes
        lease.charge_bytes += lease.extra_bytes
        self.held_bytes += lease.extra_bytes

    def take_context_back(self, lease: Lease) -> None:
        """Release the bytes of a lent context, once they are proved free or an operator has vouched for them."""
        lease.charge_bytes -= lease.extra_bytes
        self.held_bytes -= lease.extra_bytes
        lease.extra_bytes = 0

    def free_parked(self, lease: Lease, off_bytes: int) -> None:
        """Release bytes of a parked lease that the card shows free."""
        lease.charge_bytes -= off_bytes
        self.held_bytes -= off_bytes
        self.parked_bytes += off_bytes

    def take_parked(self, lease: Lease, off_bytes: int) -> None:
        """Hold the bytes of a parked lease again. They count as unused until warm contexts have left."""
        lease.charge_bytes += off_bytes
        self.held_bytes += off_bytes
        self.parked_bytes -= off_bytes
        self.await_bytes(lease, off_bytes)

    def leave_pending(self, lease: Lease) -> None:
        """Remove a lease from the pending ones, because its worker is ready or the lease has ended."""
        self.pending_leases -= 1
        self.awaiting.pop(lease.lease_id, None)

    def take(self, lease: Lease) -> None:
        """Hold the bytes of a new lease. They count as unused until its worker starts."""
        self.pending_leases += 1
        self.await_bytes(lease, lease.charge_bytes)
        self.restore(lease)

    def restore(self, lease: Lease) -> None:
        """Hold the bytes of an earlier table's lease."""
        self.held_bytes += lease.charge_bytes
        self.leases += 1
        self.leases_by_tenant[lease.tenant] += 1
        self.exclusive_leases += lease.terms.exclusivity in ALONE
        self.parkable_bytes += lease.terms.size_bytes if lease.terms.is_parkable else 0

    def give_back(self, lease: Lease) -> None:
        """Release the bytes of a lease, once they are proved free or an operator has vouched for them."""
        self.held_bytes -= lease.charge_bytes
        # If the lease ended before it had room, a part of its bytes still counts as awaited: subtract that as well.
        self.awaited_bytes -= lease.awaited_bytes
        self.leases -= 1
        self.leases_by_tenant[lease.tenant] -= 1
        if not self.leases_by_tenant[lease.tenant]:
            del self.leases_by_tenant[lease.tenant]
        self.exclusive_leases -= lease.terms.exclusivity in ALONE
        self.parkable_bytes -= lease.terms.size_bytes if lease.terms.is_parkable else 0
        self.parked_bytes -= 0 if lease.park is None else lease.park.off_bytes

    def has_parkable_room(self, terms: LeaseTerms) -> bool:
        """Return whether, with a lease of these terms, the sum of parkable slices stays within the overcommit."""
        if not terms.is_parkable:
            return True
        return self.parkable_bytes + terms.size_bytes <= self.card.capacity_bytes * self.overcommit

    def snapshot(self) -> CardSnapshot:
        return CardSnapshot(
            self.card.uuid,
            self.card.index,
            self.card.name,
            self.capacity_bytes,
            self.held_bytes,
            # Report no negative figures. The held bytes show whether the card is overcommitted.
            max(0, self.free_bytes),
            self.available_bytes,
            self.fenced_bytes,
            self.leases,
            self.exclusive_leases > 0,
            sum(context.state is WarmState.READY and context.tenant is None for context in self.warm.values()),
            self.recycled,
            self.warm_wanted,
            self.warm_bytes,
            self.others.unowned.booked_bytes,
            self.others.outside.booked_bytes,
            self.parked_bytes,
            self.drain_ns,
        )


def pinned_tables_bytes(size_bytes: int) -> int:
    """Return the card's bytes of page tables for that much pinned host memory (on an H200: 2 MiB for each GiB)."""
    return -(-size_bytes // PINNED_BYTES_PER_TABLE) * TABLE_BYTES


def select(accounts: Sequence[CardAccount], selector: str | None) -> tuple[CardAccount, ...]:
    """Return the cards that a selector names: all cards for None, no card for an unknown selector."""
    if selector is None:
        return tuple(accounts)
    return tuple(account for account in accounts if account.card.answers_to(selector))


def suitable(accounts: Sequence[CardAccount], exclusivity: Exclusivity) -> Sequence[CardAccount]:
    """Return the cards of the kind that the exclusivity class needs."""
    if exclusivity is not Exclusivity.PARTITION_EXCLUSIVE:
        return accounts
    return [account for account in accounts if account.card.is_partition]


def fits_now(account: CardAccount, terms: LeaseTerms) -> bool:
    """Return whether the card can take the lease now: not drained, enough free bytes, no conflict of exclusivity."""
    if account.drain_ns is not None:
        return False
    # An exclusive lease shares its card with no other lease, whichever of them comes first.
    if account.exclusive_leases or (terms.exclusivity in ALONE and account.leases):
        return False
    if terms.park_idle_ms is not None and not account.has_parkable_room(terms):
        return False
    return account.charge_bytes(terms) <= account.free_bytes


def choose(candidates: Iterable[CardAccount], terms: LeaseTerms, order: PlacementOrder) -> CardAccount | None:
    """Return the best-fitting card in the given order; on a tie, the one with the lowest index. None if none fits now.

    Args:
        candidates: Cards that the lease may be on.
        terms: The lease's terms.
        order: SPREAD prefers the card with the most free bytes, PACK the one with the fewest. The bytes of warm
          contexts count as free, because the contexts give way.
    """
    # One minimum serves both orders: for the emptiest card, negate the free bytes. The index decides ties.
    sign = 1 if order is PlacementOrder.PACK else -1
    best: tuple[int, int, CardAccount] | None = None
    for account in candidates:
        if fits_now(account, terms):
            rank = sign * account.free_bytes, account.card.index, account
            if best is None or rank < best:
                best = rank
    return None if best is None else best[2]


def largest_slice_bytes(candidates: Iterable[CardAccount], contexts: int = 1) -> int:
    """Return the largest slice that any of the cards could ever give to one tenant who needs `contexts` contexts."""
    # The card's own figure already allows for one context.
    return max((_slice_after_contexts(a.card.largest_slice_bytes, a, contexts) for a in candidates), default=0)


def available_bytes(candidates: Iterable[CardAccount], contexts: int = 1) -> int:
    """Return the largest slice that any of the cards could give now to one tenant who needs `contexts` contexts."""
    return max((_slice_after_contexts(a.available_bytes, a, contexts) for a in candidates), default=0)


def _slice_after_contexts(slice_bytes: int, account: CardAccount, contexts: int) -> int:
    """Return the bytes of a slice that are left after the contexts beyond its first are charged."""
    return max(0, slice_bytes - (contexts - 1) * account.card.overhead_bytes)


SETTLE_NS: Final = 2_000_000_000
"""Time for which bytes must be seen before they are booked. On an H100 the bytes of a dead process with 60 GiB belonged
to no process for 74 ms; a shorter time would reduce the capacity whenever a large lease ends."""


class Others:
    """Memory of one card that neither leases nor the pool hold, beyond what was there at the measurement.

    1. Others hold two kinds of bytes. Unowned bytes belong to no process: they are the driver's own and, for about 0.1
       s, those of a process that has just died. Some of the driver's own bytes stay until the card's last context ends
       (150 MiB for managed memory on an H200). Outside bytes belong to processes that are not workers of the daemon.
    2. Both kinds are booked and reduce the card's capacity. A change, up or down, is booked once it has lasted
       SETTLE_NS. Until then a dead worker's bytes are still charged to its lease. A rise of outside bytes is booked at
       once, because they can't be a worker's.
    3. The bytes of a reaped worker are proved free once the card no longer lists its process and the unowned bytes do
       not exceed the booked ones. An excess that lasts longer than SETTLE_NS is not the worker's. Then the smallest
       figure of all polls since the process disappeared is booked first, so that none of it can be granted, and the
       worker's bytes are taken as free.
    4. Polled figures are compared with booked bytes within the card's slack, which the reserve of its capacity covers.
    5. Before the first poll the whole card counts as taken, so that nothing is granted: while no daemon ran, a program
       may have taken memory. Also, if broker and zygote were killed together, a worker that a session had left may
       still hold memory that no record mentions.

    Attributes:
        unowned: Bytes that belong to no process.
        outside: Bytes of processes that are not workers.
        taken_bytes: Bytes by which the capacity is lower than at the start.

    Args:
        spare_bytes: Bytes that the operator leaves unused; others may hold that much without reducing the capacity.
        slack_bytes: Tolerated difference between polled and booked bytes.
        unknown_bytes: Bytes that count as taken before the first poll; 0 if others can't hold any of the card's memory.
    """

    __slots__ = ("_is_polled", "_needs_poll", "_polled_ns", "_spare_bytes", "outside", "taken_bytes", "unowned")

    def __init__(self, spare_bytes: int, slack_bytes: int, unknown_bytes: int = 0) -> None:
        self.taken_bytes = unknown_bytes
        # Outside bytes can't be a dead worker's, so they are booked at once.
        self.unowned = Growth(slack_bytes)
        self.outside = Growth(slack_bytes, settles=False)
        self._spare_bytes = spare_bytes
        self._needs_poll = unknown_bytes > 0
        self._is_polled = False
        # Time of the last poll or proof. Polls come from threads, and may arrive late.
        self._polled_ns = 0

    @property
    def is_known(self) -> bool:
        """Whether the card was polled, or needs no poll because others can't hold any of its memory."""
        return self._is_polled or not self._needs_poll

    @property
    def booked_bytes(self) -> int:
        return self.unowned.booked_bytes + self.outside.booked_bytes

    def poll(self, unowned_bytes: int, outside_bytes: int, polled_ns: int) -> bool:
        """Process one poll of the whole card, and return whether the booked bytes changed.

        A poll from before the last proof is ignored, because its figures lack the bytes of a worker that has died
        since. The first poll is never ignored.
        """
        if polled_ns < self._polled_ns:
            if self._is_polled:
                return False
            # The proof may have booked more.
            unowned_bytes = max(unowned_bytes, self.unowned.booked_bytes)
        # Book the first poll at once: it shows the bytes that others took while no daemon ran.
        is_first, self._is_polled, self._polled_ns = not self._is_polled, True, max(polled_ns, self._polled_ns)
        before = self.unowned.booked_bytes, self.outside.booked_bytes
        self.unowned.poll(unowned_bytes, polled_ns, is_first=is_first)
        self.outside.poll(outside_bytes, polled_ns, is_first=is_first)
        self._sum_up()
        return before != (self.unowned.booked_bytes, self.outside.booked_bytes)

    def is_shown_free(self, unowned_bytes: int, least_bytes: int, since_ns: int, polled_ns: int) -> bool:
        """Return whether the bytes of a process that the card no longer lists are free.

        Bytes that outlasted the settling time are booked first.

        Args:
            unowned_bytes: Unowned bytes in this poll.
            least_bytes: Fewest unowned bytes in any poll since `since_ns`.
            since_ns: Time of the first poll that did not list the process.
            polled_ns: Time of this poll.
        """
        # From now on, ignore an older poll of the whole card.
        self._polled_ns = max(polled_ns, self._polled_ns)
        # The card shows no more bytes than were booked before the worker died, so none of the worker's are left.
        if self.unowned.is_within(unowned_bytes):
            return True
        # Too early to decide: the excess may be the dead worker's, which the driver is still releasing.
        if polled_ns - since_ns < SETTLE_NS:
            return False
        # The excess has lasted longer than any release takes, so it belongs to others. Book it before the lease's bytes
        # are released.
        self.unowned.book_at_least(least_bytes)
        self._sum_up()
        return True

    def _sum_up(self) -> None:
        if not self.is_known:
            return
        self.taken_bytes = max(0, self.booked_bytes - self._spare_bytes)


class Growth:
    """Bytes of one kind, unowned or outside, in excess of those at the measurement.

    Attributes:
        booked_bytes: Bytes subtracted from the card's capacity.

    Args:
        slack_bytes: Tolerated difference between polled and booked bytes.
        settles: Whether a rise must last SETTLE_NS before it is booked.
    """

    __slots__ = ("_extreme_bytes", "_is_rising", "_settles", "_since_ns", "_slack_bytes", "booked_bytes")

    def __init__(self, slack_bytes: int, *, settles: bool = True) -> None:
        self.booked_bytes = 0
        self._slack_bytes = slack_bytes
        self._settles = settles
        # Time of the first of the latest consecutive polls that all showed more than the booked bytes, or all less.
        # None if the last poll agreed with the booked bytes.
        self._since_ns: int | None = None
        self._is_rising = False
        # Lowest figure of these polls if they show more, else the highest.
        self._extreme_bytes = 0

    def is_within(self, seen_bytes: int) -> bool:
        """Return whether a figure exceeds the booked bytes by no more than the slack."""
        return seen_bytes <= self.booked_bytes + self._slack_bytes

    def poll(self, seen_bytes: int, polled_ns: int, *, is_first: bool = False) -> None:
        """Process one poll. The first one is booked at once."""
        is_rising = not self.is_within(seen_bytes)
        # The figure agrees with the booked bytes: forget a change that did not last.
        if not is_rising and not self._is_less(seen_bytes):
            self._since_ns = None
            return
        # A change begins, or a rise has turned into a fall (or vice versa): restart the clock.
        if self._since_ns is None or is_rising is not self._is_rising:
            self._since_ns, self._is_rising, self._extreme_bytes = polled_ns, is_rising, seen_bytes
        # Book the most cautious estimate: for a rise the smallest figure of its polls, for a fall the largest.
        self._extreme_bytes = (min if is_rising else max)(self._extreme_bytes, seen_bytes)
        is_at_once = is_first or (is_rising and not self._settles)
        if is_at_once or polled_ns - self._since_ns >= SETTLE_NS:
            self._store(self._extreme_bytes)

    def book_at_least(self, seen_bytes: int) -> None:
        """Book bytes that have already lasted for the settling time."""
        if not self.is_within(seen_bytes):
            self._store(seen_bytes)

    def _is_less(self, seen_bytes: int) -> bool:
        # Up to half the slack counts as 0, so that a figure near the slack is not booked and released again and again.
        is_none = self.booked_bytes > 0 and seen_bytes <= self._slack_bytes // 2
        return is_none or seen_bytes < self.booked_bytes - self._slack_bytes

    def _store(self, seen_bytes: int) -> None:
        # Less than the slack is noise in the driver's figures, not memory that others hold.
        self.booked_bytes = seen_bytes if seen_bytes > self._slack_bytes else 0
        self._since_ns = None
