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

The cards of the node, and what is held on each.

Who gets which card: pure functions over the accounts of the cards.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from gpulease.daemon.leases.model import (
    ALONE,
    FIRST_LEFT_ID,
    YIELDING,
    Lease,
    LeaseTerms,
    WarmContext,
    WarmState,
    contexts_to_drop,
)
from gpulease.protocol.opcodes import Exclusivity

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
            self._store(self._extreme_bytes)

    def book_at_least(self, seen_bytes: int) -> None:
        """Book what has settled already."""
        if not self.is_within(seen_bytes):
            self._store(seen_bytes)

    def _is_less(self, seen_bytes: int) -> bool:
        # Half the slack is none, so that a figure just about the slack is not booked and let go in turns.
        is_none = self.booked_bytes > 0 and seen_bytes <= self._slack_bytes // 2
        return is_none or seen_bytes < self.booked_bytes - self._slack_bytes

    def _store(self, seen_bytes: int) -> None:
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


GPU_PREFIX: Final = "gpu-"


@dataclass(frozen=True, slots=True)
class Card:
    """One card, or one MIG partition of one.

    Attributes:
        index: Its number on the node, what `selector` may name it by.
        capacity_bytes: What may be held on it in all, as it was measured; the node's reserve is already taken off.
        overhead_bytes: What one context costs besides its tenant's bytes; charged to the node, per lease.
        spare_bytes: What the operator's bound leaves of it besides; others may take so much before capacity shrinks.
        slack_bytes: How far what others hold may be from what is booked; the reserve covers it. See `others`.

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

    def __post_init__(self) -> None:
        numbers = (self.index, self.capacity_bytes, self.overhead_bytes, self.spare_bytes, self.slack_bytes)
        if not self.uuid or min(numbers) < 0:
            raise ValueError(f"Card {self.uuid!r} needs a uuid, and no number of it may be negative: {self!r}.")

    @property
    def largest_slice_bytes(self) -> int:
        """The most a tenant could ever get on it: all of it, less one context."""
        return max(0, self.capacity_bytes - self.overhead_bytes)

    def answers_to(self, selector: str) -> bool:
        """Whether `selector` names this card: its uuid, with or without "GPU-", or its index in decimals."""
        wanted = selector.lower()
        if wanted.removeprefix(GPU_PREFIX) == self.uuid.lower().removeprefix(GPU_PREFIX):
            return True
        return wanted == str(self.index)


@dataclass(frozen=True, slots=True)
class CardSnapshot:
    """What one card held at one moment.

    Attributes:
        capacity_bytes: What may be held on it in all now.
        free_bytes: What no lease holds and no fence keeps; warm contexts give way, so theirs are among them.
        available_bytes: The largest slice a tenant could be granted now: what is free less one context's
            overhead, and nothing while one lease has the card to itself.
        warm_contexts: How many contexts wait for a lease of anybody's.
        recycled_contexts: How many wait for a lease of the tenant they have served.
        warm_wanted: How many are to.
        warm_bytes: What all the pool's contexts hold, those that are being made or dropped too.
        leases: How many live leases it has, the fenced ones too.
        is_exclusive: One lease has the card to itself.
        unowned_bytes: What of the card belongs to no process and did not when it was measured.
        outside_bytes: What programs outside the daemon hold of the card beyond what they held then.
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


