"""The threads of an event loop's blocking calls, such as reading a card or a file.

The daemon starts all threads that it will ever need when it starts. A host may refuse more later (setrlimit(2),
RLIMIT_NPROC; a control group's pids.max). Then the daemon could not read a card during leases: it would check no
session's memory and prove no memory free.

For each call the standard library's pool makes a second future, with a lock, and its threads take turns, so that a call
runs on a thread whose memory has left the processor's caches. This pool makes only the loop's future, and gives a call
to the thread that became idle last. A call then takes about half of the processor time. The broker makes two or three
for each lease.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from gpulease.daemon.host.processes import NoThread, start_thread

POOL_THREADS: Final = 32
"""Number of threads for calls that block: reading cards and files. Concurrent readers share one listing of a card's
processes, so a listing that hangs occupies one thread."""

STACK_BYTES: Final = 1 << 20
"""Stack of each thread: 32 MiB in total. With the usual 8 MiB, a host that does not overcommit would count 256 MiB."""

_Call = tuple["asyncio.Future[Any]", Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A call's future, its function, and the function's arguments."""


class LoopThreadPool(ThreadPoolExecutor):
    """A pool for the default executor of one event loop. All its threads run from the start. Raises NoThread.

    The event loop accepts a future of its own from `submit` as it is (`asyncio.wrap_future`).

    Args:
        size: Number of threads.
    """

    def __init__(self, size: int = POOL_THREADS) -> None:
        # The base class starts threads only in its own `submit`.
        super().__init__(size, "gpulease-look")
        # `_lock` guards the idle threads, the calls that wait for one, and `_is_closed`.
        self._lock = threading.Lock()
        self._idle: list[_PoolThread] = []
        self._waiting: deque[_Call] = deque()
        self._is_closed = False
        # Results on their way to the loop, and whether the loop will take them soon.
        self._results: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._is_delivery_due = False
        self._pool_threads: list[_PoolThread] = []
        # The size applies to threads that are started from now on, so it is reset afterwards.
        usual_bytes = threading.stack_size(STACK_BYTES)
        try:
            for number in range(size):
                thread = _PoolThread(self, f"gpulease-look_{number}")
                start_thread(thread)
                self._pool_threads.append(thread)
                self._idle.append(thread)
        except NoThread:
            self.shutdown()
            raise
        finally:
            threading.stack_size(usual_bytes)

    # The base class returns a future of `concurrent.futures`.
    def submit(  # type: ignore[override]
        self, function: Callable[..., Any], /, *arguments: Any, **named: Any
    ) -> "asyncio.Future[Any]":
        """Call a function in a thread. Call this in the running loop's thread, always with the same loop."""
        future = asyncio.get_running_loop().create_future()
        call = future, function, arguments, named
        with self._lock:
            if self._is_closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            if not self._idle:
                self._waiting.append(call)
                return future
            thread = self._idle.pop()
        thread.begin(call)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads once they have made all calls that were submitted."""
        with self._lock:
            self._is_closed = True
            if cancel_futures:
                self._waiting.clear()
            idle, self._idle = self._idle, []
        for thread in idle:
            thread.begin(None)
        if wait:
            for thread in self._pool_threads:
                thread.join()

    # --- called by the threads ---

    def next_call(self, thread: "_PoolThread") -> _Call | None:
        """Return a call that waits. Without one, the thread is idle, or must end if the pool is closed."""
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            if self._is_closed:
                thread.has_ended = True
            else:
                self._idle.append(thread)
            return None

    def deliver(self, future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
        """Pass a call's result to the loop."""
        self._results.append((future, result, error))
        # The loop clears this before it takes the results, so it can't miss one that was appended before this test.
        if not self._is_delivery_due:
            self._is_delivery_due = True
            # If the loop is closed, nothing waits for the result.
            with contextlib.suppress(RuntimeError):
                future.get_loop().call_soon_threadsafe(self._set_results)

    # --- called by the loop ---

    def _set_results(self) -> None:
        self._is_delivery_due = False
        while self._results:
            future, result, error = self._results.popleft()
            # The caller may have been cancelled during the call.
            if future.done():
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)


class _PoolThread(threading.Thread):
    """A thread of the pool, which waits for its next call.

    Attributes:
        has_ended: Whether the thread makes no more calls.
    """

    def __init__(self, pool: LoopThreadPool, name: str) -> None:
        # Interpreter exit does not wait for daemon threads, so a driver that hangs can't prevent it.
        super().__init__(name=name, daemon=True)
        self.has_ended = False
        self._pool = pool
        self._call: _Call | None = None
        # Held while the thread has no call to make.
        self._bell = threading.Lock()
        self._bell.acquire()

    def begin(self, call: _Call | None) -> None:
        """Wake the idle thread to make a call; None ends the thread."""
        self._call = call
        self._bell.release()

    def run(self) -> None:
        while not self.has_ended:
            self._bell.acquire()
            call, self._call = self._call, None
            if call is None:
                return
            while call is not None:
                self._make(*call)
                # Drop the call's objects before the next wait, which may be long.
                call = self._pool.next_call(self)

    def _make(
        self,
        future: "asyncio.Future[Any]",
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        named: dict[str, Any],
    ) -> None:
        if future.cancelled():
            return
        try:
            result, error = function(*arguments, **named), None
        except BaseException as raised:
            result, error = None, raised
        self._pool.deliver(future, result, error)
