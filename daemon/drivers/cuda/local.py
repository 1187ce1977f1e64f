"""What a context sets aside for the local memory of kernels, which the driver takes without being asked.

Local memory is there for every thread the card can hold at a time, whatever a launch's size (CUDA C++ Programming
Guide, "Local Memory"; CUDA driver API, CU_LIMIT_STACK_SIZE). A context starts with the default stack's worth. A kernel
that needs more makes the driver enlarge it at the kernel's first launch, and it stays enlarged. Measured on an H100
(driver 580.159), exact to the page: (local bytes of the kernel - 1024) x 132 multiprocessors x 2048 threads.
"""

from dataclasses import dataclass
from typing import Final

from gpulease.daemon.drivers.cuda.pages import whole_pages

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
