"""Claims of names: a lease with a name is served by one node of its fleet at a time.

A named LEASE_ALLOC is claimed first. The claim's epoch goes into the lease's terms, and the lease is granted only
before the fleet's horizon. The claim ends once the lease's memory is proved free, or an operator vouches for that.
`Runtime.claims` has the node's claims: `NoFleet`, until the node joins a fleet.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

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


ClaimAnswer = Claimed | Failure
"""A claim, or the failure that the tenant is told: BUSY if another node may do or a later try, else DENIED."""


class Claims(Protocol):
    """The claims of names that this node has in its fleet.

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


def _nothing() -> None:
    """Give nothing up."""


NO_FLEET: Final = NoFleet()
