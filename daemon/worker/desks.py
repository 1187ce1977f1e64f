"""What all desks of a session work with. A desk does the operations of one kind."""

from collections.abc import Callable
from dataclasses import dataclass

from gpulease.daemon.drivers.interface import Context
from gpulease.daemon.worker.ledger import Ledger


@dataclass(slots=True, eq=False)
class Holdings:
    """What a session has, for its desks.

    Attributes:
        count: Called when what the session holds has changed.
        check_lease: The look at the lease, for whatever takes long; raises once it is over.
        may_have_grown: The context was made to do what can take memory of the card by itself; whoever looks resets it.
    """

    ledger: Ledger
    context: Context
    count: Callable[[], None]
    check_lease: Callable[[], None]
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