class CardAccount:
    """The running sums of one card. Bytes are taken at placement and come back only when proved reclaimed.

    Attributes:
        held_bytes: What leases hold, also those that wait for warm contexts to leave it.
        awaited_bytes: How much of it has no worker that could use it yet.
        stuck_bytes: What warm contexts hold that could not be proved gone.
        fenced_bytes: The same of leases and warm contexts together.
        pending_leases: How many leases' workers are not ready.
        others: What others hold of the card.
        warm: The pool's contexts here, by number.
        warm_wanted: How many there are to be.
        awaiting: The pending leases that wait for warm contexts to leave, in the order they came.
    """

    __slots__ = (
        "awaited_bytes",
        "awaiting",
        "card",
        "exclusive_leases",
        "fenced_bytes",
        "held_bytes",
        "leases",
        "leases_by_tenant",
        "others",
        "pending_leases",
        "stuck_bytes",
        "warm",
        "warm_wanted",
    )

    def __init__(self, card: Card, warm_wanted: int) -> None:
        self.card = card
        self.held_bytes = 0
        self.fenced_bytes = 0
        self.leases = 0
        self.exclusive_leases = 0
        self.pending_leases = 0
        self.awaited_bytes = 0
        self.stuck_bytes = 0
        self.others = Others(card.spare_bytes, card.slack_bytes)
        self.warm: dict[int, WarmContext] = {}
        self.warm_wanted = warm_wanted
        self.awaiting: dict[int, Lease] = {}
        # Tenants without a live lease here are absent.
        self.leases_by_tenant: Counter[str] = Counter()

    @property
    def capacity_bytes(self) -> int:
        """What may be held on the card now: what was measured, less what others have taken since."""
        return max(0, self.card.capacity_bytes - self.others.taken_bytes)

    @property
    def free_bytes(self) -> int:
        """What may be granted: warm contexts give way. Below zero if a fence or others took what was granted."""
        return self.capacity_bytes - self.held_bytes - self.stuck_bytes

    @property
    def warm_bytes(self) -> int:
        """What all warm contexts hold."""
        return sum(context.charge_bytes for context in self.warm.values())

    @property
    def leaving(self) -> int:
        """How many contexts of the pool that served nobody are fenced, or dropped by this daemon."""
        own = [one for one in self.warm.values() if one.tenant is None and one.warm_id < FIRST_LEFT_ID]
        dropped = sum(one.state is WarmState.DROPPING and not one.is_restored for one in own)
        return dropped + sum(one.state is WarmState.FENCED for one in own)

    @property
    def recycled(self) -> int:
        """How many contexts wait for a tenant they have served."""
        return sum(context.waits_for_tenant for context in self.warm.values())

    @property
    def yielding_bytes(self) -> int:
        """What those hold that can still be told to leave."""
        return sum(context.charge_bytes for context in self.yielding())

    @property
    def used_bytes(self) -> int:
        """What processes may hold of the card by now."""
        return self.held_bytes - self.awaited_bytes + self.warm_bytes

    @property
    def promised_bytes(self) -> int:
        """What leases hold, or will once they have room; not what one will never use because it ended before."""
        ended_bytes = self.awaited_bytes - sum(lease.awaited_bytes for lease in self.awaiting.values())
        return self.held_bytes - ended_bytes

    @property
    def available_bytes(self) -> int:
        """The largest slice a tenant could be granted now."""
        if self.exclusive_leases:
            return 0
        return max(0, self.free_bytes - self.card.overhead_bytes)

    def charge_bytes(self, terms: LeaseTerms) -> int:
        """Bytes that a lease of these terms holds on this card: its size and its contexts' overhead."""
        return terms.size_bytes + terms.contexts * self.card.overhead_bytes

    def yielding(self) -> list[WarmContext]:
        """The warm contexts that can still be told to leave, oldest first."""
        return [context for context in self.warm.values() if context.state in YIELDING]

    def contexts_to_drop(self, tenant: str, max_idle: int) -> list[WarmContext] | None:
        """Apply `model.contexts_to_drop` to the contexts of this card that wait for a tenant."""
        return contexts_to_drop(
            [context for context in self.warm.values() if context.waits_for_tenant], tenant, max_idle
        )

    def await_bytes(self, lease: Lease, awaited_bytes: int) -> None:
        """So many of a pending lease's bytes can't be used yet; 0 once it may start."""
        self.awaited_bytes += awaited_bytes - lease.awaited_bytes
        lease.awaited_bytes = awaited_bytes
        if awaited_bytes:
            self.awaiting[lease.lease_id] = lease
        else:
            self.awaiting.pop(lease.lease_id, None)

    def has_room_for_context(self, given_bytes: int) -> bool:
        """Whether there is room for one more context now; `given_bytes`: what a warm one would leave for it."""
        needed_bytes = self.card.overhead_bytes - given_bytes
        kept_bytes = self.promised_bytes + self.stuck_bytes + self.yielding_bytes
        # A lease that ended before it had room keeps its bytes from others until it is torn down.
        is_free = self.free_bytes >= self.card.overhead_bytes
        return is_free and max(self.used_bytes, kept_bytes) + needed_bytes <= self.capacity_bytes

    def lend_context(self, lease: Lease) -> None:
        """Hold another context's bytes for an active lease."""
        lease.extra_bytes = self.card.overhead_bytes
        lease.charge_bytes += lease.extra_bytes
        self.held_bytes += lease.extra_bytes

    def take_context_back(self, lease: Lease) -> None:
        """Let them go; they are proved free, or an operator vouched for them."""
        lease.charge_bytes -= lease.extra_bytes
        self.held_bytes -= lease.extra_bytes
        lease.extra_bytes = 0

    def leave_pending(self, lease: Lease) -> None:
        """Its worker is ready, or it has ended."""
        self.pending_leases -= 1
        self.awaiting.pop(lease.lease_id, None)

    def take(self, lease: Lease) -> None:
        """Hold a new lease's bytes; it may use none before it is started."""
        self.pending_leases += 1
        self.await_bytes(lease, lease.charge_bytes)
        self.held_bytes += lease.charge_bytes
        self.leases += 1
        self.leases_by_tenant[lease.tenant] += 1
        self.exclusive_leases += lease.terms.exclusivity in ALONE

    def restore(self, lease: Lease) -> None:
        """Hold the bytes of a lease that was there before this table."""
        self.held_bytes += lease.charge_bytes
        self.leases += 1
        self.leases_by_tenant[lease.tenant] += 1
        self.exclusive_leases += lease.terms.exclusivity in ALONE

    def give_back(self, lease: Lease) -> None:
        """Let go of a lease's bytes; they are proved free, or an operator vouched for them."""
        self.held_bytes -= lease.charge_bytes
        self.awaited_bytes -= lease.awaited_bytes
        self.leases -= 1
        self.leases_by_tenant[lease.tenant] -= 1
        if not self.leases_by_tenant[lease.tenant]:
            del self.leases_by_tenant[lease.tenant]
        self.exclusive_leases -= lease.terms.exclusivity in ALONE

    def snapshot(self) -> CardSnapshot:
        """The card as it is now."""
        return CardSnapshot(
            self.card.uuid,
            self.card.index,
            self.card.name,
            self.capacity_bytes,
            self.held_bytes,
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
        )


