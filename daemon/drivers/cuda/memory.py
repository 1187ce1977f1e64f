"""What allocations take of a card in whole pages.

Measured with NVML's figure for the process (H100, driver 580.159): cuMemAlloc gives sizes up to 1 MiB out of shared
pages of 2 MiB, which go back with the last allocation in them, and larger ones pages of their own. A page is 2 MiB of
addresses too, so the addresses say which allocations share one; over thousands of random allocations and frees the sum
was exact.

Memory of the card that a context has: blocks that are allocations, and blocks kept for allocations to come.

cuMemAlloc and cuMemFree of 1 MiB take 61 us together on an H100, a cuMemFree waits for all kernels, and both stop
launches meanwhile. So a freed block is kept, and the next allocation of its size gets it. Kept blocks count as taken
(`cached_bytes`): they go back to the card before anything else is taken for which there is no room beside them.

What a context sets aside for the local memory of kernels, which the driver takes without being asked.

Local memory is there for every thread the card can hold at a time, whatever a launch's size (CUDA C++ Programming
Guide, "Local Memory"; CUDA driver API, CU_LIMIT_STACK_SIZE). A context starts with the default stack's worth. A kernel
that needs more makes the driver enlarge it at the kernel's first launch, and it stays enlarged. Measured on an H100
(driver 580.159), exact to the page: (local bytes of the kernel - 1024) x 132 multiprocessors x 2048 threads.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

PAGE_BYTES: Final = 2 << 20
SHARING_BYTES: Final = 1 << 20
"""The largest size that shares pages with others."""


def whole_pages(size_bytes: int) -> int:
    """Rounded up to pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


class Pages:
    """The pages of all live allocations.

    Attributes:
        taken_bytes: What they take of the card.
    """

    def __init__(self) -> None:
        self.taken_bytes = 0
        self._wanted_bytes = 0
        self._sizes: dict[int, int] = {}
        self._sharers: Counter[int] = Counter()

    @property
    def rounding_bytes(self) -> int:
        """What they take beyond their sizes."""
        return self.taken_bytes - self._wanted_bytes

    def add(self, address: int, size_bytes: int) -> None:
        """The driver gave an allocation."""
        self._sizes[address] = size_bytes
        self._wanted_bytes += size_bytes
        if size_bytes > SHARING_BYTES:
            self.taken_bytes += whole_pages(size_bytes)
            return
        for page in _pages_of(address, size_bytes):
            self._sharers[page] += 1
            if self._sharers[page] == 1:
                self.taken_bytes += PAGE_BYTES

    def remove(self, address: int) -> None:
        """The driver took it back."""
        size_bytes = self._sizes.pop(address)
        self._wanted_bytes -= size_bytes
        if size_bytes > SHARING_BYTES:
            self.taken_bytes -= whole_pages(size_bytes)
            return
        for page in _pages_of(address, size_bytes):
            self._sharers[page] -= 1
            if not self._sharers[page]:
                del self._sharers[page]
                self.taken_bytes -= PAGE_BYTES


def _pages_of(address: int, size_bytes: int) -> range:
    return range(address // PAGE_BYTES, (address + size_bytes - 1) // PAGE_BYTES + 1)


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


HEAP_BYTES: Final = 8 << 20
"""What kernels may malloc, all together. The driver takes it when the first module with a malloc is loaded, so it is a
part of every session's allowance; a kernel that asks for more gets a null pointer."""

PRINT_BYTES: Final = 1 << 20
"""What kernels may print between two syncs; the oldest lines are lost beyond that. Taken with the heap."""

SYSTEM_CALL_STACK_BYTES: Final = 544
"""Of local memory a thread that the driver adds when a module with a system call (malloc, free, an assertion) is loaded
first: 535 were measured."""


@dataclass(frozen=True, slots=True)
class LocalMemory:
    """A card's local memory in one context.

    Attributes:
        stack_bytes: Per thread, what the context had when it was made.
        threads: Those the card can hold at a time.
        buffers_bytes: Heap and print buffer, which the driver takes when they are first needed.
    """

    stack_bytes: int
    threads: int
    buffers_bytes: int

    def kept_by(self, local_bytes: int) -> int:
        """What a kernel with so many bytes of local memory a thread makes the context keep.

        What system calls take comes on top of it, before or after; one sum covers both orders.
        """
        if local_bytes <= self.stack_bytes:
            return 0
        return whole_pages((local_bytes - self.stack_bytes) * self.threads) + self.kept_by_system_calls

    @property
    def kept_by_system_calls(self) -> int:
        """What loading a module with system calls makes the context keep."""
        return whole_pages(SYSTEM_CALL_STACK_BYTES * self.threads) + whole_pages(self.buffers_bytes)
