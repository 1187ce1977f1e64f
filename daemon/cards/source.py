"""The seam between the broker and what knows the cards."""

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Final, Protocol

from gpulease.daemon.core import KeptCard

EX_CONFIG: Final = 78
"""sysexits(3): what was asked for can't be had here. A restart would fail the same way."""

EX_UNAVAILABLE: Final = 69
"""sysexits(3): a later start may succeed."""


class CardsUnavailable(Exception):
    """The cards can't be used at all: the daemon must not start.

    Attributes:
        hint: What the operator can do, a sentence.
        status: The exit status of a daemon that can't start for it, one of sysexits(3).
        may_pass: Whether it may be over in a moment, so that trying again is worth while.
    """

    def __init__(self, message: str, *, hint: str, status: int = EX_UNAVAILABLE, may_pass: bool = False) -> None:
        super().__init__(message)
        self.hint = hint
        self.status = status
        self.may_pass = may_pass


@dataclass(frozen=True, slots=True)
class CardFacts:
    """A card as found.

    Attributes:
        capacity_bytes: All that may be leased, contexts' overhead included; the node's reserve is already taken off.
        found_bytes: The same before the operator's own bound.
        unattributed_bytes: What of the card belongs to no process, the base line of proofs.
        slack_bytes: How far what others hold may move by itself; the reserve covers it.
    """

    uuid: str
    index: int
    name: str
    capacity_bytes: int
    is_partition: bool = False
    found_bytes: int = 0
    unattributed_bytes: int = 0
    slack_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CardReading:
    """One look at a card.

    Attributes:
        unowned_bytes: What belongs to no process, beyond what did when the card was measured; it may be below zero.
        processes: What each process on the card holds, by its id.
        earlier_bytes: What processes outside the daemon held when the card was measured.
    """

    unowned_bytes: int
    processes: Mapping[int, int]
    earlier_bytes: int = 0

    def outside_bytes(self, own: Set[int]) -> int:
        """What processes hold that are none of `own`, beyond what such held when the card was measured."""
        return sum(held for pid, held in self.processes.items() if pid not in own) - self.earlier_bytes


@dataclass(frozen=True, slots=True)
class CardLoad:
    """How busy a card is now; None is what its driver does not tell.

    Attributes:
        utilization_percent: Of the driver's last sample period, how long a kernel ran.
        used_bytes: Of all processes and the driver together.
    """

    utilization_percent: int | None = None
    used_bytes: int | None = None


class CardSource(Protocol):
    """Knows the cards of one kind. Its methods may take milliseconds: the broker calls them from a thread."""

    @property
    def driver(self) -> str:
        """The driver whose workers compute on these cards."""

    @property
    def allowance_bytes(self) -> int:
        """What a session may take besides its context and its slice: rounding, code, local memory."""

    @property
    def reserve_bytes(self) -> int:
        """What each session is charged to the node for that, and for what no rule foresaw; one that takes more ends."""

    def discover(self, known: Mapping[str, KeptCard]) -> list[CardFacts]:
        """All cards, with what was measured of `known` ones before leases were on them. Raises CardsUnavailable."""

    def why_no_context(self) -> CardsUnavailable | None:
        """What the driver itself has against contexts, asked where a worker could make none; None if it has nothing."""

    def process_bytes(self, card_uuid: str, pid: int) -> int:
        """What a process holds on a card now, 0 if nothing."""

    @property
    def has_others(self) -> bool:
        """Whether anything besides workers can hold memory of these cards."""

    def read(self, card_uuid: str) -> CardReading:
        """Look at a card. Raises CardsUnavailable."""

    def load(self, card_uuid: str) -> CardLoad:
        """How busy a card is."""

    def close(self) -> None:
        """Let go of what was opened."""
