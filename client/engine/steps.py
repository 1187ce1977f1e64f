"""What a procedure may have to wait for.

Theory of operation. An operation is a generator. It sends and receives on a nonblocking channel by itself, and where
it would have to wait it yields a step; whoever drives it waits in its own way (poll, or an event loop) and sends the
outcome back in. So every rule is written once, and the two faces differ in how they wait and in nothing else.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from gpulease.client.transport.channel import Channel

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Wait:
    """Until the channel has bytes to read, or (`for_room`) room to write as well; at most `timeout_s`.

    The answer is False if the time ran out.
    """

    channel: "Channel"
    for_room: bool
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Sleep:
    """For so many seconds, or until `until`, an event of the face's kind, is set."""

    seconds: float
    until: Any = None


@dataclass(frozen=True, slots=True)
class Locked:
    """Until `lock` (the face's kind of lock) is held, then drive `procedure` and let go; the answer is its result."""

    lock: Any
    procedure: "Procedure[Any]"


Step: TypeAlias = Wait | Sleep | Locked
Procedure: TypeAlias = Generator[Step, Any, T]


class Limit(Protocol):
    """How long an answer may take."""

    def remaining_s(self) -> float:
        """Seconds left; 0 or less when the time is over."""

    def over(self) -> Procedure[None]:
        """What to do when it is over: raises, or returns if there is more time after all."""
