"""Parking a lease whose session may just have come back, and the broker's report of it."""

import time
from typing import Any

from gpulease.client import Busy, GpuLease
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import LeaseRef

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


def row(address: str, lease: GpuLease) -> dict[str, Any]:
    found: dict[str, Any] = ask(Opcode.LEASE_QUERY, LeaseRef(lease.lease_id), address).report
    return found
