"""System calls that Python has no name for."""

import ctypes
import os

_LIBC = ctypes.CDLL(None, use_errno=True)


def system_call(number: int, *arguments: int) -> int:
    """Raises OSError."""
    result: int = _LIBC.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def prctl(option: int, *arguments: int) -> int:
    """Ask the kernel something about this process. Raises OSError."""
    values = [*arguments, 0, 0, 0, 0][:4]
    result: int = _LIBC.prctl(option, *map(ctypes.c_ulong, values))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
