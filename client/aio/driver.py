"""The asyncio face's driver: it waits by the event loop for sockets and pauses, by asyncio's lock for turns."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager, suppress
from types import TracebackType
from typing import Any, Final, TypeVar

from gpulease.client.core.exchange import CONTROL_REPLY_LIMIT_S, ask_once
from gpulease.client.core.lease_request import address_of
from gpulease.client.core.waits import Locked, Procedure, Sleep, Step, Wait
from gpulease.client.errors import GpuLeaseError
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Body

T = TypeVar("T")
C = TypeVar("C", bound=AbstractAsyncContextManager[Any])

MAX_WAIT_S: Final = 3600.0
"""Longest single wait; a longer one waits again. A selector takes no more than 24 days."""

_undisturbed: Final[set["asyncio.Future[Any]"]] = set()
"""Operations under way: the event loop itself holds tasks by weak references only."""


async def drive(procedure: Procedure[T]) -> T:
    """Run a procedure to its end in this task. The traceback of what it raises begins here."""
    try:
        step = procedure.send(None)
        while True:
            try:
                answer = await _WAIT_BY_STEP[type(step)](step)
            except BaseException as error:
                step = procedure.throw(error)
            else:
                step = procedure.send(answer)
    except StopIteration as done:
        result: T = done.value
        return result
    except GpuLeaseError as error:
        raise error.with_traceback(None)  # noqa: B904  # the same error, without the procedure's frames


async def ask(op: Opcode, body: Body, address: str | None = None) -> Any:
    """Ask one control request over a connection of its own; returns the reply's body."""
    return await drive(ask_once(address_of(address), op, body, CONTROL_REPLY_LIMIT_S))


class ConnectionLock(asyncio.Lock):
    """The lock of a connection, which also knows the operations on it that go on though their callers are gone."""

    def __init__(self) -> None:
        super().__init__()
        self._abandoned: set[asyncio.Task[Any]] = set()

    def abandon(self, task: asyncio.Task[Any]) -> None:
        """Count a task in until it ends."""
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)

    async def wait_for_abandoned(self) -> None:
        """Wait until all of them have ended, and what they made is given back."""
        while self._abandoned:
            await asyncio.wait(self._abandoned)


async def undisturbed(
    work: Coroutine[Any, Any, T],
    give_back: Callable[[T], Coroutine[Any, Any, None]] | None = None,
    lock: ConnectionLock | None = None,
) -> T:
    """Run a coroutine in a task of its own, which goes on to its end if the caller is cancelled.

    Args:
        work: The coroutine.
        give_back: Gives its result back where nobody gets that any more; None if it takes no more than being dropped.
        lock: Counts what goes on behind the cancelled caller; None: the connection's end ends it.
    """
    made: list[T] = []
    task = _kept(_noted(work, made))
    try:
        await asyncio.shield(task)
        return made.pop()
    except asyncio.CancelledError:
        _abandon(task, None if give_back is None else _given_back(task, made, give_back), lock)
        raise
    except GpuLeaseError as error:
        raise error.with_traceback(None)  # noqa: B904  # the same error, without the task's frames
    finally:
        # The task has the error, whose traceback has this frame: a cycle, and a dropped lease would wait for the gc.
        del task, made


def _kept(work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    task = task_of(work)
    _undisturbed.add(task)
    task.add_done_callback(_end_undisturbed)
    return task


async def _noted(work: Coroutine[Any, Any, T], made: list[T]) -> None:
    # A task that is cancelled behind its last wait forgets what it has made.
    made.append(await work)


def _abandon(
    task: "asyncio.Task[None]", giving_back: Coroutine[Any, Any, None] | None, lock: ConnectionLock | None
) -> None:
    # A function of its own: the frame that raises keeps no task, and so no result that is to be dropped.
    left = task if giving_back is None else _kept(giving_back)
    if lock is not None:
        lock.abandon(left)


async def _given_back(
    making: "asyncio.Task[None]", made: list[T], give_back: Callable[[T], Coroutine[Any, Any, None]]
) -> None:
    while not making.done():
        # The loop's end cancels both: what is being made notices, and ends.
        with suppress(asyncio.CancelledError):
            await asyncio.wait((making,))
    if made:
        await give_back(made.pop())


def _end_undisturbed(task: "asyncio.Task[Any]") -> None:
    _undisturbed.discard(task)
    if not task.cancelled():
        # Asked for here, or the loop would log an error that nobody is left to hear: the caller was cancelled.
        task.exception()


async def drive_holding(lock: asyncio.Lock, procedure: Procedure[T]) -> T:
    """Drive a procedure whose caller has acquired the lock for it, so that nothing gets between; then release it."""
    try:
        return await drive(procedure)
    finally:
        lock.release()


def task_of(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task of the coroutine; cancelled, at whatever moment, the task keeps nothing of it."""
    task = asyncio.get_running_loop().create_task(_forgetting(work))
    # A task that is cancelled before its first step never gets as far as `work`, which would be warned of then.
    task.add_done_callback(lambda _: work.close())
    return task


class Opening(Coroutine[Any, Any, C]):
    """A lease, session or stream that opens: `await` returns it, and `async with` leaves it with the block."""

    def __init__(self, work: Coroutine[Any, Any, C]) -> None:
        self._work = work
        self._opened: C

    def __await__(self) -> Generator[Any, Any, C]:
        return self._work.__await__()

    def send(self, value: Any) -> Any:
        """Advance, for a task that was made of this."""
        return self._work.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise an error where this waits, for a task that was made of it."""
        return self._work.throw(*error)

    def close(self) -> None:
        """Give up before anything has opened."""
        self._work.close()

    async def __aenter__(self) -> C:
        self._opened = await self._work
        return await self._opened.__aenter__()  # type: ignore[no-any-return]  # each returns itself

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._opened.__aexit__(kind, error, trace)


async def _forgetting(work: Coroutine[Any, Any, T]) -> T:
    # From 3.12 on a cancelled task keeps its CancelledError, and the error keeps its traceback. That has frames of the
    # operation, with the lease, and frames of the loop that cancels its tasks as it ends, with the task. So it is a
    # cycle, which would keep the lease.
    try:
        return await work
    except asyncio.CancelledError as error:
        raise error.with_traceback(None)  # noqa: B904  # the same error, with the frames from here on


async def _wait(step: Wait) -> bool:
    if not step.channel.doze(for_room=step.for_room):
        return True
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[bool] = loop.create_future()
    fd = step.channel.sock.fileno()
    watches_room = step.for_room and step.channel.waits_for_room
    timer = loop.call_later(min(step.timeout_s, MAX_WAIT_S), _wake, ready, False)
    loop.add_reader(fd, _wake, ready, True)
    if watches_room:
        loop.add_writer(fd, _wake, ready, True)
    try:
        return await ready
    finally:
        timer.cancel()
        loop.remove_reader(fd)
        if watches_room:
            loop.remove_writer(fd)


def _wake(ready: "asyncio.Future[bool]", has_room_or_bytes: bool) -> None:
    if not ready.done():
        ready.set_result(has_room_or_bytes)


async def _sleep(step: Sleep) -> None:
    await asyncio.sleep(step.seconds)


async def _locked(step: Locked) -> Any:
    async with step.lock:
        return await drive(step.procedure)


_WAIT_BY_STEP: Final[dict[type[Step], Callable[[Any], Awaitable[Any]]]] = {Wait: _wait, Sleep: _sleep, Locked: _locked}
