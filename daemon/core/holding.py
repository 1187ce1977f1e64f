"""For how long a tenant's waiters may hold others back."""

from typing import Final

from gpulease.daemon.core.limits import NS_PER_S, CoreLimits

TERM_SPACING: Final = 10
"""From the beginning of a tenant's term to that of its next, in lengths of a term."""


class HoldTerms:
    """The last term of each tenant.

    A tenant's term begins when an acquire of it joins the line, and lasts for `max_hold_back_s` by the clock,
    whatever becomes of that acquire. Those that join during the term may hold others back until its end; those that
    join later may not at all. An acquire that joins `TERM_SPACING` lengths after the beginning, or later, begins the
    next term. So the time is counted per tenant, and to leave the line and queue again gains nothing.

    In any window of `TERM_SPACING` lengths H, the tenant holds others back for at most one: a window that begins x
    into a term (x < H) has H - x left of it and at most x of the next, and any other meets at most one term.

    Kept is one time per tenant, until its next term may begin, and never more than `max_waiting` of them: a tenant
    that finds no room holds nobody back. The terms lie in the order they began, so the outdated ones are in front.
    """

    def __init__(self, limits: CoreLimits) -> None:
        self.length_ns = limits.max_hold_back_s * NS_PER_S
        self.max_terms = limits.max_waiting
        self.begun_ns: dict[str, int] = {}

    def end_for(self, tenant: str, now_ns: int) -> int:
        """Until when an acquire that joins the line now may hold others back; not after `now_ns` if it may not."""
        self._forget(now_ns)
        begun_ns = self.begun_ns.get(tenant)
        if begun_ns is None:
            if len(self.begun_ns) >= self.max_terms:
                return now_ns
            begun_ns = self.begun_ns[tenant] = now_ns
        return begun_ns + self.length_ns

    def _forget(self, now_ns: int) -> None:
        while self.begun_ns:
            tenant, begun_ns = next(iter(self.begun_ns.items()))
            if now_ns < begun_ns + TERM_SPACING * self.length_ns:
                return
            del self.begun_ns[tenant]
