"""Every bound the lease core enforces, each with the mistake or attack it stops."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Final

from gpulease.daemon.core.leases import Cause
from gpulease.daemon.core.tenants import TenantRules

NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000

# Kernels in flight may finish for this long after new work is refused; where a cause is absent, none may: the
# tenant has said it is done, or there is nothing left that could finish.
DEFAULT_GRACE_MS: Final = MappingProxyType(
    {Cause.EXPIRED: 20, Cause.REVOKED: 20, Cause.SHUTDOWN: 20, Cause.DRAINED: 20}
)


MAX_GRACE_MS: Final = 10_000
"""Of an ended lease, whose kernels run and whose memory nobody else gets meanwhile: more is a number in another unit. A
daemon that ends waits for no longer, either."""


_MAY_BE_ZERO: Final = frozenset({"max_tombstones", "orphan_s"})


@dataclass(frozen=True, slots=True)
class CoreLimits:
    """The bounds of one node; going over one is a denial that names it.

    Raises:
        ValueError: A bound is negative, or zero where nothing could ever be granted, or a grace is too long.
    """

    # A tenant that asks for a year, or mixes up seconds and milliseconds, would hold the card until a restart.
    max_ttl_s: int = 86_400
    # A lease of nothing still costs a process and a context.
    min_size_bytes: int = 1
    # Every live lease is a worker process: this bounds pids, file descriptors and the broker's memory.
    max_leases: int = 4096
    # One tenant in a loop must not use up max_leases for all the others.
    max_leases_per_tenant: int = 256
    # Each return of bytes walks the queue once: this bounds that walk, and the memory of those who wait.
    max_waiting: int = 256
    # One tenant must not fill the queue for all the others.
    max_waiting_per_tenant: int = 64
    # A tenant that waits for a whole card, and queues again whenever it is sent away, would keep others off bytes
    # that are free. Its waiters together hold others back for no longer than this, in any window ten times as long.
    max_hold_back_s: int = 10
    # A wait without an end keeps a connection and a place in the queue for a client that may have forgotten it.
    max_wait_s: int = 3600
    # Tenants differ: what the node's operator lets each of them have.
    tenants: TenantRules = field(default_factory=TenantRules)
    # A client that was killed would hold its slice to the end of its time: so long may a lease be without a connection
    # if its tenant does not say how long. 0: for as long as it lasts.
    orphan_s: int = 0
    # Ended leases are remembered so that a late call learns why; a tenant that cycles leases must not fill memory.
    max_tombstones: int = 65_536
    # A lease renewed every second for a day would otherwise carry 86,400 story entries.
    max_story_entries: int = 64
    # A driver that hangs in cuInit would keep its bytes and its requester for ever.
    spawn_timeout_s: int = 60
    # A context made ahead that hangs must not hold up the lease that takes it for longer; it gets a new one then.
    adopt_timeout_s: int = 2
    # A process that can't be reaped, or bytes that do not come back, must become visible as a fence.
    reclaim_timeout_s: int = 30
    # A kernel that never ends must not outlive its lease by more than this.
    grace_ms: Mapping[Cause, int] = field(default_factory=lambda: DEFAULT_GRACE_MS)

    def __post_init__(self) -> None:
        for entry in fields(self):
            bound = getattr(self, entry.name)
            if isinstance(bound, int) and bound < 1 and entry.name not in _MAY_BE_ZERO:
                raise ValueError(f"{entry.name} is {bound}; it must be at least 1.")
        if min(self.max_tombstones, self.orphan_s, *self.grace_ms.values()) < 0:
            raise ValueError("max_tombstones, orphan_s and every grace must be at least 0.")
        for cause, grace in self.grace_ms.items():
            if grace > MAX_GRACE_MS:
                raise ValueError(
                    f"grace_ms.{cause.value} is {grace}; it must be at most {MAX_GRACE_MS}, in milliseconds."
                )

    def max_leases_of(self, tenant: str) -> int:
        """How many leases a tenant may have or await."""
        own = self.tenants.of(tenant).max_leases
        return self.max_leases_per_tenant if own is None else own

    def grace_ns(self, cause: Cause) -> int:
        """How long work in flight may go on after a lease ended for `cause`, in nanoseconds."""
        return self.grace_ms.get(cause, 0) * NS_PER_MS
