"""The cards of the node, and what is held on each."""

from collections import Counter
from dataclasses import dataclass
from typing import Final

from gpulease.daemon.core.leases import ALONE, Lease
from gpulease.daemon.core.others import Others
from gpulease.daemon.core.recycling import gives_way
from gpulease.daemon.core.warm import FIRST_LEFT_ID, YIELDING, WarmContext, WarmState

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

    def charge_bytes(self, size_bytes: int, contexts: int = 1) -> int:
        """What a lease of `size_bytes` with so many contexts holds on this card."""
        return size_bytes + contexts * self.card.overhead_bytes

    def yielding(self) -> list[WarmContext]:
        """The warm contexts that can still be told to leave, oldest first."""
        return [context for context in self.warm.values() if context.state in YIELDING]

    def gives_way(self, tenant: str, max_idle: int) -> list[WarmContext] | None:
        """Which of the contexts that wait for a tenant goes for one more of this one's; see `recycling.gives_way`."""
        return gives_way([context for context in self.warm.values() if context.waits_for_tenant], tenant, max_idle)

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
        self.exclusive_leases += lease.exclusivity in ALONE

    def restore(self, lease: Lease) -> None:
        """Hold the bytes of a lease that was there before this table."""
        self.held_bytes += lease.charge_bytes
        self.leases += 1
        self.leases_by_tenant[lease.tenant] += 1
        self.exclusive_leases += lease.exclusivity in ALONE

    def give_back(self, lease: Lease) -> None:
        """Let go of a lease's bytes; they are proved free, or an operator vouched for them."""
        self.held_bytes -= lease.charge_bytes
        self.awaited_bytes -= lease.awaited_bytes
        self.leases -= 1
        self.leases_by_tenant[lease.tenant] -= 1
        if not self.leases_by_tenant[lease.tenant]:
            del self.leases_by_tenant[lease.tenant]
        self.exclusive_leases -= lease.exclusivity in ALONE

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
