"""Occupies addresses in the workers of a private daemon, so that a session can't use them there.

`refused_address.py` gives the daemon's processes this file under the name that Python imports at its start
(sitecustomize). So it uses only the standard library.
"""

import ctypes
import mmap
import os
from typing import Final

VARIABLE: Final = "GPULEASE_OCCUPIED"
"""Names the file with the addresses, in hexadecimal, one per line. Without the file nothing is occupied."""

_FIXED_NOREPLACE: Final = 0x100000
"""MAP_FIXED_NOREPLACE (linux/mman.h): map exactly at this address, or fail."""


def occupy() -> None:
    """Map one page, which nobody may use, at each address in the file."""
    try:
        with open(os.environ[VARIABLE], encoding="ascii") as file:
            addresses = [int(line, 16) for line in file]
    except OSError:
        return
    map_memory = ctypes.CDLL(None, use_errno=True).mmap
    map_memory.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED_NOREPLACE
    for address in addresses:
        map_memory(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), 0, flags, -1, ctypes.c_long(0))


if VARIABLE in os.environ:
    # A worker is forked from its zygote. The worker's driver can't use an address that is mapped there first.
    os.register_at_fork(after_in_child=occupy)
