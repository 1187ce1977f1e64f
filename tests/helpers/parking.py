"""Parking a lease whose session may just have come back."""

import time

from gpulease.client import Busy, GpuLease

LIMIT_S = 30.0


def park(lease: GpuLease) -> int:
    """Park a lease, once the broker has read that its session is back; return the bytes that were moved."""
    until = time.monotonic() + LIMIT_S
    while True:
        try:
            return lease.park()
        except Busy as error:
            if "returning" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.001)
