"""Claims in the fleet: one node at a time serves a lease with a name, and tenants stay within their quotas.

The name in a LEASE_ALLOC is claimed first. The claim's epoch becomes part of the lease's terms, and the lease is
granted only before the membership deadline. The claim ends once the lease's memory is proved free, or an operator
vouches for that. Bytes of a quota are claimed in the same way, for tenants that have one according to the settings
(`TenantLimits.fleet_quota`). `Runtime.claims` has the node's claims; it is None if the node is in no fleet.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from gpulease.daemon.leases.model import LeaseSnapshot, LeaseTerms
from gpulease.protocol.failures import Failure


class NameRequest(NamedTuple):
    """A request for a name.

    Attributes:
        name: The name.
        lease_id: The id that the lease will have.
        tenant: The tenant that will own the lease.
        wait_ms: Longest wait for the name if another lease has it; 0 for no wait.
    """

    name: str
    lease_id: int
    tenant: str
    wait_ms: int


class NameGranted(NamedTuple):
    """The claim belongs to this node.

    Attributes:
        epoch: Number of the claim, higher than that of every earlier claim of the name.
    """

    epoch: int


class QuotaRequest(NamedTuple):
    """A request for bytes of a tenant's quota in the fleet.

    Attributes:
        tenant: The tenant that owns the lease and the quota.
        lease_id: The id that the lease will have.
        size_bytes: Its size.
        wait_ms: Longest wait for the bytes if other leases have them; 0 for no wait.
    """

    tenant: str
    lease_id: int
    size_bytes: int
    wait_ms: int


class QuotaGranted(NamedTuple):
    """The requested bytes of the quota belong to the lease."""


QuotaAnswer = QuotaGranted | Failure
"""Granted bytes of a quota, or the failure for the tenant: DENIED if the quota is used up, otherwise as for a name."""

NameAnswer = NameGranted | Failure
"""A granted claim, or the failure for the tenant: BUSY if another node or a later attempt may succeed, otherwise
DENIED."""


class FleetClaims(Protocol):
    """The claims of names and of quota bytes that this node has in its fleet.

    Attributes:
        labels: Labels of this node; a lease that asks for others is refused.
    """

    @property
    def labels(self) -> Mapping[str, str]: ...

    def refusal(self) -> Failure | None:
        """Return why the node now grants no lease at all, even without a name; None if it grants leases."""

    def claim_name(self, want: NameRequest, on_answer: Callable[[NameAnswer], None]) -> Callable[[], None]:
        """Request a name. Calls `on_answer` once, perhaps before this method returns.

        Returns:
            A function that cancels the request. `on_answer` is not called after it, and a claim that is still made is
            released. After the answer it does nothing.
        """

    def release(self, name: str, epoch: int) -> None:
        """End a claim, because its lease is completely over. Does nothing if it is missing or a later one."""

    def on_fenced(self) -> None:
        """Record that a claimed lease has ended FENCED: its claims remain until an operator clears the fence."""

    def claim_quota(self, want: QuotaRequest, on_answer: Callable[[QuotaAnswer], None]) -> Callable[[], None]:
        """Request bytes of a quota, like `claim_name`."""

    def give_back(self, tenant: str, lease_id: int) -> None:
        """Return a lease's bytes to the quota, because it is completely over. Does nothing if the lease has none."""


def release_all(claims: FleetClaims | None, tenant: str, lease_id: int, holder: LeaseTerms | LeaseSnapshot) -> None:
    """End all claims of a lease, because it is over completely or was never granted.

    A node that has left its fleet has no claims to end, even if its leases still carry some.
    """
    if claims is None:
        return
    # An epoch shows a claim of a name, and fleet bytes show a claim of a quota's bytes. A lease may have both.
    if holder.epoch:
        claims.release(holder.name, holder.epoch)
    if holder.fleet_bytes:
        claims.give_back(tenant, lease_id)
