"""Expected leases of each tenant, stored separately from the table's own state."""

from collections.abc import Iterable
from dataclasses import replace

from gpulease.daemon.leases.devices import Card
from gpulease.daemon.leases.quotas import CoreLimits, TenantLimits, TenantRules

RULES = TenantRules(
    by_name={
        "ann": TenantLimits(max_vram_bytes=600, max_ttl_s=6),
        "bob": TenantLimits(devices=("0", "mig-c"), max_leases=4),
        "cid": TenantLimits(acquires_per_minute=300, acquire_burst=4),
    }
)


NARROW = TenantRules(default=TenantLimits(max_vram_bytes=200, max_leases=1, max_ttl_s=2, devices=("1",)))
WIDE = TenantRules()
"""Other rules that an operator may change to."""


class ExpectedTenants:
    """Leases by tenant.

    Attributes:
        exempt: Tenants that had or awaited a lease when the rules changed.
    """

    def __init__(self, limits: CoreLimits) -> None:
        self.limits = limits
        self.leases: dict[int, tuple[str, int]] = {}
        self.exempt: set[str] = set()

    def change(self, rules: TenantRules, exempt: Iterable[str]) -> None:
        """Apply other rules from now on, except to leases that these tenants have or await."""
        self.limits = replace(self.limits, tenants=rules)
        self.exempt |= set(exempt)

    def check_spawn(self, lease_id: int, tenant: str, size_bytes: int, card: Card, unproved: Iterable[int]) -> None:
        """Check a new lease against its tenant's limits. `unproved` are all leases that may hold bytes."""
        sizes = self.check_growth(lease_id, tenant, size_bytes, unproved)
        if tenant in self.exempt:
            return
        own = self.limits.tenants.of(tenant)
        assert len(sizes) <= (own.max_leases or self.limits.max_leases_per_tenant), "a tenant has too many leases"
        assert own.devices is None or any(map(card.answers_to, own.devices)), "a tenant is on a card it may not use"

    def check_growth(self, lease_id: int, tenant: str, size_bytes: int, unproved: Iterable[int]) -> list[int]:
        """Check that a tenant has no more bytes than it may have. Returns its leases' sizes."""
        self.leases[lease_id] = tenant, size_bytes
        sizes = [size for other in unproved for name, size in (self.leases.get(other, ("", 0)),) if name == tenant]
        bound = None if tenant in self.exempt else self.limits.tenants.of(tenant).max_vram_bytes
        assert sum(sizes) <= (bound or sum(sizes)), "a tenant has more bytes than it may have"
        return sizes

    def max_ttl_s(self, tenant: str) -> int:
        """Return the longest time to live that the tenant may be granted."""
        own = None if tenant in self.exempt else self.limits.tenants.of(tenant).max_ttl_s
        return own or self.limits.max_ttl_s
