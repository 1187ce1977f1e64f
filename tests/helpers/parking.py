"""Reads the broker's report of a lease, for tests of parking."""

from typing import Any

from gpulease.client import GpuLease
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import LeaseRef


def row(address: str, lease: GpuLease) -> dict[str, Any]:
    found: dict[str, Any] = ask(Opcode.LEASE_QUERY, LeaseRef(lease.lease_id), address).report
    return found
