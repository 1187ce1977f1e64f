"""The card's memory in one context: pages, cached blocks, and local memory. Pure bookkeeping; it calls no driver.

Pages. cuMemAlloc serves sizes up to 1 MiB from shared pages of 2 MiB; larger sizes get pages of their own. A shared
page goes back to the card when the last allocation in it is freed. A page is also 2 MiB of addresses, so the addresses
show which allocations share a page. Measured with NVML's figure for the process (H100, driver 580.159): over thousands
of random allocations and frees the sum was exact.

Blocks. On an H100 cuMemAlloc and cuMemFree of 1 MiB take 61 us together, cuMemFree waits for all kernels, and during
either call no launch can begin. So the context caches a freed block, and the next allocation of its size gets it.
Cached blocks count as taken (`cached_bytes`). They go back to the card before an allocation that would not fit with
them.

Local memory. The driver takes it for every thread that the card can hold at a time, whatever a launch's size (CUDA C++
Programming Guide, "Local Memory"; CUDA driver API, CU_LIMIT_STACK_SIZE). A new context has enough for the default
stack. If a kernel needs more, the driver enlarges the context's local memory at the kernel's first launch, and never
reduces it. Measured on an H100 (driver 580.159), exact to the page: (local bytes of the kernel - 1024) x 132
multiprocessors x 2048 threads.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

# The constants below were measured; the module's docstring says how.
PAGE_BYTES: Final = 2 << 20
SHARING_BYTES: Final = 1 << 20
"""The largest allocation that shares pages with others."""


def whole_pages(size_bytes: int) -> int:
    """Return `size_bytes`, rounded up to whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


class Pages:
    """The pages of all live allocations.

    Attributes:
        taken_bytes: Bytes of the card that they take.
    """

    def __init__(self) -> None:
        self.taken_bytes = 0
        self._wanted_bytes = 0
        self._sizes: dict[int, int] = {}
        self._sharers: Counter[int] = Counter()

    @property
    def rounding_bytes(self) -> int:
        return self.taken_bytes - self._wanted_bytes

    def add(self, address: int, size_bytes: int) -> None:
        """Record an allocation that the driver made."""
        self._sizes[address] = size_bytes
        self._wanted_bytes += size_bytes
        # A large allocation has pages of its own.
        if size_bytes > SHARING_BYTES:
            self.taken_bytes += whole_pages(size_bytes)
            return
        # Small allocations share pages: the first one in a page takes the page of the card.
        for page in _pages_of(address, size_bytes):
            self._sharers[page] += 1
            if self._sharers[page] == 1:
                self.taken_bytes += PAGE_BYTES

    def sizes(self) -> dict[int, int]:
        """Return the size of each allocation by its address."""
        return dict(self._sizes)

    def remove(self, address: int) -> None:
        """Record that the driver freed an allocation."""
        size_bytes = self._sizes.pop(address)
        self._wanted_bytes -= size_bytes
        if size_bytes > SHARING_BYTES:
            self.taken_bytes -= whole_pages(size_bytes)
            return
        # Once a page's last allocation is freed, the page goes back to the card.
        for page in _pages_of(address, size_bytes):
            self._sharers[page] -= 1
            if not self._sharers[page]:
                del self._sharers[page]
                self.taken_bytes -= PAGE_BYTES


