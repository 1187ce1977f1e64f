"""Runs procedures in the calling task: the event loop for sockets and pauses, an asyncio lock for taking turns."""

import asyncio
from _thread import start_new_thread
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager, suppress
from types import TracebackType
from typing import Any, Final, Literal, TypeVar

from gpulease.client.core.exchange import GrantCleanUp, ask_once
from gpulease.client.core.lease_request import address_of
from gpulease.client.core.waits import Locked, MaybePending, Procedure, Sleep, Step, Wait
from gpulease.client.errors import GpuLeaseError, InvalidRequest
from gpulease.client.sync.driver import due, settle
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Body

T = TypeVar("T")
R = TypeVar("R")
C = TypeVar("C", bound=AbstractAsyncContextManager[Any])

MAX_WAIT_S: Final = 3600.0
"""Longest single wait, in seconds; a longer one waits again. Selectors accept no more than 24 days."""

_tasks_in_progress: Final[set["asyncio.Future[Any]"]] = set()
"""Operations in progress. The event loop itself holds tasks by weak references only."""


async def drive(procedure: Procedure[T]) -> T:
    """Run a procedure to its end in this task and return its result.

    The traceback of an error starts here: the procedure's frames do not help the caller, and would keep their locals
    alive.
    """
    try:
        # A procedure yields each wait; the driver sends it the result of the wait, or raises the wait's error in it.
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


async def drive_with_clean_up(clean_up: GrantCleanUp, procedure: Procedure[T], make_result: Callable[[T], R]) -> R:
    """Drive a procedure and return `make_result(result)`.

    If the call is interrupted, a thread runs its clean-up; a task could not, because the event loop may be ending. The
    clean-up uses a separate connection, which the loop does not use.
    """
    try:
        result = make_result(await drive(procedure))
        clean_up.is_settled = True
        return result
    except GpuLeaseError:
        clean_up.is_settled = True
        raise
    except BaseException:
        # No interrupt can come between these statements: see `core.clean_ups`.
        due[clean_up] = None
        clean_up.is_due = True
        start_new_thread(settle, (clean_up,))
        raise


async def ask(op: Opcode, body: Body, address: str | None = None) -> Any:
    """Send one control request over a separate connection; return the body of the reply.

    Args:
        op: The opcode.
        body: The body of the request.
        address: The daemon's address; GPULEASE_ADDRESS or the default socket if None.

    Raises the error in the daemon's reply, Disconnected or TimedOut.
    """
    return await drive(ask_once(address_of(address), op, body))


class LoopLock(asyncio.Lock):
    """A lock for the tasks of one event loop: the loop that used it last, unless that one no longer runs."""

    _loop: asyncio.AbstractEventLoop | None

    def __init__(self) -> None:
        super().__init__()
        self._user: asyncio.AbstractEventLoop | None = None
        with suppress(RuntimeError):  # the lock is made outside of a loop
            self._user = asyncio.get_running_loop()

    async def acquire(self) -> Literal[True]:
        """Acquire the lock. Raises InvalidRequest while the lock belongs to another loop, which runs."""
        loop = asyncio.get_running_loop()
        if loop is not self._user:
            # A task of this loop would never be woken by a task of the other one, which runs in another thread.
            if self._user is not None and self._user.is_running():
                raise InvalidRequest(
                    "a lease or session of gpulease.client.aio can be used in only one event loop at a time",
                    "Use it in the loop of the thread that opened it, for example with "
                    "asyncio.run_coroutine_threadsafe, or acquire another lease in this one",
                )
            self._user = loop
            # asyncio remembers the loop in which a task first waited, and refuses every other one.
            self._loop = None
        return await super().acquire()


