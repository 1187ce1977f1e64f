"""The points at which Python may run a signal's handler in the client's code, and interrupts at each of them.

Python looks for signals where a function begins and behind a call of C's. A profile function is called just there, and
what it raises comes out there. (It is not called where a loop goes round: a loop here has calls in it.)
"""

import sys
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from types import CodeType, FrameType
from typing import Any, NamedTuple

import gpulease
from gpulease.client import Region
from gpulease.client.sync.clean_ups import due
from helpers.waiting import wait_until

PASSES = 2
"""Times that a point is met in one run, at most: how often a wait looks again depends on the host."""

NOT_OURS = frozenset({"__del__", "<genexpr>", "<lambda>"})
"""Functions that Python discards an interrupt in, and generators that it closes: tracing shows a call there."""


_FINALIZER = weakref.finalize.__call__.__code__

_ENTERED = Region.__enter__.__code__
"""It only returns the region, which is the program's by then: an interrupt there is as one after any call of ours."""


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
        self._targets: tuple[Point, ...] = ()
        self.interrupts = 0
        # How many interrupts come before the points that are walked.
        self._walks_from = 0

    def _run(self, operation: Callable[[], Any], *targets: Point) -> Any:
        """The operation's result; None if it was interrupted."""
        self._counts, self._targets, self.interrupts = {}, targets, 0
        sys.settrace(self._trace)
        sys.setprofile(self._profile)
        try:
            return operation()
        except KeyboardInterrupt:
            return None
        finally:
            sys.setprofile(None)
            sys.settrace(None)
            # What it owes is given back before it runs again.
            wait_until(lambda: not due, "threads have given back what an interrupted call owes")

    def walk(self, operation: Callable[[], Any], end: Callable[[Any], None]) -> Iterator[Point]:
        """Interrupt the operation at each point that it comes to; yields behind each interrupt.

        `end` gets what the operation has made, or None.
        """
        end(self._run(operation))
        for first in self._not_walked():
            end(self._run(operation, first))
            if self.interrupts:
                yield first

    def walk_twice(
        self, operation: Callable[[], Any], end: Callable[[Any], None], every: int = 1
    ) -> Iterator[tuple[Point, Point]]:
        """Interrupt the operation at each point that it comes to, and again at each point of what runs after that.

        Yields behind each pair. `end` as in `walk`. With `every` above 1, some first points stand for all. Of first
        points behind which the very same points follow, one stands for all: what is cleaned up is the same.
        """
        walked = set[frozenset[Point]]()
        end(self._run(operation))
        for first in islice(self._not_walked(), 0, None, every):
            before, self._met, self._walks_from = self._met, {}, 1
            end(self._run(operation, first))
            path = frozenset(self._met)
            for second in () if path in walked else self._not_walked():
                end(self._run(operation, first, second))
                if self.interrupts == len((first, second)):
                    yield first, second
            walked.add(path)
            self._met, self._walks_from = before, 0

    def _not_walked(self) -> Iterator[Point]:
        """The points met so far and while this is iterated, each once."""
        met, done = self._met, set[Point]()
        while left := [point for point in met if point not in done]:
            done.add(left[0])
            yield left[0]

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        # Python drops a profile function that raises, so it is set again as soon as the interrupt is seen.
        if event == "exception":
            sys.setprofile(self._profile)
        frame.f_trace_lines = False
        return self._trace

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_made = event == "return" and code.co_name == "__init__"
        if event not in ("call", "c_return") and not is_made:
            return
        if not _is_ours(code) or any(f in NOT_OURS for f in _names(frame)):
            return
        place = code, frame.f_lasti, event
        time = self._counts[place] = self._counts.get(place, 0) + 1
        if time > PASSES:
            return
        point = Point(*place, time)
        if self.interrupts == self._walks_from:
            self._met[point] = None
        if self.interrupts < len(self._targets) and point == self._targets[self.interrupts]:
            self.interrupts += 1
            self._counts = {}
            raise KeyboardInterrupt


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(gpulease.__path__[0]) and code is not _ENTERED


def _names(frame: FrameType | None) -> Iterator[str]:
    """The names of our functions that are running, and `__del__` for a finalizer: Python discards interrupts there."""
    while frame is not None:
        if _is_ours(frame.f_code):
            yield frame.f_code.co_name
        elif frame.f_code is _FINALIZER:
            yield "__del__"
        frame = frame.f_back
