"""How often one tenant is written of: what it can repeat at will must not fill the log, nor push others out of it."""

from dataclasses import dataclass
from typing import Final

BURST_RECORDS: Final = 600
"""Of a tenant, before anything is omitted: more than an honest one has in minutes."""

RECORDS_PER_S: Final = 1
"""From then on: 30 MB a day of a tenant that does nothing but be denied."""

MAX_TENANTS: Final = 4096
"""Told apart; more than a host has users. The others share one budget."""

_NS_PER_S: Final = 1_000_000_000


@dataclass(slots=True)
class _Budget:
    left_ns: int
    at_ns: int
    omitted: int = 0


class Budgets:
    """A token bucket for each tenant, and how much of it was omitted."""

    def __init__(self) -> None:
        self._budgets: dict[str, _Budget] = {}

    def spend(self, tenant: str, now_ns: int) -> int | None:
        """How many were omitted before this one if it is to be written, else None: it is omitted too."""
        cost_ns = _NS_PER_S // RECORDS_PER_S
        full_ns = BURST_RECORDS * cost_ns
        if tenant not in self._budgets and len(self._budgets) >= MAX_TENANTS:
            tenant = ""
        budget = self._budgets.setdefault(tenant, _Budget(full_ns, now_ns))
        budget.left_ns = min(full_ns, budget.left_ns + now_ns - budget.at_ns)
        budget.at_ns = now_ns
        if budget.left_ns < cost_ns:
            budget.omitted += 1
            return None
        budget.left_ns -= cost_ns
        omitted, budget.omitted = budget.omitted, 0
        return omitted

    def take_omitted(self) -> dict[str, int]:
        """What was omitted and not told yet, by tenant."""
        left = {tenant: budget.omitted for tenant, budget in self._budgets.items() if budget.omitted}
        for budget in self._budgets.values():
            budget.omitted = 0
        return left
