"""What buffers of the driver's own keep of a lease's copies and launches, overwritten with zeros.

Copies of memory that is not pinned go through buffers of the driver's, in this process's memory; kernels' parameters
and small copies go to the card with the commands, in another buffer. All of it stays there until others come, and
kernels can read both. None of this is documented. On an H100 (driver 580.159) the copies here left nothing of
either. What came with modules of less than some 100 KB they did not reach.
"""

from typing import Any, Final

import pycuda.driver as cuda

STAGING_BYTES: Final = 2 << 20
"""Of the driver's buffers for copies to the card, and from it: 2 MiB each were found."""

SMALL_SIZES: Final = (*range(64, 1025, 64), 2048, 4096)
"""Of copies from the card that go another way, each from the start of a buffer: those of up to 256 bytes were found to,
those of 1024 not."""

INLINE_BYTES: Final = 64 << 10
"""Copies to the card of so many bytes, or fewer, go with the commands (CUDA driver API, "API synchronization
behavior")."""

INLINE_COPIES: Final = 96
"""For half as much again as commands are written to in turn: 4 MiB were found."""

# Made once: so much memory anew for each wash takes a process that overwrites what it frees a ms.
_ZEROS: Final = memoryview(bytes(STAGING_BYTES))
_SINK: Final = memoryview(bytearray(STAGING_BYTES))


def wash(address: int, stream: Any) -> None:
    """Fill them, by way of `STAGING_BYTES` of the card that are zero; the stream is to be waited for.

    Raises cuda.Error.
    """
    cuda.memcpy_htod_async(address, _ZEROS, stream)
    cuda.memcpy_dtoh_async(_SINK, address, stream)
    for size_bytes in SMALL_SIZES:
        cuda.memcpy_dtoh_async(_SINK[:size_bytes], address, stream)
    for _ in range(INLINE_COPIES):
        cuda.memcpy_htod_async(address, _ZEROS[:INLINE_BYTES], stream)
