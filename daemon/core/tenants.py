"""What one tenant may have: bounds an operator sets for all tenants, and for some by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Final

from gpulease.daemon.core.denials import NS_PER_MS, Denial, too_fast

NS_PER_MINUTE: Final = 60_000_000_000

MAX_RATES: Final = 65_536
"""Tenants whose rate is remembered at a time: as many as a host has ordinary users."""


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """The bounds of one tenant; None: none but the node's own.

    Attributes:
        max_vram_bytes: Of all its leases and all it waits for together, without the contexts' overhead.
        max_leases: Had or awaited; takes the place of the node's `max_leases_per_tenant`.
        max_ttl_s: At a time, at an acquire and at a renewal; never more than the node's.
        acquires_per_minute: Acquires and submits asked for, refused ones too, in the long run.
        acquire_burst: How many of them may come at once.
        devices: The cards it may use, by uuid or index.

    Raises:
        ValueError: A bound is below 1, or the list of cards is empty.
    """

    max_vram_bytes: int | None = None
    max_leases: int | None = None
    max_ttl_s: int | None = None
    acquires_per_minute: int | None = None
    acquire_burst: int = 10
    devices: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for entry in fields(self):
            bound = getattr(self, entry.name)
            if isinstance(bound, int) and bound < 1:
                raise ValueError(f"{entry.name} is {bound}; it must be at least 1")
        if self.devices is not None and not self.devices:
            raise ValueError("devices is empty: name a card, or leave it out")

    def but(self, settings: Mapping[str, Any]) -> "TenantLimits":
        """The same with some bounds of its own."""
        return replace(self, **settings)


@dataclass(frozen=True, slots=True)
class TenantRules:
    """The bounds of every tenant.

    Attributes:
        default: Of those that have none of their own.
        by_name: Of those that have.
    """

    default: TenantLimits = field(default_factory=TenantLimits)
    by_name: Mapping[str, TenantLimits] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, tenant: str) -> TenantLimits:
        """The bounds of one tenant."""
        return self.by_name.get(tenant, self.default)


class AcquireRates:
    """How fast each tenant asks: a token bucket each, kept as the one time at which it will be full again.

    An acquire moves that time on by an interval, and may come while it is less than a burst of intervals ahead (the
    generic cell rate algorithm, ITU-T I.371, as a virtual schedule).
    """

    def __init__(self) -> None:
        self.full_at_ns: dict[str, int] = {}

    def wait_ns(self, tenant: str, limits: TenantLimits, now_ns: int) -> int:
        """How long until the tenant may ask; 0 if it may now, which is then counted."""
        if limits.acquires_per_minute is None:
            return 0
        interval_ns = NS_PER_MINUTE // limits.acquires_per_minute
        full_at_ns = max(self.full_at_ns.get(tenant, 0), now_ns)
        early_ns = full_at_ns + interval_ns - (now_ns + limits.acquire_burst * interval_ns)
        if early_ns > 0:
            return early_ns
        if tenant not in self.full_at_ns and len(self.full_at_ns) >= MAX_RATES:
            self.full_at_ns = {name: due_ns for name, due_ns in self.full_at_ns.items() if due_ns > now_ns}
            if len(self.full_at_ns) >= MAX_RATES:
                return interval_ns
        self.full_at_ns[tenant] = full_at_ns + interval_ns
        return 0

    def denial(self, tenant: str, limits: TenantLimits, now_ns: int) -> Denial | None:
        """Why the tenant may not ask now; None if it may, which is then counted."""
        wait_ns = self.wait_ns(tenant, limits, now_ns)
        if not wait_ns or limits.acquires_per_minute is None:
            return None
        return too_fast(tenant, limits.acquires_per_minute, -(-wait_ns // NS_PER_MS))
