"""Members of a fleet against any delay, loss, pause, crash and clock within the bounds, judged from outside.

Three designs that do not hold run in the same machine: it has to find two nodes with one name in each.
"""

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


@pytest.mark.exhaustive
class TestManyFleetOrders(TestFleetOrder):  # type: ignore[valid-type, misc]
    settings = settings(FEW, max_examples=150, stateful_step_count=60)


@pytest.mark.parametrize(
    "design", [Design.TRUST, Design.NOCAP, pytest.param(Design.LEASE, marks=pytest.mark.exhaustive)]
)
def test_the_machine_catches_a_broken_design(design: Design) -> None:
    class BrokenOrder(FleetOrder):
        pass

    BrokenOrder.design = design
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
