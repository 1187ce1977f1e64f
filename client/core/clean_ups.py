"""Clean-ups: procedures that give back what an interrupted call has made, and that a second interrupt must not stop.

A user who presses Ctrl-C twice, or a program that cancels a task twice, interrupts the clean-up after the first
interrupt. What it has not given back by then would leak.
"""

import inspect
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, TypeVar

from gpulease.client.core.waits import Locked, Procedure, Step, Wait, is_held

T = TypeVar("T")

CLEAN_UP_S: Final = 2.0
"""Longest time for which a clean-up defers an interrupt, in seconds. A clean-up takes milliseconds if the daemon
answers; a daemon that hangs must not make Ctrl-C useless."""


def clean_up(work: Procedure[T], clock: Callable[[], float] = time.monotonic) -> Procedure[T]:
    """Drive a clean-up to its end even if it is interrupted; then raise the last interrupt.

    Interrupts are KeyboardInterrupt, CancelledError, SystemExit and the like. They are deferred until CLEAN_UP_S
    seconds after the start; an interrupt while waiting for a lock that another thread or task holds is not deferred.

    Args:
        work: The clean-up. A wait that is interrupted ends early, so it must check again what it waits for.
        clock: The monotonic time in seconds.
    """
    interrupts: list[BaseException] = []
    try:
        # Interrupts are collected while the clean-up runs; the last one is what the user wanted most recently.
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
        # Resume the clean-up with the outcome of its last step, or with the error of that step.
        try:
            step = work.send(answer) if thrown is None else work.throw(thrown)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            answer = thrown = None  # an error that this frame refers to would keep the frame alive
        # The procedure inside a lock is protected in the same way. Its result is stored here, so that it survives an
        # interrupt while the lock is released.
        results: list[Any] = []
        inner: Procedure[None] | None = None
        lock: Any = None
        if isinstance(step, Locked):
            lock, inner = step.lock, _into(results, _going_on(step.procedure, interrupts, until, clock))
            step = Locked(lock, inner)
        while True:
            # Wait for this step. After an interrupt, wait again, but no longer than the time that is left.
            left_s = until - clock()
            if interrupts and left_s <= 0:
                thrown = interrupts[-1]
                break
            try:
                # Without an interrupt the step waits as long as the clean-up wants; after one, only for the time that
                # is left.
                answer = yield (_at_most(step, left_s) if interrupts else step)
            except (Exception, GeneratorExit) as failure:
                thrown = failure  # the wait itself failed: the procedure handles it
            except BaseException as interrupt:
                # Three cases in which the interrupt can't be deferred: the locked procedure was cut off in the middle,
                # the time is over, or another thread or task holds the lock, perhaps forever.
                is_new = inner is not None and inspect.getgeneratorstate(inner) is inspect.GEN_CREATED
                is_lost = inner is not None and not is_new and not results
                if is_lost or clock() >= until or (is_new and is_held(lock)):
                    thrown = interrupt
                else:
                    interrupts.append(interrupt)
                    if is_new:
                        continue  # the lock was not acquired yet: wait for it again
            # The locked procedure ended, and its result was stored, even if the lock's release was interrupted after
            # that.
            if results:
                answer = results[0]
            break


def _into(results: list[Any], work: Procedure[Any]) -> Procedure[None]:
    results.append((yield from work))


def _at_most(step: Step, seconds: float) -> Step:
    # A wait for a lock has no limit of its own: the loop above decides about it.
    if isinstance(step, Locked):
        return step
    if isinstance(step, Wait):
        return replace(step, timeout_s=min(step.timeout_s, seconds))
    return replace(step, seconds=min(step.seconds, seconds))
