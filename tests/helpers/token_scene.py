"""A capability authority with simulated time, leases and random numbers."""

import random
from dataclasses import replace

import pytest

from gpulease.daemon.capabilities.authority import CapabilityAuthority, LeaseFacts
from gpulease.daemon.capabilities.claims import CapabilityDenied, CapabilityRequest, TokenCheck
from gpulease.daemon.capabilities.keys import KeyRing
from gpulease.protocol.capabilities import Permission

S = 1_000_000_000
LEASE, OTHER = 0xA1, 0xB2


class Scene:
    """Ann has two leases of 1000 s. Tokens are for Bob."""

    def __init__(self) -> None:
        self.now_ns = 5000 * S
        self.unix_s = 1_790_000_000.0
        facts = LeaseFacts("ann", 1, self.now_ns + 1000 * S)
        self.leases = {LEASE: facts, OTHER: facts}
        self.draw = random.Random(7).randbytes
        self.ring = KeyRing.fresh(self.now_ns, self.draw)
        self.saved = 0
        self.authority = self.restarted()
        self.bob = self.authority.audience_of("bob")

    def restarted(self) -> CapabilityAuthority:
        """Return the authority of the same node in a new process."""
        return CapabilityAuthority(
            self.ring,
            self.leases.get,
            clock_ns=lambda: self.now_ns,
            unix_s=lambda: self.unix_s,
            draw=self.draw,
            save=self.on_save,
        )

    def on_save(self, ring: KeyRing) -> None:
        self.saved += 1

    def later(self, seconds: float) -> None:
        self.now_ns += int(seconds * S)
        self.unix_s += seconds

    def renew(self, lease_id: int = LEASE) -> None:
        self.leases[lease_id] = replace(self.leases[lease_id], generation=self.leases[lease_id].generation + 1)

    def token(self, permissions: Permission = Permission.MEM_READ, ttl_s: float = 60) -> bytes:
        return self.authority.issue(CapabilityRequest(LEASE, permissions, self.bob).ttl_secs(ttl_s)).token

    def refused(self, token: bytes, permission: Permission = Permission.MEM_READ) -> TokenCheck:
        with pytest.raises(CapabilityDenied) as caught:
            self.authority.validate(token, self.bob, permission)
        assert str(caught.value)
        assert caught.value.hint.endswith(".")
        return caught.value.check
