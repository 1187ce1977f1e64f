"""What a session's face shows and does without asking."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

from gpulease.client.core.arena import empty
from gpulease.client.core.forking import OF_PARENT
from gpulease.client.core.session import SessionState
from gpulease.client.core.wish import MAX_WIRE_BYTES, whole
from gpulease.client.errors import error_of
from gpulease.client.handles import BorrowedBuffer
from gpulease.protocol.lease_ids import LeaseId

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

S = TypeVar("S", bound="np.generic")


class SessionView:
    """What a session's face shows without asking."""

    _state: SessionState
    _lock: Any

    def disown(self) -> None:
        """See Inherited."""
        self._lock = self._state.disown()

    @overload
    def empty(self, shape: int | Sequence[int]) -> "NDArray[np.float64]": ...

    @overload
    def empty(self, shape: int | Sequence[int], dtype: "type[S] | np.dtype[S]") -> "NDArray[S]": ...

    @overload
    def empty(self, shape: int | Sequence[int], dtype: Any) -> "NDArray[Any]": ...

    def empty(self, shape: int | Sequence[int], dtype: Any = float) -> "NDArray[Any]":
        """A numpy array, not initialised, in memory that the session's process shares where there is such memory.

        mem_write and mem_read of it, or of a contiguous part of it, are as fast as the card's bus. Over TCP, or where
        the session's arena has no room left, it is an ordinary array, and all works the same. A process that is forked
        shares the arrays that were made before the fork with its parent.
        """
        if self._state.end is OF_PARENT:
            raise error_of(OF_PARENT, "empty")
        return empty(self._state.arena, shape, dtype)

    def buffer(self, handle: int, size_bytes: int) -> BorrowedBuffer:
        """Memory that was allocated on another connection to the same lease: by its owner, or before this one opened.

        It is not freed with its last reference; `mem_free` frees it. What it is, the operations on it find out.

        Args:
            handle: Its `handle` there.
            size_bytes: Its size there.
        """
        at = whole(handle, "buffer", least=0, most=MAX_WIRE_BYTES)
        return BorrowedBuffer(self._state, at, whole(size_bytes, "buffer", least=1, most=MAX_WIRE_BYTES))

    @property
    def session_id(self) -> LeaseId:
        """The session's number: its lease's."""
        return LeaseId(self._state.session_id)

    @property
    def driver(self) -> str:
        """What the session computes with: "cuda" or "cpu"."""
        return self._state.attached.driver

    @property
    def card_uuid(self) -> str:
        """Which card it is on."""
        return self._state.attached.card_uuid

    @property
    def slice_bytes(self) -> int:
        """Device memory it may allocate in all."""
        return self._state.attached.slice_bytes

    @property
    def is_alive(self) -> bool:
        """Whether it is open and its lease not over, as far as is known here."""
        return self._state.is_alive

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.session_id}{'' if self.is_alive else ', over'}>"
