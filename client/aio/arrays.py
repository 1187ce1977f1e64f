"""Arrays on the card of the asyncio face."""

from typing import TYPE_CHECKING, Any, TypeVar

from numpy.typing import NDArray

from gpulease.client.aio.driver import drive, undisturbed
from gpulease.client.aio.streams import Stream
from gpulease.client.core.arrays import Call, Calls, SessionArray, assign, copy, fill, read
from gpulease.client.errors import InvalidRequest

if TYPE_CHECKING:
    from gpulease.client.aio.session import GpuSession

T = TypeVar("T")


class Array(SessionArray):
    """An array in a session's device memory, like `gpulease.client.Array`; `await a[key].assign(b)` is `a[key] = b`."""

    __slots__ = ()

    session: "GpuSession"

    async def numpy(self, stream: Stream | None = None) -> NDArray[Any]:
        """Copy it to a new array of numpy's."""
        return await make(self.session, read(self, stream))

    async def copy(self, stream: Stream | None = None) -> "Array":
        """Copy it to a new array on the card, without gaps."""
        return await make(self.session, copy(self, stream))

    async def fill(self, value: Any, stream: Stream | None = None) -> None:
        """Write one number to every element, like `gpulease.client.Array.fill`."""
        await make(self.session, fill(self, value, stream))

    async def assign(self, value: Any, stream: Stream | None = None) -> None:
        """Write numbers or an array to it, like `gpulease.client.Array.assign`."""
        await make(self.session, assign(self, value, stream))

    def __setitem__(self, key: Any, value: Any) -> None:
        raise InvalidRequest("a[key] = b can't be awaited", "Use await a[key].assign(b)")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        raise InvalidRequest("numpy can't await an array on the card", "Use await a.numpy()")


async def make(session: "GpuSession", calls: Calls[T]) -> T:
    """Make an operation's calls one by one; returns its result."""
    answer = None
    while True:
        try:
            step = calls.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result
        # A session's method runs in the caller's task, which is the one that may record.
        call = (
            getattr(session, step.method)(*step.args, **step.keywords)
            if isinstance(step, Call)
            else undisturbed(drive(step))
        )
        answer = await call
