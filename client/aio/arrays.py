"""Device arrays of the asyncio API, with awaitable operations."""

from typing import Any, TypeVar

from numpy.typing import NDArray

from gpulease.client.aio.driver import drive, undisturbed
from gpulease.client.aio.streams import Stream
from gpulease.client.core.arrays import Call, Calls, SessionArray, assign, copy, fill, read
from gpulease.client.core.session import SessionView
from gpulease.client.errors import InvalidRequest

T = TypeVar("T")


class Array(SessionArray):
    """An array in a session's device memory; made by `GpuSession.array`, `zeros` and `empty_device`.

    Launches, graphs and kernels accept it as a pointer to its first element. A slice is a view of the same memory.
    Assign to a slice by `await a[key].assign(b)`: `a[key] = b` can't be awaited and raises InvalidRequest.
    """

    __slots__ = ()

    async def numpy(self, stream: Stream | None = None) -> NDArray[Any]:
        """Copy the array into a new numpy array of the same shape and dtype.

        Args:
            stream: The stream to copy in; the default stream if None. The call waits for the copy in either case.
        """
        return await make(self.session, read(self, stream))

    async def copy(self, stream: Stream | None = None) -> "Array":
        """Copy the array into a new, C-contiguous array on the card.

        Args:
            stream: The stream to copy in; the default stream if None.

        Raises AllocFailed if the slice has no room.
        """
        return await make(self.session, copy(self, stream))

    async def fill(self, value: Any, stream: Stream | None = None) -> None:
        """Set every element to one number, converted to the array's dtype.

        Args:
            value: The number.
            stream: The stream to write in; the default stream if None.

        Raises InvalidRequest if the dtype cannot hold the number.
        """
        await make(self.session, fill(self, value, stream))

    async def assign(self, value: Any, stream: Stream | None = None) -> None:
        """Copy numbers, a numpy array or a device array into this array, broadcast to its shape by numpy's rules.

        Args:
            value: Numbers are converted to this array's dtype; an array must have the same dtype already.
            stream: The stream to copy in; the default stream if None.

        Raises InvalidRequest if dtype or shape do not fit.
        """
        await make(self.session, assign(self, value, stream))

    def __setitem__(self, key: Any, value: Any) -> None:
        # An assignment is a statement: nothing could await the copy.
        raise InvalidRequest("a[key] = b can't be awaited", "Use await a[key].assign(b)")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        raise InvalidRequest("numpy can't await an array on the card", "Use await a.numpy()")


async def make(session: SessionView, calls: Calls[T]) -> T:
    """Execute an operation that the core describes as a sequence of calls, and return its result.

    Args:
        session: The session with the methods that the calls name.
        calls: Yields a `Call` (a session method with arguments) or a procedure to drive; receives each one's result.
    """
    answer = None
    while True:
        try:
            # A step is a call to the session or a procedure.
            step = calls.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result
        # Call a session's method in the caller's task, because only that task may call it while the session records.
        call = (
            getattr(session, step.method)(*step.args, **step.keywords)
            if isinstance(step, Call)
            else undisturbed(drive(step))
        )
        answer = await call
