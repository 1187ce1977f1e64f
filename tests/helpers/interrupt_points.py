"""The points at which Python may run a signal's handler in the client's code, and interrupts at each of them.

Python looks for signals where a function begins and behind a call of C's. A profile function is called just there, and
what it raises comes out there. (It is not called where a loop goes round: a loop here has calls in it.)
"""

import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

import gpulease

PASSES = 2
"""Times that a point is met in one run, at most: how often a wait looks again depends on the host."""

NOT_OURS = frozenset({"__del__", "<genexpr>", "<lambda>"})
"""Functions that Python discards an interrupt in, and generators that it closes: tracing shows a call there."""


class Point(NamedTuple):
    """A place in the code, what happens there, and how often it has happened in this run."""

    code: CodeType
    at: int
    event: str
    time: int

    def __str__(self) -> str:
        return (
            f"{self.code.co_filename}:{self.code.co_firstlineno} {self.code.co_name}+{self.at} {self.event} {self.time}"
        )


class InterruptPoints:
    """Runs an operation again and again, with an interrupt at another point each time."""

    def __init__(self) -> None:
        self._met: dict[Point, None] = {}
        self._counts: dict[tuple[CodeType, int, str], int] = {}
        self._target: Point | None = None
        self.has_interrupted = False

    def _run(self, operation: Callable[[], Any], target: Point | None) -> Any:
        """The operation's result; None if it was interrupted."""
        self._counts, self._target, self.has_interrupted = {}, target, False
        sys.setprofile(self._profile)
        try:
            return operation()
        except KeyboardInterrupt:
            return None
        finally:
            sys.setprofile(None)

    def walk(self, operation: Callable[[], Any], end: Callable[[Any], None]) -> Iterator[Point]:
        """Interrupt the operation at each point that it comes to; yields behind each interrupt.

        `end` gets what the operation has made, or None.
        """
        done: set[Point] = set()
        end(self._run(operation, None))
        while left := [point for point in self._met if point not in done]:
            done.add(left[0])
            end(self._run(operation, left[0]))
            if self.has_interrupted:
                yield left[0]

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_made = event == "return" and code.co_name == "__init__"
        if event not in ("call", "c_return") and not is_made:
            return
        if not code.co_filename.startswith(gpulease.__path__[0]) or any(f in NOT_OURS for f in _names(frame)):
            return
        place = code, frame.f_lasti, event
        time = self._counts[place] = self._counts.get(place, 0) + 1
        if time > PASSES:
            return
        point = Point(*place, time)
        self._met[point] = None
        if point == self._target and not self.has_interrupted:
            self.has_interrupted = True
            raise KeyboardInterrupt


def _names(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back
