"""Arrays on the card of the blocking face."""

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gpulease.client.core.arrays import Call, Calls, SessionArray, assign, copy, fill, read
from gpulease.client.errors import InvalidRequest
from gpulease.client.sync.driver import drive
from gpulease.client.sync.streams import Stream

if TYPE_CHECKING:
    from gpulease.client.sync.session import GpuSession

T = TypeVar("T")


class Array(SessionArray):
    """An array in a session's device memory; made by `GpuSession.array`, `zeros` and `empty_device`.

    Launches, graphs and kernels take it as a pointer to its first element. A slice of it is a view of the same memory,
    which is freed when the last of them goes. `a[...] = b` copies to it.
    """

    __slots__ = ()

    session: "GpuSession"

    def numpy(self, stream: Stream | None = None) -> NDArray[Any]:
        """Copy it to a new array of numpy's."""
        return make(self.session, read(self, stream))

    def copy(self, stream: Stream | None = None) -> "Array":
        """Copy it to a new array on the card, without gaps."""
        return make(self.session, copy(self, stream))

    def fill(self, value: Any, stream: Stream | None = None) -> None:
        """Write one number to every element. Raises InvalidRequest if it does not fit."""
        make(self.session, fill(self, value, stream))

    def assign(self, value: Any, stream: Stream | None = None) -> None:
        """Write numbers, an array of numpy's or one on the card to it, repeated to its shape by numpy's rules.

        Numbers are converted; an array has the same type. Raises InvalidRequest if type or shape do not fit.
        """
        make(self.session, assign(self, value, stream))

    def __setitem__(self, key: Any, value: Any) -> None:
        self[key].assign(value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise InvalidRequest("an array on the card has no memory that numpy can share", "Leave copy=False out")
        return np.asarray(self.numpy(), dtype)


def make(session: "GpuSession", calls: Calls[T]) -> T:
    """Make an operation's calls one by one; returns its result."""
    answer = None
    while True:
        try:
            step = calls.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result
        answer = getattr(session, step.method)(*step.args, **step.keywords) if isinstance(step, Call) else drive(step)
