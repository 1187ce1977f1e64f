"""Measures how long no node serves a name after its own died or was cut off, or after etcd's leader died."""

import contextlib
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from gpulease.client.bench.figures import LogLine
from gpulease.client.console.exit_status import MissingPrerequisite
from gpulease.client.console.named_tenant import Tenant, Work, acquire_name, overlaps
from gpulease.client.console.private_daemon import PrivateDaemon, short_folder
from gpulease.client.console.private_fleet import EtcdMember, PrivateFleet, leader_of, private_etcd
from gpulease.client.console.transform import transform_ptx

from .cuttable_link import CuttableLink

MEMBERS: Final = 3
NODES: Final = 2
NAME: Final = "model-a"
OTHER_NAME: Final = "model-b"

GOAL_HORIZON_S: Final = 30
GOAL_S: Final = 45.0
"""Longest time from a fault to the first kernel on another node, in seconds, at the default membership deadline
(horizon): one and a half of it.

A node is fenced 1.01 horizons after its last heartbeat was seen: its leases have surely ended by then. At a shorter
horizon, the parts that don't shrink with it weigh more, such as the tenant's retries and the start of its session."""

WAIT_HORIZONS: Final = 4.0
WAIT_S: Final = 60.0
"""Longest wait for a name, in seconds, in addition to WAIT_HORIZONS horizons. A longer wait is an error."""

STEADY_KERNELS: Final = 20
"""Number of kernels that a tenant runs before the fault, and after it on the node that then serves the name."""

LEADER_S: Final = 10.0
_LOOK_S: Final = 0.02

Figures = dict[str, Any]


@dataclass(slots=True)
class _Scene:
    """A fleet of two nodes. node-1 reaches etcd only through the links."""

    members: list[EtcdMember]
    links: list[CuttableLink]
    fleet: PrivateFleet

    @property
    def node(self) -> PrivateDaemon:
        """The daemon of the node that serves the name."""
        return self.fleet.nodes[0]

    def kill_daemon(self) -> None:
        """Kill only the broker: its workers and its fleet process notice that it is gone."""
        self.node.kill()

    def kill_node(self) -> None:
        """Kill all processes of the node, as if its host were lost."""
        self.node.kill_all()

    def cut_node(self) -> None:
        """Discard everything between the node and etcd."""
        for link in self.links:
            link.cut()

    def kill_leader(self) -> None:
        """Kill the member of etcd that leads. Raises MissingPrerequisite without a leader."""
        # An election may be in progress.
        until_s = time.monotonic() + LEADER_S
        while (leader := leader_of(self.members)) is None:
            if time.monotonic() > until_s:
                raise MissingPrerequisite("etcd has no leader")
            time.sleep(_LOOK_S)
        leader.kill()

    def kill_leader_and_node(self) -> None:
        """Kill etcd's leader and all processes of the node."""
        self.kill_leader()
        self.kill_node()


FAULTS: Final[Mapping[str, Callable[[_Scene], None]]] = {
    "daemon": _Scene.kill_daemon,
    "node": _Scene.kill_node,
    "cut": _Scene.cut_node,
    "leader and node": _Scene.kill_leader_and_node,
    "leader": _Scene.kill_leader,
}
"""Faults by name. After the last one the node still serves its name, so the second tenant requests another name."""

STAYS: Final = "leader"


def measure_fail_over(faults: Sequence[str], horizon_s: int, rounds: int, say: LogLine) -> Figures:
    """Measure each of these faults `rounds` times, each time in a new fleet, because a killed node is not restarted.

    Raises MissingPrerequisite, or GpuLeaseError if no node serves the name again.
    """
    found: Figures = {
        "horizon_s": horizon_s,
        "goal_s": GOAL_S if horizon_s == GOAL_HORIZON_S else None,
        "faults": [],
    }
    # Use a new fleet for each run, because a killed node is not restarted.
    for fault in faults:
        runs = []
        for number in range(1, rounds + 1):
            say(f"fail-over, {fault}, {number} of {rounds}, a horizon of {horizon_s} s")
            runs.append(_run(fault, horizon_s))
        found["faults"].append(_summary(fault, runs))
    return found


