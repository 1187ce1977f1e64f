"""Chains: launches that follow each other repeatedly, queued by one driver call.

If several launches wait one after the other, the driver's calls are the bottleneck. A card's driver takes a graph of 16
kernels, with all parameters set again, in the time of four launches. So the plans that follow each other become a
chain, which native code replays whenever as many frames of these plans have arrived. The memory that a chain takes on
the card must fit in the lease's allowance, because it is charged to no tenant.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Final

from gpulease.daemon.drivers.interface import MAX_CHAIN, DriverError, KernelStep, LaunchRejected, NativeChain
from gpulease.daemon.session.launches import Plan
from gpulease.daemon.session.ledger import Ledger
from gpulease.daemon.session.native.layout import ChainStep, LaunchChainRecord

GATHER_AFTER: Final = 1024
"""Number of launches that have waited in a row before a chain is made. Making one takes as long as about a hundred
launches. A context that has had a chain serves no other lease, so short sessions should have none.
"""

LENGTHS: Final = (4, MAX_CHAIN)
"""Lengths of chains, the shorter one first."""

MAX_STARTS: Final = 4
"""Maximum number of plans at which chains begin. Stops a tenant from filling the host with graphs."""


class Chains:
    """The chains of one session.

    Args:
        make: The driver's `NativeLaunch.chain`.
        ledger: The session's ledger.
    """

    def __init__(self, make: Callable[[Sequence[KernelStep]], NativeChain], ledger: Ledger) -> None:
        self._make = make
        self._ledger = ledger
        self._chains: list[NativeChain] = []
        self._starts: list[Plan] = []
        # The records, and the memory that they point to.
        self._kept: list[object] = []

    def add(self, first: Plan) -> None:
        """Make the chains that begin with a plan and contain the plans that followed it last time, where possible."""
        # Too many starts, a chain that exists already, or a plan that only Python can launch.
        if len(self._starts) >= MAX_STARTS or first in self._starts or first.record is None:
            return
        self._starts.append(first)
        # The longer chain's record points to the shorter one, which native code tries if too few frames have arrived.
        shorter = 0
        for length in LENGTHS:
            plans = _followers(first, length)
            if plans is None or (record := self._record(plans, shorter)) is None:
                break
            shorter = ctypes.addressof(record)
        first.record.chain = shorter

    def drop(self) -> None:
        """Release all chains; none of their plans is used again."""
        for chain in self._chains:
            self._ledger.remove_graph(chain.device_bytes)
            chain.close()
        for plan in self._starts:
            if plan.record is not None:
                plan.record.chain = 0
        self._chains.clear()
        self._starts.clear()
        self._kept.clear()

    def _record(self, plans: Sequence[Plan], shorter: int) -> LaunchChainRecord | None:
        # The driver makes and measures the graph, and only then is it counted.
        try:
            chain = self._make([_step(plan) for plan in plans])
        except (DriverError, LaunchRejected):
            return None  # They are launched one by one.
        if not self._ledger.allows(chain.device_bytes):
            chain.close()
            return None
        self._ledger.add_graph(chain.device_bytes)
        self._chains.append(chain)
        # The memory that native code reads: a step for each launch, then the record.
        steps = (ChainStep * len(plans))(
            *(ChainStep(plan.address, params) for plan, params in zip(plans, chain.params, strict=True))
        )
        frames_bytes = sum(plan.pattern.frame_bytes for plan in plans)
        record = LaunchChainRecord(len(plans), frames_bytes, ctypes.addressof(steps), chain.record, shorter)
        self._kept += [steps, record, tuple(plans)]
        return record


def _followers(first: Plan, length: int) -> list[Plan] | None:
    """Return a plan and those that followed it; None if native code can't launch one of them, or one names regions."""
    plans = [first]
    # A plan without a follower repeats itself.
    while len(plans) < length:
        plans.append(plans[-1].follower or plans[-1])
    can_all = all(plan.record is not None and plan.record.launch and not plan.pattern.trailer_bytes for plan in plans)
    return plans if can_all else None


def _step(plan: Plan) -> KernelStep:
    return KernelStep(plan.kernel, plan.grid, plan.block, plan.shared_bytes, bytes(plan.kernel.parameter_bytes))
