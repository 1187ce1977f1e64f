"""The cards of the node, and what is held on each."""

from collections import Counter
from dataclasses import dataclass
from typing import Final

from gpulease.daemon.core.leases import ALONE, Lease

GPU_PREFIX: Final = "gpu-"


@dataclass(frozen=True, slots=True)
class Card:
    """One card, or one MIG partition of one.

    Attributes:
        index: Its number on the node, what `selector` may name it by.
        capacity_bytes: What may be held on it in all; the node's reserve is already taken off.
        overhead_bytes: What one context costs besides its tenant's bytes; charged to the node, per lease.

    Raises:
        ValueError: A number is negative, or the uuid is empty.
    """

    uuid: str
    index: int
    name: str
    capacity_bytes: int
    overhead_bytes: int
    is_partition: bool = False

    def __post_init__(self) -> None:
        if not self.uuid or min(self.index, self.capacity_bytes, self.overhead_bytes) < 0:
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
        available_bytes: The largest slice a tenant could be granted now: what is free less one context's
            overhead, and nothing while one lease has the card to itself.
        leases: How many live leases it has, the fenced ones too.
        is_exclusive: One lease has the card to itself.
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


class CardAccount:
    """The running sums of one card. Bytes are taken at placement and come back only when proved reclaimed."""

    __slots__ = ("card", "exclusive_leases", "fenced_bytes", "held_bytes", "leases", "leases_by_tenant")

    def __init__(self, card: Card) -> None:
        self.card = card
        self.held_bytes = 0
        self.fenced_bytes = 0
        self.leases = 0
        self.exclusive_leases = 0
        # Tenants without a live lease here are absent.
        self.leases_by_tenant: Counter[str] = Counter()

    @property
    def free_bytes(self) -> int:
        """What is not held."""
        return self.card.capacity_bytes - self.held_bytes

    @property
    def available_bytes(self) -> int:
        """The largest slice a tenant could be granted now."""
        if self.exclusive_leases:
            return 0
        return max(0, self.free_bytes - self.card.overhead_bytes)

    def charge_bytes(self, size_bytes: int) -> int:
        """What a lease of `size_bytes` holds on this card."""
        return size_bytes + self.card.overhead_bytes

    def take(self, lease: Lease) -> None:
        """Hold a lease's bytes."""
        self.held_bytes += lease.charge_bytes
        self.leases += 1
        self.leases_by_tenant[lease.tenant] += 1
        self.exclusive_leases += lease.exclusivity in ALONE

    def give_back(self, lease: Lease) -> None:
        """Let go of a lease's bytes; they are proved free, or an operator vouched for them."""
        self.held_bytes -= lease.charge_bytes
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
            self.card.capacity_bytes,
            self.held_bytes,
            self.free_bytes,
            self.available_bytes,
            self.fenced_bytes,
            self.leases,
            self.exclusive_leases > 0,
        )
