"""The interface through which the broker queries cards; also retries at the start, and shared driver calls."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Set
from concurrent.futures import Future
from typing import Final, Generic, Protocol, TypeVar

from gpulease.daemon.host.cannot_start import CannotStart
from gpulease.daemon.leases.persisted import CardRow
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.protocol.back_off import back_off_s
from gpulease.protocol.fast_dataclass import dataclass

T = TypeVar("T")


class CardsUnavailable(CannotStart):
    """The cards are unusable; the daemon must not start.

    Attributes:
        may_pass: Whether a retry in a moment may succeed.
    """

    def __init__(self, message: str, *, hint: str, status: int = 0, may_pass: bool = False) -> None:
        super().__init__(message, hint, status)
        self.may_pass = may_pass


POLL_ERRORS: Final = (CardsUnavailable, MemoryError, RuntimeError)
"""Errors of a poll: the card reports no figure, or no thread can be started."""


@dataclass(frozen=True, slots=True)
class CardFacts:
    """A card as discovered.

    Attributes:
        uuid: The card's UUID.
        index: The card's number among those that the daemon may use.
        name: The product's name.
        capacity_bytes: The bytes for leases and their contexts, without the node's reserve.
        is_partition: Whether the card is a MIG partition.
        found_bytes: The capacity without the operator's limit.
        unattributed_bytes: The used bytes that belonged to no process when the card was first measured.
        slack_bytes: Maximum growth of other programs' bytes that does not count as a leak.
        peers: UUIDs of the cards whose memory this card can read over NVLink.
    """

    uuid: str
    index: int
    name: str
    capacity_bytes: int
    is_partition: bool = False
    found_bytes: int = 0
    unattributed_bytes: int = 0
    slack_bytes: int = 0
    peers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CardReading:
    """A reading of a card's memory.

    Attributes:
        unowned_bytes: The bytes that belong to no process, minus those when the daemon first measured the card; may be
            negative.
        processes: The bytes of each process on the card, by process id.
        outside_bytes_at_first: The bytes that processes outside the daemon held when the daemon first measured the
            card.
    """

    unowned_bytes: int
    processes: Mapping[int, int]
    outside_bytes_at_first: int = 0

    def outside_bytes(self, own: Set[int]) -> int:
        """Return the bytes of processes outside `own`, minus those when the daemon first measured the card."""
        outside_bytes = sum(used_bytes for pid, used_bytes in self.processes.items() if pid not in own)
        return outside_bytes - self.outside_bytes_at_first


@dataclass(frozen=True, slots=True)
class CardLoad:
    """A card's load now. A figure is None if the driver does not report it.

    Attributes:
        utilization_percent: The percentage of the driver's last sample period in which a kernel ran.
        used_bytes: The bytes of all processes and the driver together.
    """

    utilization_percent: int | None = None
    used_bytes: int | None = None


class CardSource(Protocol):
    """The cards of one driver. The methods may take milliseconds, so the broker calls them in a thread."""

    @property
    def driver(self) -> str:
        """The name of the driver that workers use on these cards: `cuda`, or `cpu` for the embedded driver."""

    @property
    def warning(self) -> str:
        """A sentence that warns operators and tenants of these cards, if they are emulated; else ""."""

    @property
    def allowance_bytes(self) -> int:
        """The bytes for rounding, code and local memory that a session may use in addition to its slice."""

    @property
    def reserve_bytes(self) -> int:
        """The bytes reserved for each session in addition to its slice. A session that uses more is ended."""

    def discover(self, rows: Mapping[str, CardRow]) -> list[CardFacts]:
        """Return all cards. Raises CardsUnavailable.

        `rows` has the measurement of each known card from before the card had leases, by the card's UUID.
        """

    def why_no_context(self) -> CardsUnavailable | None:
        """Return the reason why no worker can create a context; None if the driver reports none."""

    def process_bytes(self, card_uuid: str, pid: int) -> int:
        """Return the bytes that a process holds on a card now."""

    @property
    def has_others(self) -> bool:
        """True if programs other than workers can hold memory of these cards."""

    def read(self, card_uuid: str) -> CardReading: ...

    def load(self, card_uuid: str) -> CardLoad: ...

    def close(self) -> None: ...


RETRY_S: Final = 30.0
"""Maximum time of all retries in seconds. If the driver needs longer, the daemon must be started again."""

FIRST_PAUSE_S: Final = 0.25
MAX_PAUSE_S: Final = 4.0


def pause_s(tried: int, waited_s: float) -> float | None:
    """Return the pause after `tried` attempts. It doubles each time, up to MAX_PAUSE_S.

    Returns None if `waited_s` and the pause together would exceed RETRY_S.
    """
    # The pause counts towards the limit, so that no attempt begins after the limit.
    wanted_s = back_off_s(tried - 1, FIRST_PAUSE_S, MAX_PAUSE_S)
    return None if waited_s + wanted_s > RETRY_S else wanted_s


async def retry(attempt: Callable[[], Awaitable[T]]) -> T:
    """Call `attempt` until it succeeds, and return its result. Raises its last CardsUnavailable.

    Only faults with `may_pass` are retried: a device node that appears late, or a driver that is still loading.
    """
    started = time.monotonic()
    tried = 0
    while True:
        tried += 1
        try:
            return await attempt()
        except CardsUnavailable as error:
            # Raise a permanent fault at once, and other faults when the time for retries is over.
            wait_s = pause_s(tried, time.monotonic() - started) if error.may_pass else None
            if wait_s is None:
                raise
            # Log the first fault, so that an operator sees why the daemon does not start yet.
            if tried == 1:
                log_event(LogEvent.CARDS_AWAITED, reason=str(error), hint=error.hint, patience_s=RETRY_S)
        await asyncio.sleep(wait_s)


class SharedCall(Generic[T]):
    """A slow call of the driver, shared by threads that each need a result from after their request.

    One call serves all threads that requested it before it began. A thread that makes a request during a call waits for
    the next call.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._calling = threading.Lock()
        self._lock = threading.Lock()
        self._next: Future[T] | None = None

    def get(self) -> T:
        """Return the result of a driver call that begins after this method was called. Raises the call's exception."""
        # The first thread makes the call. Threads that come before the call begins wait for its result.
        with self._lock:
            future, is_first = self._next, self._next is None
            if future is None:
                future = self._next = Future()
        if is_first:
            # Make one call at a time. While this thread waits here, other threads may join its call.
            with self._calling:
                with self._lock:
                    # From here on the call counts as begun, and a thread that comes now must join the next call.
                    self._next = None
                self._answer(future)
        return future.result()

    def _answer(self, future: Future[T]) -> None:
        try:
            future.set_result(self._call())
        except BaseException as error:
            future.set_exception(error)
