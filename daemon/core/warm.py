"""One context of the pool: a worker with an open context and no lease."""

from dataclasses import dataclass
from enum import Enum
from typing import Final

FIRST_WARM_ID: Final = 1 << 128
"""Warm contexts have numbers from here on, above every lease id: workers, timers and proofs are told apart by them."""

FIRST_LEFT_ID: Final = FIRST_WARM_ID + (1 << 127)
"""What leases left behind that ended under an earlier daemon has numbers from here on, as if it were a warm context:
above those that an earlier daemon's own contexts may be found to have."""


class WarmState(Enum):
    """Where a warm context is in its life; one that a lease takes is the lease's from then on."""

    WARMING = "warming"
    READY = "ready"
    DROPPING = "dropping"
    FENCED = "fenced"


# Those that go when a lease needs their room.
YIELDING: Final = frozenset({WarmState.WARMING, WarmState.READY})


@dataclass(frozen=True, slots=True)
class WarmSnapshot:
    """What one warm context was at one moment; `is_recycled`: it has served a tenant, whom it waits for."""

    warm_id: int
    card_uuid: str
    state: WarmState
    is_recycled: bool = False


@dataclass(slots=True)
class WarmContext:
    """A worker in the pool as the table keeps it; only the pool changes it.

    Attributes:
        charge_bytes: What it holds of its card: one context's overhead.
        due_ns: When one that is WARMING is given up, the slice of one that is DROPPING is fenced, or one that is READY
            and a tenant's is dropped.
        is_worker_gone: Its process was reaped, so a proof of its bytes means something.
        reason: Why it goes, "" while it does not.
        is_restored: An earlier daemon's.
        tenant: Whose leases alone it may serve, since it served one of them; None of one that served nobody.
        leases: How many it served.
    """

    warm_id: int
    card_uuid: str
    charge_bytes: int
    due_ns: int
    state: WarmState = WarmState.WARMING
    is_worker_gone: bool = False
    reason: str = ""
    is_restored: bool = False
    tenant: str | None = None
    leases: int = 0

    @property
    def waits_for_tenant(self) -> bool:
        """Whether it is ready, for the tenant alone whom it has served."""
        return self.state is WarmState.READY and self.tenant is not None

    def snapshot(self) -> WarmSnapshot:
        """The context as it is now."""
        return WarmSnapshot(self.warm_id, self.card_uuid, self.state, self.tenant is not None)
