"""Device arrays of the blocking API, with `a[key] = b`."""

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gpulease.client.core.arrays import Call, Calls, SessionArray, assign, copy, fill, read
from gpulease.client.core.session import SessionView
from gpulease.client.errors import InvalidRequest
from gpulease.client.sync.driver import drive
from gpulease.client.sync.streams import Stream

T = TypeVar("T")


class Array(SessionArray):
    """An array in a session's device memory; made by `GpuSession.array`, `zeros` and `empty_device`.

    Launches, graphs and kernels accept it as a pointer to its first element. A slice is a view of the same memory. The
    memory is freed when the array and all its views are gone. `a[key] = b` copies `b` into the view `a[key]`.
    """

    __slots__ = ()

    def numpy(self, stream: Stream | None = None) -> NDArray[Any]:
        """Copy the array into a new numpy array of the same shape and dtype.

        Args:
            stream: The stream to copy in; the default stream if None. The call waits for the copy in either case.
        """
        return make(self.session, read(self, stream))

    def copy(self, stream: Stream | None = None) -> "Array":
        """Copy the array into a new, C-contiguous array on the card.

        Args:
            stream: The stream to copy in; the default stream if None.

        Raises AllocFailed if the slice has no room.
        """
        return make(self.session, copy(self, stream))

    def fill(self, value: Any, stream: Stream | None = None) -> None:
        """Set every element to one number, converted to the array's dtype.

        Args:
            value: The number.
            stream: The stream to write in; the default stream if None.

        Raises InvalidRequest if the dtype cannot hold the number.
        """
        make(self.session, fill(self, value, stream))

    def assign(self, value: Any, stream: Stream | None = None) -> None:
        """Copy numbers, a numpy array or a device array into this array, broadcast to its shape by numpy's rules.

        Args:
            value: Numbers are converted to this array's dtype; an array must have the same dtype already.
            stream: The stream to copy in; the default stream if None.

        Raises InvalidRequest if dtype or shape do not fit.
        """
        make(self.session, assign(self, value, stream))

    def __setitem__(self, key: Any, value: Any) -> None:
        # Assign to the part, which is a view of the same buffer.
        self[key].assign(value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        # numpy 2 asks for a view with copy=False; older versions never pass it.
        if copy is False:
            raise InvalidRequest("an array on the card has no memory that numpy can share", "Leave copy=False out")
        return np.asarray(self.numpy(), dtype)


def make(session: SessionView, calls: Calls[T]) -> T:
    """Execute an operation that the core describes as a sequence of calls, and return its result.

    Args:
        session: The session with the methods that the calls name.
        calls: Yields a `Call` (a session method with arguments) or a procedure to drive; receives each one's result.
    """
    answer = None
    while True:
        try:
            step = calls.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result
        # A step is a call to the session, or a procedure that only moves bytes. A call goes through the session's
        # public method, so that it is recorded and locked like a program's own call.
        answer = getattr(session, step.method)(*step.args, **step.keywords) if isinstance(step, Call) else drive(step)
