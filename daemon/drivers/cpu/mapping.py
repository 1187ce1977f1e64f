"""Host memory that costs nothing until it is touched."""

import ctypes
import mmap

from gpulease.daemon.drivers.interface import DriverError

# Linux's flag; Python 3.11 has no name for it. Without it the kernel would count address space as used memory.
_MAP_NORESERVE = 0x4000


class Mapping:
    """Anonymous, zeroed pages at a fixed address, made real one by one on first touch.

    Raises:
        DriverError: The host gives this process no such address space.
    """

    def __init__(self, size_bytes: int) -> None:
        try:
            self._map = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        except (OSError, ValueError, OverflowError) as error:
            raise DriverError(
                f"the host can't reserve {size_bytes} bytes of address space: {error}",
                hint="Raise the process's address space limit, or ask for a smaller slice.",
            ) from None
        self.size_bytes = size_bytes
        self.view = memoryview(self._map)
        anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(anchor)
        del anchor

    def discard(self, offset: int, size: int) -> None:
        """Give whole pages back to the host: they read as zeros. Both numbers are multiples of the page size."""
        self._map.madvise(mmap.MADV_DONTNEED, offset, size)

    def close(self) -> None:
        """Give all back; nothing may touch the memory any more."""
        self.view.release()
        self._map.close()
