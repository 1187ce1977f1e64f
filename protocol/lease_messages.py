"""The bodies of leases' events, of drains and of fences; see `messages`."""

from dataclasses import dataclass

from gpulease.protocol.primitives import U8, U32, U64, U128, optional, text, wire


@dataclass(frozen=True, slots=True)
class LeaseSubscribe:
    """Hear of a lease's phases; lease 0: of every lease that LEASE_LIST_ACTIVE would show this peer."""

    lease_id: int = wire(U128)


@dataclass(frozen=True, slots=True)
class LeaseUnsubscribe:
    """Hear no more. `subscription` is the request id of the LEASE_SUBSCRIBE."""

    subscription: int = wire(U64)


@dataclass(frozen=True, slots=True)
class LeaseEvent:
    """Where a lease stands now. `sequence` counts a subscription's events from 1, the `lost` ones before this too."""

    lease_id: int = wire(U128)
    sequence: int = wire(U64)
    lost: int = wire(U64)
    phase: int = wire(U8)
    left_ms: int = wire(U32)
    generation: int = wire(U64)
    cause: str = wire(text())
    reason: str = wire(text())


@dataclass(frozen=True, slots=True)
class Drain:
    """Let nobody in, and end what is left in so many milliseconds; operators only."""

    within_ms: int = wire(U32)


@dataclass(frozen=True, slots=True)
class DrainStatus:
    """Time until the drain ends what is left, None if there is no drain; active leases."""

    left_ms: int | None = wire(optional(U32))
    leases: int = wire(U32)


@dataclass(frozen=True, slots=True)
class FenceClear:
    """Grant fenced bytes again, of one card (UUID or index) or of all; operators only."""

    device: str | None = wire(optional(text()))


@dataclass(frozen=True, slots=True)
class FenceCleared:
    """How many fenced slices were let go: those of leases, and of contexts that had none yet."""

    count: int = wire(U32)
