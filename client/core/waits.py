"""The steps at which an operation may have to wait.

Theory of operation. An operation is a generator, called a procedure. It sends and receives on a nonblocking channel.
Where it would have to wait, it yields a step. Its driver (`sync.driver`, `aio.driver`) waits with poll or an event loop
and sends the outcome back into the generator. So every rule is written once; the two APIs differ only in how they wait.
"""

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from operator import call
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from gpulease.client.transport.channel import Channel

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until the channel has bytes to read or, with `for_room`, also room to write; at most `timeout_s`.

    The driver sends back False if the time ran out.
    """

    channel: "Channel"
    for_room: bool
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Sleep:
    """Pause for `seconds`, or until the event `until` (threading's or asyncio's) is set."""

    seconds: float
    until: Any = None


@dataclass(frozen=True, slots=True)
class Locked:
    """Take `lock` (the API's kind of lock), drive `procedure`, release the lock.

    The driver sends back the procedure's result.
    """

    lock: Any
    procedure: "Procedure[Any]"


Step: TypeAlias = Wait | Sleep | Locked
Procedure: TypeAlias = Generator[Step, Any, T]

MaybePending: TypeAlias = T | Procedure[T]
"""Result of an operation that was tried immediately, under the session's lock: the operation's own result, or a
procedure that the caller must drive to get it. Creating a generator alone costs as much as the rest of a launch."""


def is_held(lock: Any) -> bool:
    """True if another thread or task holds the lock. A threading.RLock can only be tested by acquiring it."""
    # A threading.Lock and an asyncio.Lock say whether they are held.
    locked = getattr(lock, "locked", None)
    if locked is not None:
        return bool(locked())
    # For an RLock the answer is only a hint: it may change as soon as this returns. All of it runs in C, because an
    # interrupt between the two calls would leave the lock held.
    taken = takewhile(bool, map(call, (partial(lock.acquire, False), lock.release)))
    return not list(taken)


class Deadline(Protocol):
    """The deadline of an operation, or of one of its replies."""

    def remaining_s(self) -> float:
        """Seconds left; 0 or less when the time is over."""

    def raise_or_extend(self) -> Procedure[None]:
        """Raise, or extend the deadline and return. Called when the time is over."""
