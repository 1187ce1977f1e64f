"""Members of a fleet against any delay, loss, pause, crash and clock within the bounds, judged from outside.

A pause of the whole machine, whose clock stands still, is seen by a reading behind it (`rules.pauses`).

Three designs that do not hold run in the same machine: it has to show two nodes with one name in each.
"""

from contextlib import nullcontext
from enum import Enum
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from .model_fleet import MAX_LATE_S, MAX_PROOF, TERMS, TIMEOUT, TWIN, Broken, Design, Fleet, Node, S

NAMES = st.sampled_from(["model-a", "model-b"])
KEYS = st.sampled_from(["n0", "n1", "n2", TWIN])
RATES = st.sampled_from([1 - TERMS.rho, 1.0, 1 + TERMS.rho])
SECONDS = st.sampled_from([0.01, 0.3, 1, 4, 10, 16, 32, 50])
TWO_BEATS_S = 2 * TERMS.horizon_s / 6
SILENCE_S = TERMS.horizon_s * 0.55
"""Half a horizon by the slowest clock, and a look."""


class Fault(Enum):
    """Faults of a node or of the store."""

    CUT = "cut"
    PAUSE = "pause"
    KILL = "kill"
    RESET = "reset"
    LEADER = "leader"
    SLOW = "slow"


class FleetOrder(RuleBasedStateMachine):
    """State machine that draws the next fault or request."""

    design: ClassVar[Design] = Design.RULES

    @initialize(seed=st.integers(0, 2**32), rates=st.tuples(RATES, RATES, RATES, RATES))
    def begin(self, seed: int, rates: tuple[float, ...]) -> None:
        self.fleet = Fleet(seed, list(rates), self.design)
        self.fleet.advance(1)

    def node(self, key: str) -> Node:
        return self.fleet.nodes[key]

    @rule(seconds=SECONDS)
    def time_passes(self, seconds: float) -> None:
        self.fleet.advance(seconds)

    @rule(key=KEYS, name=NAMES, wait_s=st.sampled_from([0, 5, 100, 300]), seconds=SECONDS)
    def want(self, key: str, name: str, wait_s: float, seconds: float) -> None:
        self.fleet.want(self.node(key), name, wait_s)
        self.fleet.advance(seconds)

    @rule(key=KEYS)
    def end_all(self, key: str) -> None:
        node = self.node(key)
        if node.decider and not node.is_paused:
            for lease in node.living():
                self.fleet.end(node, lease)

    @rule(key=KEYS, fault=st.sampled_from([*Fault, Fault.LEADER]), seconds=SECONDS)
    def fault(self, key: str, fault: Fault, seconds: float) -> None:
        fleet, node = self.fleet, self.node(key)
        match fault:
            case Fault.CUT:
                node.is_cut = True
            case Fault.PAUSE if node.decider:
                fleet.pause(node)
            case Fault.KILL | Fault.RESET if node.runs:
                node.is_paused = False
                fleet.kill(node, fault is Fault.RESET)
            case Fault.LEADER if fleet.has_leader:
                fleet.change_leader(min(seconds, 10))
            case Fault.SLOW:
                fleet.slowness_s = min(seconds, 4)
        fleet.advance(seconds)

    @rule(key=KEYS, remembers=st.booleans())
    def recover(self, key: str, remembers: bool) -> None:
        """End a node's faults."""
        fleet, node = self.fleet, self.node(key)
        node.is_cut = False
        fleet.slowness_s = 0
        if node.is_paused:
            fleet.resume(node)
        if node.decider is None:
            fleet.start(node, remembers)

    @rule(key=KEYS, seconds=st.sampled_from([1, 4, 16, 32, 50]))
    def pause_machine(self, key: str, seconds: float) -> None:
        node = self.node(key)
        if node.decider and not node.is_paused and self.design is Design.RULES:
            self.fleet.pause_machine(node, seconds)

    @rule(key=KEYS)
    def copy_journal(self, key: str) -> None:
        self.fleet.copy_journal(self.node(key))

    @rule(key=KEYS)
    def roll_back(self, key: str) -> None:
        """Kill a daemon whose journal has a copy, and start it with that."""
        fleet, node = self.fleet, self.node(key)
        if node.copy is not None and node.runs:
            node.is_paused = False
            fleet.kill(node, is_reset=False)
            fleet.roll_back(node)
            fleet.start(node, remembers=True)

    @rule()
    def clone(self) -> None:
        """Start the twin with a copy of the first's journal."""
        fleet, twin = self.fleet, self.node(TWIN)
        if twin.decider is None:
            fleet.clone()
            fleet.start(twin, remembers=True)

    @rule()
    def back_up(self) -> None:
        self.fleet.backup = self.fleet.etcd.copy()

    @rule(is_raised=st.booleans(), is_late=st.booleans(), seconds=SECONDS)
    def restore(self, is_raised: bool, is_late: bool, seconds: float) -> None:
        fleet = self.fleet
        if fleet.backup is None or not fleet.has_leader or self.design is not Design.RULES:
            return
        if is_late:
            fleet.restore_late(is_raised)
            fleet.advance(TERMS.horizon_s * (1 + 4 * TERMS.rho))
        else:
            fleet.restore(is_raised)
        fleet.advance(seconds)

    @rule()
    def renew(self) -> None:
        if self.fleet.has_leader:
            self.fleet.renew()

    def teardown(self) -> None:
        """End the faults: all nodes are back within two beats, and no claim is orphaned."""
        if not hasattr(self, "fleet") or self.design is not Design.RULES or self.fleet.is_broken:
            return
        fleet = self.fleet
        fleet.heal()
        # Leases end, their memory is proved free, and requests of before the cut are answered; then two beats.
        fleet.advance((TIMEOUT + 2 * MAX_PROOF) / S + TWO_BEATS_S)
        if fleet.forgot:
            # Who does not know that a record is its own has others' silence to wait for.
            fleet.advance(SILENCE_S)
        fleet.check_back()
        # Requests that were held up are done by now, and claims of earlier daemons are over; then two beats.
        fleet.advance(MAX_LATE_S + TWO_BEATS_S)
        fleet.check_healed()


