"""Claims in the fleet: a lease with a name is served by one node at a time, and tenants keep to their quotas.

A named LEASE_ALLOC is claimed first. The claim's epoch goes into the lease's terms, and the lease is granted only
before the fleet's horizon. The claim ends once the lease's memory is proved free, or an operator vouches for that.
Bytes of a quota are claimed likewise, for tenants whose settings say that they have one (`TenantLimits.fleet_quota`).
`Runtime.claims` has the node's claims: `NoFleet`, until the node joins a fleet.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from gpulease.daemon.leases import LeaseSnapshot, LeaseTerms
from gpulease.protocol.failures import Failure
from gpulease.protocol.opcodes import Status


class ClaimWant(NamedTuple):
    """A lease that wants a name.

    Attributes:
        name: The name.
        lease_id: The id that the lease will have.
        tenant: Whose lease it will be.
        wait_ms: Longest wait for the name, if another lease has it; 0: no wait.
    """

    name: str
    lease_id: int
    tenant: str
    wait_ms: int


class Claimed(NamedTuple):
    """The claim is this node's, by a result that is known.

    Attributes:
        epoch: Number of the claim, above that of every earlier claim of the name.
    """

    epoch: int


class BytesWant(NamedTuple):
    """A lease that wants bytes of its tenant's quota in the fleet.

    Attributes:
        tenant: Whose lease and quota it is.
        lease_id: The id that the lease will have.
        size_bytes: Its size.
        wait_ms: Longest wait for the bytes, if other leases have them; 0: no wait.
    """

    tenant: str
    lease_id: int
    size_bytes: int
    wait_ms: int


class Counted(NamedTuple):
    """The bytes are the lease's, by a result that is known."""


BytesAnswer = Counted | Failure
"""Bytes of a quota, or the failure that the tenant is told: DENIED if the quota is used up, else as for a name."""

ClaimAnswer = Claimed | Failure
"""A claim, or the failure that the tenant is told: BUSY if another node may do or a later try, else DENIED."""


class Claims(Protocol):
    """The claims of names and of quotas' bytes that this node has in its fleet.

    Attributes:
        labels: Labels of this node; a lease that asks for others is refused.
    """

    @property
    def labels(self) -> Mapping[str, str]:
        """Labels of this node."""

    def refusal(self) -> Failure | None:
        """Return why no lease is granted now, one without a name either; None if leases are."""

    def claim(self, want: ClaimWant, on_answer: Callable[[ClaimAnswer], None]) -> Callable[[], None]:
        """Ask for a name. Calls `on_answer` once, perhaps before this method returns.

        Returns:
            A function that gives the wish up. `on_answer` is not called after it, and a claim that is made all the
            same is released. After the answer it does nothing.
        """

    def release(self, name: str, epoch: int) -> None:
        """End a claim: nothing of its lease is left. A claim that is not there, or is a later one, stays untouched."""

    def keep(self) -> None:
        """Take in that a claimed lease has ended, FENCED: its claims stay until an operator clears the fence."""

    def count(self, want: BytesWant, on_answer: Callable[[BytesAnswer], None]) -> Callable[[], None]:
        """Ask for bytes of a quota, as `claim` asks for a name; returns what that returns."""

    def give_back(self, tenant: str, lease_id: int) -> None:
        """Give a lease's bytes of a quota back: nothing of the lease is left. If it has none, nothing happens."""


def release_all(claims: Claims, tenant: str, lease_id: int, held: LeaseTerms | LeaseSnapshot) -> None:
    """End all that a lease has claimed: nothing of the lease is left, or it was never granted."""
    if held.epoch:
        claims.release(held.name, held.epoch)
    if held.fleet_bytes:
        claims.give_back(tenant, lease_id)


class NoFleet:
    """The claims of a node that is in no fleet: every name is refused."""

    labels: Mapping[str, str] = MappingProxyType({})

    def refusal(self) -> Failure | None:
        """Implement `Claims.refusal`: nothing is refused."""
        return None

    def claim(self, want: ClaimWant, on_answer: Callable[[ClaimAnswer], None]) -> Callable[[], None]:
        """Implement `Claims.claim`."""
        on_answer(
            Failure(
                Status.UNSUPPORTED,
                f"this node is in no fleet, so no lease can have the name {want.name!r} here",
                hint="Leave the name out, or ask a node of a fleet: its operator starts it with --fleet.",
            )
        )
        return _nothing

    def release(self, name: str, epoch: int) -> None:
        """Implement `Claims.release`: there are none."""

    def keep(self) -> None:
        """Implement `Claims.keep`: there are none."""

    def count(self, want: BytesWant, on_answer: Callable[[BytesAnswer], None]) -> Callable[[], None]:
        """Implement `Claims.count`. The settings give nobody such a quota; if they did, it would be used up."""
        text = f"tenant {want.tenant!r} has a quota in the fleet, and this node is in no fleet"
        on_answer(Failure(Status.DENIED, text, hint="The node's operator gives it a [fleet] table."))
        return _nothing

    def give_back(self, tenant: str, lease_id: int) -> None:
        """Implement `Claims.give_back`: there are none."""


def _nothing() -> None:
    """Give nothing up."""


NO_FLEET: Final = NoFleet()
