"""Changes the wall clock of every Python process that is started with this folder on its PYTHONPATH.

GPULEASE_TEST_CLOCK names a file of 8 bytes: the nanoseconds that are now added to the wall clock. The file stays
mapped, so that a worker that can't open files can also read it. The monotonic clock does not change, as when someone
sets a host's clock (clock_settime(2)).
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