FEW = settings(max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
FleetOrder.TestCase.settings = FEW
TestFleetOrder = FleetOrder.TestCase


@pytest.mark.first
@pytest.mark.exhaustive
class TestManyFleetOrders(TestFleetOrder):  # type: ignore[valid-type, misc]
    settings = settings(FEW, max_examples=150, stateful_step_count=60)


def test_a_paused_machine_s_name_is_another_s_only_where_a_reading_shows_the_pause() -> None:
    for is_seen in (True, False):
        fleet = Fleet(seed=1, rates=[1.0] * 4)
        fleet.advance(1)
        fleet.want(fleet.nodes["n0"], "model-a", 0)
        fleet.advance(5)
        fleet.want(fleet.nodes["n1"], "model-a", 300)
        # What no reading shows no rule can know: the manual says what a tenant's own stores do about it.
        with nullcontext() if is_seen else pytest.raises(Broken, match="model-a lives on n0 and n1"):
            fleet.pause_machine(fleet.nodes["n0"], 50, is_seen=is_seen)
        assert [lease.name for lease in fleet.nodes["n1"].living()] == ["model-a"]


def test_the_machine_catches_claims_under_etcds_own_leases() -> None:
    fleet = Fleet(seed=0, rates=[1 - TERMS.rho] * 4, design=Design.LEASE)
    fleet.advance(1)
    # One node holds the name and the other waits for it, as an old leader revokes a lease that was kept alive.
    for key, wait_s in (("n1", 100), ("n0", 0)):
        fleet.want(fleet.nodes[key], "model-a", wait_s)
        fleet.advance(0.01)
    fleet.change_leader(10)
    with pytest.raises(Broken, match="model-a lives on n0 and n1"):
        fleet.advance(16)


def test_the_machine_catches_deadlines_without_a_cap() -> None:
    fleet = Fleet(seed=0, rates=[1 - TERMS.rho] * 4, design=Design.NOCAP)
    fleet.advance(1)
    # A node is cut off while it holds a name that another waits for.
    fleet.want(fleet.nodes["n0"], "model-a", 0)
    fleet.advance(0.3)
    fleet.nodes["n0"].is_cut = True
    fleet.advance(10)
    fleet.want(fleet.nodes["n1"], "model-a", 100)
    with pytest.raises(Broken, match="model-a lives on n0 and n1"):
        fleet.advance(TERMS.horizon_s * 2)


def test_the_machine_catches_a_node_that_trusts_its_key() -> None:
    class BrokenOrder(FleetOrder):
        design = Design.TRUST

    found = settings(
        FEW,
        max_examples=2_000,
        stateful_step_count=60,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with pytest.raises(Broken, match="lives on"):
        run_state_machine_as_test(BrokenOrder, settings=found)
