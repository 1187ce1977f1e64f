"""Clean-ups: procedures that give back what an interrupted call has made, which another interrupt must not stop.

Who presses Ctrl-C twice, or cancels a task twice, interrupts the clean-up of the first time. What that has not given
back yet would be left.
"""

import inspect
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, TypeVar

from gpulease.client.core.waits import Locked, Procedure, Step, Wait, is_held

T = TypeVar("T")

CLEAN_UP_S: Final = 2.0
"""Longest that a clean-up puts an interrupt off, in seconds. It takes milliseconds where the daemon answers; a daemon
that hangs must not make Ctrl-C useless."""


def clean_up(work: Procedure[T], clock: Callable[[], float] = time.monotonic) -> Procedure[T]:
    """Drive a clean-up to its end although it is interrupted; the last interrupt is raised then.

    Interrupts are KeyboardInterrupt, CancelledError, SystemExit and their like. They are put off until CLEAN_UP_S
    seconds after the begin, and not at all where somebody else holds the lock that is waited for.

    Args:
        work: The clean-up. A wait that is interrupted ends early, so it looks again at what it waits for.
        clock: The time in seconds.
    """
    interrupts: list[BaseException] = []
    try:
        result = yield from _going_on(work, interrupts, clock() + CLEAN_UP_S, clock)
        if interrupts:
            raise interrupts[-1]
        return result
    finally:
        interrupts.clear()


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
        lock: Any = None
        if isinstance(step, Locked):
            lock, inner = step.lock, _into(results, _going_on(step.procedure, interrupts, until, clock))
            step = Locked(lock, inner)
        while True:
            left_s = until - clock()
            if interrupts and left_s <= 0:
                thrown = interrupts[-1]
                break
            try:
                answer = yield (_at_most(step, left_s) if interrupts else step)
            except (Exception, GeneratorExit) as failure:
                thrown = failure  # of what was waited for
            except BaseException as interrupt:
                is_new = inner is not None and inspect.getgeneratorstate(inner) is inspect.GEN_CREATED
                is_lost = inner is not None and not is_new and not results
                if is_lost or clock() >= until or (is_new and is_held(lock)):
                    thrown = interrupt
                else:
                    interrupts.append(interrupt)
                    if is_new:
                        continue  # for the lock
            if results:
                answer = results[0]
            break


def _into(results: list[Any], work: Procedure[Any]) -> Procedure[None]:
    results.append((yield from work))


def _at_most(step: Step, seconds: float) -> Step:
    if isinstance(step, Locked):
        return step
    if isinstance(step, Wait):
        return replace(step, timeout_s=min(step.timeout_s, seconds))
    return replace(step, seconds=min(step.seconds, seconds))
