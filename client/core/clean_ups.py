"""Clean-up after an interrupted call: free the lease, region or connection that it may have made but not returned.

Theory of operation. Ctrl-C raises KeyboardInterrupt at almost any call of the main thread, and a second Ctrl-C
interrupts whatever runs after the first. So an interrupted call does not clean up itself. Before a request is sent, its
call records in a `CleanUp` what the request may make. The handler of an interrupt only marks it as due and starts a
thread, which no Ctrl-C reaches (`sync.driver`). Python handles signals only at the beginning of a function, at a loop's
next turn and after a call, so no signal can arrive between setting the mark and starting the thread.

A thread must not use an event loop's connection. So if a cancelled task had sent a request on a lease's own connection,
the lease's next request runs the clean-ups that are due.
"""

from typing import Final, TypeVar

from gpulease.client.core.waits import Procedure
from gpulease.client.errors import GpuLeaseError

T = TypeVar("T")

CLEAN_UP_S: Final = 2.0
"""Longest time for a step of a clean-up, in seconds, and longest time for which a program's exit waits for clean-ups.
They take milliseconds if the daemon answers."""


class CleanUp:
    """An object that must be released if the call that makes it is interrupted.

    Attributes:
        is_due: Whether the call was interrupted and the object has not been released yet.
        is_settled: Whether nothing remains to be done: the program has the object, or it was released.
    """

    is_due = False
    is_settled = False

    def settle(self) -> Procedure[None]:
        """Release the object if that is due. Raises only an interrupt, after which the release is due again."""
        if not self.is_due:
            return
        # Reset this first: the release sends requests, and a lease's request runs the clean-ups that are due.
        self.is_due = False
        try:
            yield from self._give_back()
            self.is_settled = True
        except BaseException:
            self.is_due = True
            raise

    def _give_back(self) -> Procedure[None]:
        raise NotImplementedError


def with_clean_up(clean_up: CleanUp, procedure: Procedure[T]) -> Procedure[T]:
    """Run a procedure. If it is interrupted, mark `clean_up` as due."""
    try:
        result = yield from procedure
        clean_up.is_settled = True
        return result
    except GpuLeaseError:
        clean_up.is_settled = True
        raise
    except BaseException:
        clean_up.is_due = True
        raise