def select(accounts: Sequence[CardAccount], selector: str | None) -> tuple[CardAccount, ...]:
    """The cards a selector names: all of them for None, none if it is unknown."""
    if selector is None:
        return tuple(accounts)
    return tuple(account for account in accounts if account.card.answers_to(selector))


def suits(account: CardAccount, exclusivity: Exclusivity) -> bool:
    """Whether the card is of the kind the exclusivity class speaks of."""
    return exclusivity is not Exclusivity.PARTITION_EXCLUSIVE or account.card.is_partition


def could_ever_hold(account: CardAccount, terms: LeaseTerms) -> bool:
    """Whether the request would fit if the card were empty."""
    return account.charge_bytes(terms) <= account.card.capacity_bytes


def fits_now(account: CardAccount, terms: LeaseTerms) -> bool:
    """Whether the card has the bytes free and nobody on it, or to come, wants it alone."""
    if account.exclusive_leases or (terms.exclusivity in ALONE and account.leases):
        return False
    return account.charge_bytes(terms) <= account.free_bytes


def choose(candidates: Iterable[CardAccount], terms: LeaseTerms) -> CardAccount | None:
    """The card with the most free bytes among those that fit now (a tie: the lowest index), None if none does."""
    fitting = [account for account in candidates if fits_now(account, terms)]
    return min(fitting, key=lambda account: (-account.free_bytes, account.card.index), default=None)


def largest_slice_bytes(candidates: Iterable[CardAccount], contexts: int = 1) -> int:
    """The most that any of the cards could ever give one tenant, for so many contexts."""
    return max((_less(a.card.largest_slice_bytes, a, contexts) for a in candidates), default=0)


def available_bytes(candidates: Iterable[CardAccount], contexts: int = 1) -> int:
    """The most that any of the cards could give one tenant now, for so many contexts."""
    return max((_less(a.available_bytes, a, contexts) for a in candidates), default=0)


def _less(slice_bytes: int, account: CardAccount, contexts: int) -> int:
    """What is left of a slice once the contexts beside its first are charged."""
    return max(0, slice_bytes - (contexts - 1) * account.card.overhead_bytes)
