"""Memory of the card that a context has: blocks that are allocations, and blocks kept for allocations to come.

cuMemAlloc and cuMemFree of 1 MiB take 61 us together on an H100, a cuMemFree waits for all kernels, and both stop
launches meanwhile. So a freed block is kept, and the next allocation of its size gets it. Kept blocks count as taken
(`cached_bytes`): they go back to the card before anything else is taken for which there is no room beside them.
"""

from typing import Any, Final

from gpulease.daemon.drivers.cuda.pages import SHARING_BYTES, Pages, whole_pages

MAX_CACHED_BYTES: Final = 1 << 30
"""Most bytes kept. Stops a session from holding what it does not use; beyond it, zeroing costs more than the driver."""

MAX_CACHED_BLOCKS: Final = 1024
"""Most blocks kept. Stops a storm of allocations from leaving books on blocks nobody asks for again."""

_SMALL_STEP_BYTES: Final = 512
"""What cuMemAlloc rounds small sizes to."""


def block_bytes(size_bytes: int) -> int:
    """What is asked of the driver for an allocation: as much as it would take anyway, so that more sizes are alike."""
    if size_bytes > SHARING_BYTES:
        return whole_pages(size_bytes)
    return -(-size_bytes // _SMALL_STEP_BYTES) * _SMALL_STEP_BYTES


class Blocks:
    """The books on them; who calls the driver is the context."""

    def __init__(self) -> None:
        self._live = Pages()
        self._held = Pages()
        self._allocations: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}
        # By size; and all of them, those freed first in front.
        self._free: dict[int, list[int]] = {}
        self._in_order: dict[int, None] = {}

    @property
    def rounding_bytes(self) -> int:
        """What live allocations take of the card beyond their sizes."""
        return self._live.rounding_bytes

    @property
    def cached_bytes(self) -> int:
        """What kept blocks take of the card besides."""
        return self._held.taken_bytes - self._live.taken_bytes

    @property
    def cached_blocks(self) -> int:
        """How many blocks are kept."""
        return len(self._in_order)

    def may_keep(self, address: int) -> bool:
        """Whether an allocation's block can be kept beside the others."""
        if self.cached_blocks >= MAX_CACHED_BLOCKS:
            return False
        return self.cached_bytes + self._sizes[address] <= MAX_CACHED_BYTES

    def take(self, size_bytes: int) -> int | None:
        """A kept block for an allocation of that size, the one freed last; None if there is none."""
        free = self._free.get(block_bytes(size_bytes))
        if not free:
            return None
        address = free.pop()
        del self._in_order[address]
        self._live.add(address, size_bytes)
        return address

    def add(self, address: int, size_bytes: int, allocation: Any) -> None:
        """The driver gave a block of `block_bytes` for an allocation of that size."""
        self._sizes[address] = size = block_bytes(size_bytes)
        self._allocations[address] = allocation
        self._held.add(address, size)
        self._live.add(address, size_bytes)

    def give(self, address: int) -> None:
        """An allocation was freed: its block is kept."""
        self._live.remove(address)
        self._free.setdefault(self._sizes[address], []).append(address)
        self._in_order[address] = None

    def drop_oldest(self) -> tuple[Any, int]:
        """The driver's allocation behind the block kept for longest, to be freed, and its size; there is one."""
        address = next(iter(self._in_order))
        del self._in_order[address]
        size = self._sizes.pop(address)
        free = self._free[size]
        free.remove(address)
        if not free:
            del self._free[size]
        self._held.remove(address)
        return self._allocations.pop(address), size
