"""The limits of a daemon for tests of parking, and the broker's report of a lease."""

from typing import Any

from gpulease.client import GpuLease
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import LeaseRef


def park_limits(memory: str, *, stay_ms: int = 0, overcommit: float = 4.0) -> str:
    """Return the table `[limits]` of a daemon that parks sessions at once, as often as a test needs.

    Fast hosts park 40 times in a tenth of a second, so the pace is far above the default.
    """
    return f"""
[limits]
park_memory = "{memory}"
overcommit = {overcommit}
park_stay_ms = {stay_ms}
parks_per_minute = 1000000
"""


def row(address: str, lease: GpuLease) -> dict[str, Any]:
    found: dict[str, Any] = ask(Opcode.LEASE_QUERY, LeaseRef(lease.lease_id), address).report
    return found
