"""Regions in any order with their leases: few leases with many regions, judged from outside as in `simulated`.

Regions are opened, renewed, cancelled and ended, and leases resized. Meanwhile workers hang and die, timers come early,
late or never, answers and proofs get lost, and the daemon is killed and comes back.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from gpulease.daemon.leases.events import FenceClearRequested, PoolTimerFired, ShutdownRequested
from gpulease.daemon.leases.model import LeaseTerms

from .lease_rules import LeaseRules
from .simulated import Shell


class RegionsInAnyOrder(LeaseRules):
    """State machine that begins with a lease of each tenant, which lasts."""

    @initialize(warm_contexts=st.sampled_from([0, 1]))
    def begin(self, warm_contexts: int) -> None:
        self.shell = Shell(warm_contexts)
        self.shell.send(PoolTimerFired())
        for tenant in ("ann", "bob", "cid"):
            self.begin_lease(tenant)

    def begin_lease(self, tenant: str) -> None:
        self.start_lease(tenant, LeaseTerms(100, 6000, submit_bytes=0 if tenant == "ann" else 20))

    @rule(tenant=st.sampled_from(["ann", "bob", "cid"]))
    def begin_another_lease(self, tenant: str) -> None:
        if len(self.shell.alive) < 3:
            self.begin_lease(tenant)

    def teardown(self) -> None:
        shell = self.shell
        shell.finish()
        assert not shell.open_requests, f"requests that were never answered: {shell.open_requests}"
        shell.send(ShutdownRequested())
        shell.finish()
        self.ask(lambda number: FenceClearRequested(number, None))
        shell.leave_alone()
        shell.finish()
        assert not shell.table.regions.snapshots(), "a region outlived its lease"
        assert all(card.held_bytes == 0 for card in shell.table.cards())


FEW = settings(max_examples=20, stateful_step_count=60, deadline=None)
RegionsInAnyOrder.TestCase.settings = FEW
TestRegionsInAnyOrder = RegionsInAnyOrder.TestCase


@pytest.mark.exhaustive
class TestRegionsInManyOrders(TestRegionsInAnyOrder):  # type: ignore[valid-type, misc]
    settings = settings(FEW, max_examples=100)