class ConnectionLock(LoopLock):
    """A connection's lock, which also lists the operations that continue although their callers were cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self._abandoned: set[asyncio.Task[Any]] = set()

    def abandon(self, task: asyncio.Task[Any]) -> None:
        """Keep a task, after its caller was cancelled, until it ends."""
        # Refer to the task here, because the event loop itself keeps only weak references to tasks.
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)

    async def wait_for_abandoned(self) -> None:
        """Wait until all abandoned tasks have ended and the objects that they created were given back."""
        # A task that ends may start another task, which releases its result: check again.
        while self._abandoned:
            await asyncio.wait(self._abandoned)


async def undisturbed(
    work: Coroutine[Any, Any, T],
    give_back: Callable[[T], Coroutine[Any, Any, None]] | None = None,
    lock: ConnectionLock | None = None,
) -> T:
    """Run a coroutine in a task that continues to its end if the caller is cancelled; return its result.

    The wire has no way to withdraw a request: its reply must be read before the connection can be used again.

    Args:
        work: The coroutine.
        give_back: Gives the result back if the caller was cancelled before it came; None if dropping it is enough.
        lock: Keeps the task that continues after its caller was cancelled; None if closing the connection ends the
            task.
    """
    # The result goes through a list, which survives the cancellation of either task.
    results: list[T] = []
    task = _start_task(_store_result(work, results))
    try:
        # Because of shield(), cancelling the caller ends the wait, but not the task.
        await asyncio.shield(task)
        return results.pop()
    # The caller no longer waits. The task's result must be given back, or dropped with the task.
    except asyncio.CancelledError:
        _abandon(task, None if give_back is None else _give_back_when_done(task, results, give_back), lock)
        raise
    except GpuLeaseError as error:
        raise error.with_traceback(None)  # noqa: B904  # the same error, without the task's frames
    finally:
        # Break a cycle: the task refers to the error, whose traceback refers to this frame. Otherwise a dropped lease
        # would wait for the garbage collector.
        del task, results


def _start_task(work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    task = task_of(work)
    _tasks_in_progress.add(task)
    task.add_done_callback(_on_task_end)
    return task


async def _store_result(work: Coroutine[Any, Any, T], results: list[T]) -> None:
    # A task that is cancelled after its last wait loses its result, so store that in the list.
    results.append(await work)


def _abandon(
    task: "asyncio.Task[None]", giving_back: Coroutine[Any, Any, None] | None, lock: ConnectionLock | None
) -> None:
    # This is a separate function, so that the frame that raises refers to no task, and so to no result that should be
    # dropped.
    clean_up = task if giving_back is None else _start_task(giving_back)
    if lock is not None:
        lock.abandon(clean_up)


async def _give_back_when_done(
    making: "asyncio.Task[None]", results: list[T], give_back: Callable[[T], Coroutine[Any, Any, None]]
) -> None:
    while not making.done():
        # When the event loop closes, it cancels this task and `making`. Ignore that here: `making` then ends anyway.
        with suppress(asyncio.CancelledError):
            await asyncio.wait((making,))
    # The operation finished after its caller was cancelled.
    if results:
        await give_back(results.pop())


def _on_task_end(task: "asyncio.Task[Any]") -> None:
    _tasks_in_progress.discard(task)
    if not task.cancelled():
        # Retrieve the exception. Otherwise the loop logs it as never retrieved, although the caller was cancelled on
        # purpose.
        task.exception()


async def drive_holding(lock: asyncio.Lock, procedure: Procedure[T]) -> T:
    """Drive a procedure under a lock that the caller has acquired, then release the lock."""
    try:
        return await drive(procedure)
    finally:
        lock.release()


async def drive_at_once(lock: asyncio.Lock, operation: Callable[[], MaybePending[T]]) -> T:
    """Try an operation under the lock. If it has to wait, it becomes a task, which keeps the lock until it ends."""
    await lock.acquire()
    remaining: Procedure[T] | None = None
    try:
        result = operation()
        if not isinstance(result, Generator):
            return result
        remaining = result
    finally:
        if remaining is None:
            lock.release()
    return await undisturbed(drive_holding(lock, remaining))


def task_of(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Make a task of a coroutine. Once the task is cancelled, it no longer refers to the coroutine."""
    task = asyncio.get_running_loop().create_task(_forgetting(work))
    # A task that is cancelled before its first step never starts `work`, and Python would warn that it was never
    # awaited.
    task.add_done_callback(lambda _: work.close())
    return task


class AsyncOpening(Coroutine[Any, Any, C]):
    """A lease, session, region or stream that is being opened: `await` returns it; `async with` also closes it."""

    def __init__(self, work: Coroutine[Any, Any, C]) -> None:
        self._work = work
        self._opened: C

    def __await__(self) -> Generator[Any, Any, C]:
        return self._work.__await__()

    def send(self, value: Any) -> Any:
        """Advance the coroutine, for a task made of this object."""
        return self._work.send(value)

    def throw(self, *error: Any) -> Any:
        """Raise an error in the coroutine where it waits, for a task made of this object."""
        return self._work.throw(*error)

    def close(self) -> None:
        """Give up before the object was opened: closes the coroutine."""
        self._work.close()

    async def __aenter__(self) -> C:
        self._opened = await self._work
        return await self._opened.__aenter__()  # type: ignore[no-any-return]  # each returns itself

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._opened.__aexit__(kind, error, trace)


async def _forgetting(work: Coroutine[Any, Any, T]) -> T:
    # From Python 3.12 on, a cancelled task keeps its CancelledError, and with it the traceback. The traceback refers to
    # frames of the operation, and so to the lease. It also refers to frames of the loop that cancels its tasks as it
    # closes, and so to the task. This cycle would keep the lease.
    try:
        return await work
    except asyncio.CancelledError as error:
        raise error.with_traceback(None)  # noqa: B904  # the same error, with the frames from here on


async def _wait(step: Wait) -> bool:
    # The channel checks again before it sleeps, because bytes may have come since the procedure decided to wait.
    if not step.channel.doze(for_room=step.for_room):
        return True
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[bool] = loop.create_future()
    fd = step.channel.sock.fileno()
    watches_room = step.for_room and step.channel.waits_for_room
    timer = loop.call_later(min(step.timeout_s, MAX_WAIT_S), _wake, ready, False)
    # The future is resolved by the first of these: bytes come, there is room, or the time is over.
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
    # Several of these may happen in the same round of the loop.
    if not ready.done():
        ready.set_result(has_room_or_bytes)


async def _sleep(step: Sleep) -> None:
    # asyncio's pause can be cancelled, so it needs no event.
    await asyncio.sleep(step.seconds)


async def _locked(step: Locked) -> Any:
    # The task that holds the lock drives the inner procedure to its end.
    async with step.lock:
        return await drive(step.procedure)


_WAIT_BY_STEP: Final[dict[type[Step], Callable[[Any], Awaitable[Any]]]] = {Wait: _wait, Sleep: _sleep, Locked: _locked}
