"""A look that takes the driver long enough to be shared: many ask for it at a time, and each wants one that is not old.

A look answers all who asked before it began. Who asks while one is under way waits for the next, and shares it.

The seam between the broker and what knows the cards.

Trying again what may be better in a moment: device nodes that appear late, a driver that is still being loaded.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Set
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

from gpulease.daemon.leases import KeptCard
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event

T = TypeVar("T")


class Shared(Generic[T]):
    """Looks, one at a time, in the threads that ask."""

    def __init__(self, look: Callable[[], T]) -> None:
        self._look = look
        self._is_looking = threading.Lock()
        self._books = threading.Lock()
        self._next: Future[T] | None = None

    def ask(self) -> T:
        """What a look says that began after this was called; raises what it raises."""
        with self._books:
            wanted, is_first = self._next, self._next is None
            if wanted is None:
                wanted = self._next = Future()
        if is_first:
            with self._is_looking:
                with self._books:
                    self._next = None
                self._answer(wanted)
        return wanted.result()

    def _answer(self, wanted: Future[T]) -> None:
        try:
            wanted.set_result(self._look())
        except BaseException as error:
            wanted.set_exception(error)


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


PATIENCE_S: Final = 30.0
"""All together. A driver that needs longer is met by the daemon's next start, if something starts it again."""

FIRST_PAUSE_S: Final = 0.25
MAX_PAUSE_S: Final = 4.0


def pause_s(tried: int, waited_s: float) -> float | None:
    """How long to wait after so many tries, each pause twice the one before; None if it has been long enough."""
    wanted_s = min(FIRST_PAUSE_S * 2 ** min(tried - 1, 16), MAX_PAUSE_S)
    return None if waited_s + wanted_s > PATIENCE_S else wanted_s


async def insist(attempt: Callable[[], Awaitable[T]]) -> T:
    """What `attempt` gives, at once or later. Raises CardsUnavailable as it did last."""
    begun = time.monotonic()
    tried = 0
    while True:
        tried += 1
        try:
            return await attempt()
        except CardsUnavailable as error:
            wait_s = pause_s(tried, time.monotonic() - begun) if error.may_pass else None
            if wait_s is None:
                raise
            if tried == 1:
                said = f"{error}; it is tried again for {PATIENCE_S:g} s. {error.hint}"
                log_event(LogEvent.CARDS_AWAITED, said, reason=str(error), hint=error.hint, patience_s=PATIENCE_S)
        await asyncio.sleep(wait_s)