def fails_over(found: Figures) -> bool:
    """Return whether no name was served twice, epochs rose, and no time exceeded the goal, if there is one."""
    goal_s = found["goal_s"] or math.inf
    return all(
        one["overlaps"] == 0 and one["epochs_rise"] and one["served_again_max_s"] <= goal_s for one in found["faults"]
    )


def _summary(fault: str, runs: list[Figures]) -> Figures:
    # Collect the same figure of all runs, in the order of the runs.
    def column(name: str) -> list[Any]:
        return [run[name] for run in runs]

    return {
        "fault": fault,
        "runs": len(runs),
        "served_again_s": column("served_again_s"),
        "served_again_median_s": statistics.median(column("served_again_s")),
        "served_again_max_s": max(column("served_again_s")),
        "ended_after_s": column("ended_after_s"),
        "session_ends": column("session_end"),
        "longest_gap_ms": column("longest_gap_ms"),
        "overlaps": sum(column("overlaps")),
        "epochs_rise": all(column("epochs_rise")),
    }


@contextlib.contextmanager
def _scene(horizon_s: int) -> Iterator[_Scene]:
    # etcd and daemons end with this block, in the reverse order.
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpulease-", dir=short_folder())))
        members = stack.enter_context(private_etcd(folder / "etcd", MEMBERS))
        endpoints = [member.endpoint for member in members]
        # Only the first node goes through the links, so only it can be cut off.
        links = [stack.enter_context(contextlib.closing(CuttableLink(endpoint))) for endpoint in endpoints]
        fleet = stack.enter_context(PrivateFleet(folder, endpoints, horizon_s))
        fleet.open_directory()
        fleet.add(NODES, [link.endpoint for link in links])
        fleet.await_nodes()
        yield _Scene(members, links, fleet)


def _run(fault: str, horizon_s: int) -> Figures:
    """Serve a name on one node, cause the fault, and let another tenant ask the fleet immediately."""
    with _scene(horizon_s) as scene, contextlib.ExitStack() as stack:
        # Longer horizons need longer waits: a node is fenced after one.
        wait_s = WAIT_S + WAIT_HORIZONS * horizon_s
        first = acquire_name(scene.node.address, NAME, wait_s)
        before = stack.enter_context(_computing(Tenant(first, transform_ptx())))
        # The first tenant works steadily before the fault.
        before.await_kernels(STEADY_KERNELS)
        fault_s = time.monotonic()
        FAULTS[fault](scene)
        # The second tenant asks at once, as a client that notices the failure would.
        second = acquire_name(scene.fleet.address, OTHER_NAME if fault == STAYS else NAME, wait_s)
        after = stack.enter_context(_computing(Tenant(second, transform_ptx())))
        after.await_kernels(STEADY_KERNELS)
        if not after.work.spans:
            raise MissingPrerequisite(f"the session of the second lease ended at once: {after.work.end}")
        # The first session must end by itself; only with an intact node is it stopped.
        if fault != STAYS:
            before.join()
        before.stop()
        return _figures(before.work, after.work, fault, fault_s) | {"epochs_rise": second.epoch > first.epoch}


@contextlib.contextmanager
# Stopped in any case, so that no thread outlives the fleet.
def _computing(tenant: Tenant) -> Iterator[Tenant]:
    tenant.start()
    try:
        yield tenant
    finally:
        tenant.stop()


def _figures(before: Work, after: Work, fault: str, fault_s: float) -> Figures:
    # The session's last kernels: those that ended after the fault, and the gaps between them.
    ends_s = [fault_s, *(end_s for _, end_s in before.spans if end_s > fault_s)]
    gap_s = max((later - earlier for earlier, later in pairwise(ends_s)), default=0.0)
    is_over = fault != STAYS
    return {
        "served_again_s": round(after.spans[0][1] - fault_s, 3),
        "ended_after_s": round(ends_s[-1] - fault_s, 3) if is_over else None,
        "session_end": before.end,
        "longest_gap_ms": None if is_over else round(1e3 * gap_s, 1),
        "overlaps": overlaps(before, after) if is_over else 0,
    }
