"""Clean-ups: procedures that give back what an interrupted call has made, which another interrupt must not stop.

Who presses Ctrl-C twice, or cancels a task twice, interrupts the clean-up of the first time. What that has not given
back yet would be left.
"""

import inspect
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from gpulease.client.engine.waits import Locked, Procedure

T = TypeVar("T")

CLEAN_UP_S: Final = 2.0
"""Time in which a clean-up puts interrupts off, in seconds. It takes milliseconds where the daemon answers. A daemon
that hangs, or a lock that another thread keeps, must not make Ctrl-C useless."""


def clean_up(work: Procedure[T], clock: Callable[[], float] = time.monotonic) -> Procedure[T]:
    """Drive a clean-up to its end although it is interrupted; the last interrupt is raised then.

    Interrupts are KeyboardInterrupt, CancelledError, SystemExit and their like. One that comes after CLEAN_UP_S seconds
    ends it at once.

    Args:
        work: The clean-up. A wait that is interrupted ends early, so it looks again at what it waits for.
        clock: The time in seconds.
    """
    interrupts: list[BaseException] = []
    result = yield from _going_on(work, interrupts, clock() + CLEAN_UP_S, clock)
    if interrupts:
        try:
            raise interrupts[-1]
        finally:
            interrupts.clear()
    return result


def _going_on(
    work: Procedure[T], interrupts: list[BaseException], until: float, clock: Callable[[], float]
) -> Procedure[T]:
    answer: Any = None
    thrown: BaseException | None = None
    while True:
        try:
            step = work.send(answer) if thrown is None else work.throw(thrown)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            answer = thrown = None  # an error that this frame keeps would keep the frame
        # What is done under a lock goes on as well; its result is here even if the lock's release is interrupted.
        results: list[Any] = []
        inner: Procedure[None] | None = None
        if isinstance(step, Locked):
            inner = _into(results, _going_on(step.procedure, interrupts, until, clock))
        while True:
            try:
                answer = yield (step if inner is None else Locked(step.lock, inner))
            except (Exception, GeneratorExit) as failure:
                thrown = failure  # of what was waited for
            except BaseException as interrupt:
                is_inner_new = inner is not None and inspect.getgeneratorstate(inner) is inspect.GEN_CREATED
                is_inner_lost = inner is not None and not is_inner_new and not results
                if clock() >= until or is_inner_lost:
                    thrown = interrupt
                else:
                    interrupts.append(interrupt)
                    if is_inner_new:
                        continue  # it still waits for the lock
            if results:
                answer = results[0]
            break


def _into(results: list[Any], work: Procedure[Any]) -> Procedure[None]:
    results.append((yield from work))
