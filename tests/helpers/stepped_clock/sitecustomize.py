"""The wall clock as a file says: for every Python that is started with this folder on its PYTHONPATH.

GPULEASE_TEST_CLOCK names a file of 8 bytes, the nanoseconds by which the wall clock is off now. It stays mapped, so a
worker that can open no file reads it too. The monotonic clock is the kernel's own and stays as it is, as it does when
somebody sets a host's clock (clock_settime(2)).
"""

import mmap
import os
import time

if _path := os.environ.get("GPULEASE_TEST_CLOCK"):
    with open(_path, "rb") as _file:
        _off = memoryview(mmap.mmap(_file.fileno(), 8, prot=mmap.PROT_READ)).cast("q")
    _time_ns = time.time_ns

    def _stepped_ns() -> int:
        return _time_ns() + _off[0]

    time.time_ns = _stepped_ns
    time.time = lambda: _stepped_ns() / 1e9
