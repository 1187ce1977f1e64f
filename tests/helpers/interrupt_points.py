"""Interrupts an operation at each point at which Python may run a signal handler in the client's code.

Python checks for signals at the start of a function and after a call of a C function. It calls a profile function at
the same points, and an exception of the profile function is raised there. (Python also checks at the end of a loop's
body, where it calls no profile function. The client's loops all contain calls.)
"""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from types import CodeType, FrameType
from typing import Any, NamedTuple

import gpulease
from gpulease.client import Region
from gpulease.client.sync.driver import due
from helpers.waiting import wait_until

PASSES = 2
"""Maximum number of times that a point counts in one run, because the number of polls in a wait depends on the host."""

MOST_FIRSTS = 4
"""Number of first points after which a second point is used: in an operation's quarters, there is more to clean up in
each."""

IGNORED_FUNCTIONS = frozenset({"__del__", "<genexpr>", "<lambda>"})
"""Functions in which Python discards an exception, and generators: tracing shows a call when Python closes one."""


_FINALIZER = weakref.finalize.__call__.__code__

_ENTERED = Region.__enter__.__code__
"""This function only returns the region, which the program then already owns. An interrupt in it is like one after the
call."""

_OF_CLIENT: dict[str, bool] = {}
"""By file, whether it is the client's. Kept, because each event asks this."""


class Point(NamedTuple):
    """A place in the code, the event at this place, and how often the event has happened in this run.

    Keys contain the id of the code, because hashing the code itself would hash everything in it.
    """

    code: CodeType
    at: int
    event: str
    passes: int

    @property
    def key(self) -> "PointKey":
        return id(self.code), self.at, self.event, self.passes

    def __str__(self) -> str:
        place = f"{self.code.co_filename}:{self.code.co_firstlineno} {self.code.co_name}+{self.at}"
        return f"{place} {self.event} {self.passes}"


PointKey = tuple[int, int, str, int]


class InterruptPoints:
    """Runs an operation repeatedly, with an interrupt at a different point each time."""

    def __init__(self) -> None:
        self._met: dict[PointKey, Point] = {}
        self._counts: dict[tuple[int, int, str], int] = {}
        self._targets: tuple[PointKey, ...] = ()
        self.interrupts = 0
        # The number of interrupts after which points are recorded.
        self._walks_from = 0

    def _run(self, operation: Callable[[], Any], *targets: Point) -> Any:
        """Run the operation with interrupts at `targets`. Returns its result; None if it was interrupted."""
        self._counts, self._targets, self.interrupts = {}, tuple(target.key for target in targets), 0
        sys.settrace(self._trace)
        sys.setprofile(self._profile)
        try:
            return operation()
        except KeyboardInterrupt:
            return None
        finally:
            sys.setprofile(None)
            sys.settrace(None)
            # Before the next run, wait until the clean-up of an interrupted call is done.
            wait_until(lambda: not due, "threads have given back what an interrupted call owes")

    def walk(self, operation: Callable[[], Any], end: Callable[[Any], None]) -> Iterator[Point]:
        """Interrupt the operation at each point that it reaches. Yields after each interrupt.

        `end` is called after each run, with the operation's result or None.
        """
        end(self._run(operation))
        for first in self._not_walked():
            end(self._run(operation, first))
            if self.interrupts:
                yield first

    def walk_twice(
        self, operation: Callable[[], Any], end: Callable[[Any], None], every: int = 1
    ) -> Iterator[tuple[Point, Point]]:
        """Interrupt the operation at each point that it reaches, and again at each point that it reaches after that.

        Yields after each pair. `end` is as in `walk`. Only one in `every` first points is used. If the same points
        follow several first points, only one of the first points is used, because the clean-up is the same. Of the
        others, each second point is used after MOST_FIRSTS.
        """
        walked, uses = set[frozenset[PointKey]](), Counter[PointKey]()
        end(self._run(operation))
        firsts = [*islice(self._not_walked(), 0, None, every)]
        sweeps = max(1, len(firsts) // MOST_FIRSTS)
        # Each sweep passes through the whole operation.
        for first in [first for start in range(sweeps) for first in firsts[start::sweeps]]:
            before, self._met, self._walks_from = self._met, {}, 1
            end(self._run(operation, first))
            path = frozenset(self._met)
            for second in () if path in walked else self._not_walked():
                if uses[second.key] == MOST_FIRSTS:
                    continue
                uses[second.key] += 1
                end(self._run(operation, first, second))
                if self.interrupts == len((first, second)):
                    yield first, second
            walked.add(path)
            self._met, self._walks_from = before, 0

    def _not_walked(self) -> Iterator[Point]:
        """Yield each point that was recorded so far, or is recorded during the iteration, once."""
        met, done = self._met, 0
        # Later points follow the known points in the dictionary.
        while left := [*islice(met.values(), done, None)]:
            yield from left
            done += len(left)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        # Python removes a profile function that raises, so set it again when the exception is traced.
        if event == "exception":
            sys.setprofile(self._profile)
        frame.f_trace_lines = False
        return self._trace

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_made = event == "return" and code.co_name == "__init__"
        if event not in ("call", "c_return") and not is_made:
            return
        if not _is_of_client(code) or _discards_interrupts(frame):
            return
        place = id(code), frame.f_lasti, event
        count = self._counts[place] = self._counts.get(place, 0) + 1
        if count > PASSES:
            return
        key = *place, count
        if self.interrupts == self._walks_from and key not in self._met:
            self._met[key] = Point(code, frame.f_lasti, event, count)
        if self.interrupts < len(self._targets) and key == self._targets[self.interrupts]:
            self.interrupts += 1
            self._counts = {}
            raise KeyboardInterrupt


def _is_of_client(code: CodeType) -> bool:
    file = code.co_filename
    is_ours = _OF_CLIENT.get(file)
    if is_ours is None:
        is_ours = _OF_CLIENT[file] = file.startswith(gpulease.__path__[0])
    return is_ours and code is not _ENTERED


def _discards_interrupts(frame: FrameType | None) -> bool:
    """Whether one of the operation's running functions is of IGNORED_FUNCTIONS, or runs finalizers."""
    while frame is not None and frame.f_code is not _RUN:
        code = frame.f_code
        if code is _FINALIZER or (code.co_name in IGNORED_FUNCTIONS and _is_of_client(code)):
            return True
        frame = frame.f_back
    return False


_RUN = InterruptPoints._run.__code__
"""The caller of the operation. Frames above it belong to the test."""
