"""Losses of a whole engine: which errors say so, who is suspected of them, and when the next engine is asked for. Pure.

Another engine is asked for as long as the decoder is open, whatever refuses it: a daemon that is away comes back, and
an operator gives what a daemon denies. Only the pauses grow, up to a bound.

An error that is not of a known kind is taken for a loss, too. A fault of the context is somebody's. Those who had rows
in the steps under way are computed again in halves: a half that ends an engine is halved anew, and a request that ends
an engine alone is not tried again. A process that was killed from outside blames those alone who were under way, at
the same place, as it was killed once more.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from gpulease.client.core.lease import LEASE_OVER
from gpulease.client.errors import GpuLeaseError, GpuSessionFailed, SyncFailed, error_class
from gpulease.protocol.back_off import back_off_s

LEASE_ENDS: Final = tuple(error_class(status) for status in LEASE_OVER)
"""Errors that say that the lease is over: nothing that was computed is the cause."""

CONTEXT_FAULTS: Final = (GpuSessionFailed, SyncFailed)
"""Errors that say that the context is lost: something that was computed may be the cause."""

FIRST_PAUSE_S: Final = 0.1
"""Pause in seconds behind the first attempt to open an engine or a region; it doubles with each that follows."""

MAX_PAUSE_S: Final = 5.0
"""Longest pause in seconds between two attempts, so that a daemon that is back is used soon."""

MAX_PAUSE_OF_LOSSES_S: Final = 60.0
"""Longest pause in seconds before an engine that follows losses in a row: each of them has loaded the model."""

LASTED_S: Final = 60.0
"""Seconds after which an engine counts as one that works, though nobody had anything computed."""

TRIES_LOGGED: Final = 8
"""The first tries to open an engine that are logged, each of them."""

TRIES_A_LINE: Final = 12
"""Tries that one line stands for behind those: a minute of them."""

REPLAY_WAIT_S: Final = 300.0
"""Seconds for which requests that lost their engine wait for another: callers must not wait for ever."""


def is_known(error: BaseException) -> bool:
    """Return whether an error is of a kind that says that the engine is lost."""
    return isinstance(error, LEASE_ENDS + CONTEXT_FAULTS)


def is_kill(error: BaseException) -> bool:
    """Return whether the context's process was killed from outside, as far as the daemon knows."""
    return isinstance(error, GpuLeaseError) and error.failure.is_kill


def is_fault(error: BaseException) -> bool:
    """Return whether what was computed may be the cause of a loss."""
    return not isinstance(error, LEASE_ENDS) and not is_kill(error)


def pause_s(attempt: int) -> float:
    """Return the pause in seconds behind an attempt, counted from 0."""
    return back_off_s(attempt, FIRST_PAUSE_S, MAX_PAUSE_S)


def pause_before_engine_s(losses: int) -> float:
    """Return the pause in seconds before an engine is asked for, by the losses without a step between: 1, 2, ..."""
    return 0.0 if losses <= 1 else back_off_s(losses - 2, FIRST_PAUSE_S, MAX_PAUSE_OF_LOSSES_S)


def is_logged(tries: int) -> bool:
    """Return whether this try in a row, counted from 1, to open an engine or a region is logged."""
    return tries <= TRIES_LOGGED or tries % TRIES_A_LINE == 0


class Suspects:
    """Requests that may have ended an engine, by their callers' ids, in groups that are computed one after another.

    Attributes:
        current: The group that is computed now, and nobody else; empty if there is none.
    """

    def __init__(self) -> None:
        self.current: tuple[str, ...] = ()
        self._groups: deque[tuple[str, ...]] = deque()
        self._killed_at: Mapping[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self.current or self._groups)

    @property
    def count(self) -> int:
        """How many are suspected."""
        return len(self.current) + sum(map(len, self._groups))

    def fault(self, under_way: Iterable[str]) -> str:
        """Take a loss that one of those who had rows under way may have caused.

        Returns the one who is to be given up, because it was computed alone; "" if there is none.
        """
        current, self.current = self.current, ()
        blamed = list(under_way)
        if current:
            innocent = tuple(name for name in current if name not in blamed)
            blamed = [name for name in current if name in blamed]
            if innocent:
                self._groups.append(innocent)
            if len(blamed) == len(current) == 1:
                return blamed[0]
        else:
            suspected = {name for group in self._groups for name in group}
            blamed = [name for name in blamed if name not in suspected]
        middle = -(-len(blamed) // 2)
        self._groups.extendleft(filter(None, (tuple(blamed[middle:]), tuple(blamed[:middle]))))
        return ""

    def killed(self, tokens: Mapping[str, int], most: int) -> list[str]:
        """Take a kill from outside, with the tokens emitted so far by those who had rows under way.

        Returns those who were under way at the kill before this one, too, and have not emitted `most` tokens since: a
        kill for want of memory may be a request's fault.
        """
        before, self._killed_at = self._killed_at, dict(tokens)
        return [name for name, count in tokens.items() if name in before and count < before[name] + most]

    def put_off(self, names: Iterable[str]) -> None:
        """Let members of the current group wait for a later turn."""
        if waiting := tuple(names):
            self.current = tuple(name for name in self.current if name not in waiting)
            self._groups.append(waiting)

    def has_next(self, is_ready: Callable[[str], bool]) -> bool:
        """Return whether anybody who is ready waits for a turn."""
        return any(is_ready(name) for group in self._groups for name in group)

    def next(self, is_ready: Callable[[str], bool] = bool) -> tuple[str, ...]:
        """Go on with those of the next group who are ready, and return them; nobody if no group has any.

        The others of the group keep a place of their own.
        """
        self.current = ()
        for place, group in enumerate(self._groups):
            if ready := tuple(filter(is_ready, group)):
                del self._groups[place]
                if left := tuple(name for name in group if name not in ready):
                    self._groups.insert(place, left)
                self.current = ready
                break
        return self.current
