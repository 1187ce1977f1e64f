"""What all desks of a session work with. A desk does the operations of one kind."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gpulease.daemon.drivers.interface import Context
from gpulease.daemon.worker.ledger import Ledger
from gpulease.daemon.worker.page import Counter

# Plain integers, as in `taking`.
_COPIES: Final = int(Counter.COPIES)
_COPIED_BYTES: Final = int(Counter.COPIED_BYTES)


@dataclass(slots=True, eq=False)
class Holdings:
    """What a session has, for its desks.

    Attributes:
        count: Called when what the session holds has changed.
        check_lease: The look at the lease, for whatever takes long; raises once it is over.
        counters: The control page's.
        may_have_grown: The context was made to do what can take memory of the card by itself; whoever looks resets it.
    """

    ledger: Ledger
    context: Context
    count: Callable[[], None]
    check_lease: Callable[[], None]
    counters: memoryview
    may_have_grown: bool = False


class Desk:
    """Each public method that takes a frame does one operation and gives its reply.

    They raise BodyError, Refused, DriverError, and what the look at the lease raises.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._ledger = holdings.ledger
        self._context = holdings.context
        self._count = holdings.count
        self._check_lease = holdings.check_lease
        self._counters = holdings.counters

    def _count_copy(self, size_bytes: int) -> None:
        self._counters[_COPIES] += 1
        self._counters[_COPIED_BYTES] += size_bytes
