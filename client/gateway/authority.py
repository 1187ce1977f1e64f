"""The grant a request is submitted by: who issues it, and who says what it permits."""

import math
from typing import Final, Protocol

from gpulease.client.blocking import GpuLease, inspect_token
from gpulease.client.core.tokens import Grant
from gpulease.client.errors import Denied
from gpulease.client.gateway.errors import CapabilityRefused
from gpulease.protocol.capabilities import Permission, names_of

SUBMISSION: Final = Permission.LEASE_QUERY | Permission.TASKLET_SUBMIT
"""What a request's grant permits: exactly this. Whoever has it can load and launch, and neither read the lease's
memory through the session nor renew, free or revoke the lease."""

MAX_TOKEN_S: Final = 300.0
"""Longest life of a token, by the protocol."""


class Authority(Protocol):
    """Issues grants and says what they are worth."""

    def issue(self, lease: GpuLease, audience: bytes | None, ttl_s: float, nonce: int) -> Grant:
        """A grant of SUBMISSION on a lease."""
        ...

    def check(self, grant: Grant, lease: GpuLease, now_unix_s: float) -> None:
        """Raises CapabilityRefused unless this program may submit to the lease by it, and do nothing else."""
        ...


class NodeAuthority:
    """The lease's own node. It signs the grant, and its word on it is asked for anew before anything is done."""

    def issue(self, lease: GpuLease, audience: bytes | None, ttl_s: float, nonce: int) -> Grant:
        """See Authority."""
        return lease.issue(SUBMISSION, audience, min(ttl_s, MAX_TOKEN_S), nonce)

    def check(self, grant: Grant, lease: GpuLease, now_unix_s: float) -> None:
        """See Authority."""
        try:
            held = inspect_token(grant, lease.address)
        except Denied as error:
            raise CapabilityRefused(f"the grant is refused: {error.message}", error.hint) from None
        if held.lease_id != lease.lease_id:
            raise CapabilityRefused(f"the grant is of lease {held.lease_id}, not of {lease.lease_id}")
        if held.permissions != SUBMISSION:
            given, wanted = ", ".join(names_of(held.permissions)), ", ".join(names_of(SUBMISSION))
            raise CapabilityRefused(f"the grant permits {given}; it must permit {wanted}, no less and no more")
        # The node's date is in whole seconds, rounded down.
        if held.ttl_s <= 0 or held.expires_at_unix_secs < math.floor(now_unix_s):
            raise CapabilityRefused(
                f"the grant ends at {held.expires_at_unix_secs}, and by the request's date it is {now_unix_s:.0f}",
                "Compare the clocks of the caller and of the node",
            )