def _pages_of(address: int, size_bytes: int) -> range:
    return range(address // PAGE_BYTES, (address + size_bytes - 1) // PAGE_BYTES + 1)


MAX_CACHED_BYTES: Final = 1 << 30
"""Maximum number of bytes cached. Keeps a session from holding memory that it does not use. Above this size, zeroing a
block takes longer than the driver's calls."""

MAX_CACHED_BLOCKS: Final = 1024
"""Maximum number of blocks cached. Stops a storm of allocations from leaving records of blocks that are never requested
again."""

_SMALL_STEP_BYTES: Final = 512
"""cuMemAlloc rounds small sizes up to a multiple of this."""


def block_bytes(size_bytes: int) -> int:
    """Return the size of the block for an allocation.

    The driver would round up to this size anyway, and rounded sizes match cached blocks more often.
    """
    if size_bytes > SHARING_BYTES:
        return whole_pages(size_bytes)
    return -(-size_bytes // _SMALL_STEP_BYTES) * _SMALL_STEP_BYTES


class Blocks:
    """The blocks that a context has from the driver: live allocations and cached blocks. The context calls it."""

    def __init__(self) -> None:
        # The pages of live allocations, and those of all blocks.
        self._live = Pages()
        self._held = Pages()
        self._allocations: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}
        # The cached blocks by size, and all of them in the order in which they were freed.
        self._cached: dict[int, list[int]] = {}
        self._cached_in_order: dict[int, None] = {}

    @property
    def rounding_bytes(self) -> int:
        """Bytes of the card that live allocations take beyond their sizes."""
        return self._live.rounding_bytes

    @property
    def cached_bytes(self) -> int:
        """Bytes of the card that cached blocks take in addition to live allocations."""
        return self._held.taken_bytes - self._live.taken_bytes

    @property
    def cached_blocks(self) -> int:
        return len(self._cached_in_order)

    def may_cache(self, address: int) -> bool:
        """Return whether an allocation's block can be cached in addition to the others."""
        if self.cached_blocks >= MAX_CACHED_BLOCKS:
            return False
        return self.cached_bytes + self._sizes[address] <= MAX_CACHED_BYTES

    def reuse(self, size_bytes: int) -> int | None:
        """Return the address of the last cached block for an allocation of that size; None if there is none."""
        cached = self._cached.get(block_bytes(size_bytes))
        if not cached:
            return None
        address = cached.pop()
        del self._cached_in_order[address]
        self._live.add(address, size_bytes)
        return address

    def add(self, address: int, size_bytes: int, allocation: Any) -> None:
        """Record a block of `block_bytes` that the driver made for an allocation of that size."""
        self._sizes[address] = size = block_bytes(size_bytes)
        self._allocations[address] = allocation
        self._held.add(address, size)
        self._live.add(address, size_bytes)

    def cache(self, address: int) -> None:
        """Cache the block of an allocation that was freed."""
        self._live.remove(address)
        self._cached.setdefault(self._sizes[address], []).append(address)
        self._cached_in_order[address] = None

    def live(self) -> dict[int, int]:
        """Return the requested sizes of live allocations, by address. No block may be cached."""
        return self._live.sizes()

    def drop_oldest(self) -> tuple[Any, int]:
        """Remove the block that was cached first. Return the driver's allocation, which must be freed, and its size.

        There must be a cached block.
        """
        # Dictionaries keep insertion order, so the first key was freed first.
        address = next(iter(self._cached_in_order))
        del self._cached_in_order[address]
        size = self._sizes.pop(address)
        cached = self._cached[size]
        cached.remove(address)
        if not cached:
            del self._cached[size]
        self._held.remove(address)
        return self._allocations.pop(address), size


HEAP_BYTES: Final = 8 << 20
"""Maximum number of bytes that all kernels together may malloc. The driver takes them when the first module with a
malloc is loaded, so they are part of every session's allowance. A kernel that requests more gets a null pointer."""

PRINT_BYTES: Final = 1 << 20
"""Maximum number of bytes that kernels may print between two syncs; beyond that the oldest lines are lost. The driver
takes these bytes when it takes the heap."""

SYSTEM_CALL_STACK_BYTES: Final = 544
"""Bytes of local memory that the driver adds for each thread when it loads the first module with a system call (malloc,
free, an assertion). 535 bytes were measured."""


@dataclass(frozen=True, slots=True)
class LocalMemory:
    """The local memory of one context.

    Attributes:
        stack_bytes: Local memory for each thread that the context had when it was made, in bytes.
        threads: How many threads the card can hold at a time.
        buffers_bytes: Heap and print buffer, which the driver takes when they are first needed.
    """

    stack_bytes: int
    threads: int
    buffers_bytes: int

    def kept_by(self, local_bytes: int) -> int:
        """Return the bytes that the context keeps for a kernel with `local_bytes` of local memory for each thread.

        Includes what system calls take in addition, whether their module is loaded before the kernel runs or after.
        """
        # A kernel within the default stack costs nothing.
        if local_bytes <= self.stack_bytes:
            return 0
        return whole_pages((local_bytes - self.stack_bytes) * self.threads) + self.kept_by_system_calls

    @property
    def kept_by_system_calls(self) -> int:
        """Bytes that the context keeps once a module with system calls is loaded."""
        return whole_pages(SYSTEM_CALL_STACK_BYTES * self.threads) + whole_pages(self.buffers_bytes)
