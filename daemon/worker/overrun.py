"""Whether a lease's kernel has run for longer than it may, by what its worker claims.

The broker asks, and the zygote while there is none. A worker that was taken over may claim that nothing runs, and gains
by it what its lease's deadline allows anyway.
"""

import os
import struct
from typing import Final

from gpulease.daemon.worker.page import Counter

_U64: Final = struct.Struct("=Q")
_NS_PER_MS: Final = 1_000_000


def overran(looked_ns: int, since_ns: int, bound_ms: int) -> str:
    """What is to be said of a kernel that ran for too long, "" if none did.

    Args:
        looked_ns: `Counter.LOOKED_NS`, and not the time it is now: one that compiles has not looked, and the kernel may
            have ended meanwhile.
        since_ns: `Counter.KERNEL_SINCE_NS`.
        bound_ms: How long one may run, 0 for no bound.
    """
    if not bound_ms or not since_ns or looked_ns - since_ns < bound_ms * _NS_PER_MS:
        return ""
    return f"a kernel ran for more than {bound_ms / 1000:g} s"


def overran_on(claims_fd: int, bound_ms: int) -> str:
    """The same of claims that are not mapped."""
    return overran(_counter(claims_fd, Counter.LOOKED_NS), _counter(claims_fd, Counter.KERNEL_SINCE_NS), bound_ms)


def _counter(claims_fd: int, counter: Counter) -> int:
    (value,) = _U64.unpack(os.pread(claims_fd, _U64.size, _U64.size * counter))
    return int(value)
