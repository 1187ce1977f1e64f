"""What an interrupted call owes: the lease, region or connection that it may have made and that nothing refers to.

Theory of operation. Ctrl-C raises KeyboardInterrupt at almost any call of the main thread, and a second Ctrl-C
interrupts whatever runs after the first. So an interrupted call cleans nothing up itself. Before a request leaves, its
call notes in an `Owed` what the request may make. The handler of an interrupt only marks that as due and starts a
thread, which no Ctrl-C reaches (`sync.clean_ups`). Python looks for signals where a function begins, where a loop goes
round and after a call, so nothing can come between these statements.

A thread must not use an event loop's connection. So what a cancelled task has asked for on a lease's own connection is
settled by the lease's next request.
"""

from typing import Final, TypeVar

from gpulease.client.core.waits import Procedure
from gpulease.client.errors import GpuLeaseError

T = TypeVar("T")

CLEAN_UP_S: Final = 2.0
"""Longest time for a step of a clean-up, in seconds, and for which a program's end waits for clean-ups. They take
milliseconds if the daemon answers."""


class Owed:
    """What has to be given back if the call that makes it is interrupted.

    Attributes:
        is_due: The call was interrupted, and what it made was not given back yet.
        is_settled: Nothing is owed any more: the program has what was made, or it was given back.
    """

    def __init__(self) -> None:
        self.is_due = False
        self.is_settled = False

    def settle(self) -> Procedure[None]:
        """Give it back if that is due. Raises nothing but an interrupt, after which it is due again."""
        if not self.is_due:
            return
        # Not due while this runs: giving back sends requests, and a lease's request settles what is due.
        self.is_due = False
        try:
            yield from self._give_back()
            self.is_settled = True
        except BaseException:
            self.is_due = True
            raise

    def _give_back(self) -> Procedure[None]:
        raise NotImplementedError


def owing(owed: Owed, procedure: Procedure[T]) -> Procedure[T]:
    """Drive a procedure; if it is interrupted, what it owes is due."""
    try:
        result = yield from procedure
        owed.is_settled = True
        return result
    except GpuLeaseError:
        owed.is_settled = True
        raise
    except BaseException:
        owed.is_due = True
        raise
