"""Captures a process's standard output, to which kernels print.

CUDA's driver writes what kernels print to C's standard output, and the embedded driver does the same. A worker replaces
the descriptor with sealed memory, so that no output reaches the daemon's log, and no write blocks: a write without room
fails, and C's stream records the failure.
"""

import ctypes
import os
from typing import Final

from gpulease.daemon.contract.control_page import sealed_memory
from gpulease.protocol.limits import MAX_PRINTED_BYTES

_STDOUT: Final = 1
_LIBC: Final = ctypes.CDLL(None)
_LIBC.fwrite.argtypes = (ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p)


def _stream() -> ctypes.c_void_p:
    return ctypes.c_void_p.in_dll(_LIBC, "stdout")


def write_output(data: bytes) -> None:
    """Write to C's standard output, as CUDA's driver does."""
    _LIBC.fwrite(data, 1, len(data), _stream())
    _LIBC.fflush(_stream())


class CapturedOutput:
    """Captures this process's standard output from now on."""

    def __init__(self) -> None:
        """Raises OSError if the host has too little memory."""
        # The size is sealed: output beyond it fails at once and can't use up the host's memory.
        fd = sealed_memory("gpulease-output", MAX_PRINTED_BYTES)
        os.dup2(fd, _STDOUT, inheritable=False)
        os.close(fd)

    def take(self) -> tuple[bytes, bool]:
        """Return and discard what was written since the last call, and whether some output found no room."""
        # Flush first, so that everything printed so far is in the memory. A write without room sets the stream's error
        # flag.
        stream = _stream()
        _LIBC.fflush(stream)
        is_lost = bool(_LIBC.ferror(stream))
        _LIBC.clearerr(stream)
        size_bytes = os.lseek(_STDOUT, 0, os.SEEK_CUR)
        data = os.pread(_STDOUT, size_bytes, 0)
        # Overwrite the output, because the next lease's output starts at the same offset.
        os.pwrite(_STDOUT, bytes(size_bytes), 0)
        os.lseek(_STDOUT, 0, os.SEEK_SET)
        return data, is_lost
