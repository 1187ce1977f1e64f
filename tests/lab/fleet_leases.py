"""Measures leases through a fleet's directory, with and without a name, and launches, compared with a single host."""

import contextlib
import itertools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpulease.client import GpuBuilder
from gpulease.client.bench.figures import Figures, LogLine, load_figures, medians, percentiles_ms
from gpulease.client.bench.session_speed import hot_path
from gpulease.client.console.private_fleet import PrivateFleet, end_all, lasting_daemon, private_etcd
from gpulease.client.console.transform import transform_ptx

MEMBERS: Final = 3
"""Number of members of etcd, as in a usual fleet."""

DAEMONS: Final = (1, 3, 5)
"""Numbers of nodes for which the rate of grants is measured."""

TIMED_DAEMONS: Final = 3
"""Number of nodes with which placements and launches are timed."""

AT_A_TIME: Final = 8
"""Number of acquires in progress at the same time in a load."""

SLICE_BYTES: Final = 1 << 20
LEASE_S: Final = 60
SAMPLES: Final = 500
"""Number of launches with a sync that are timed individually in a round."""

HOST: Final = "host"
ANONYMOUS: Final = "anonymous"
NAMED: Final = "named"
FLEET_KINDS: Final = (ANONYMOUS, NAMED)
LAUNCH_ROWS: Final = ("launch_pipelined_us", "launch_own_us", "launch_sync_p50_us")
"""Figures of a session that a fleet must not make slower."""


@dataclass(frozen=True, slots=True)
class LeaseFigures:
    """Figures of a fleet's leases.

    Attributes:
        placement: Times of an acquire by kind, and the ratio of each kind to the single host.
        grants: Rates of grants by number of nodes and kind; the single host counts as 0 nodes.
        launches: Times of calls in a session on the host and on a node, and their ratio.
    """

    placement: dict[str, Figures]
    grants: list[dict[str, object]]
    launches: dict[str, Figures]


class _Leases:
    """Acquires leases of each kind: from a daemon without a fleet; from a fleet, without a name or with a new one."""

    def __init__(self, host: str, fleet: str) -> None:
        self._addresses = {HOST: host, ANONYMOUS: fleet, NAMED: fleet}
        self._numbers = itertools.count()

    def acquire_s(self, kind: str) -> float:
        """Acquire and free one lease. Returns the seconds until it was granted."""
        builder = GpuBuilder(self._addresses[kind]).min_vram(SLICE_BYTES).lease_secs(LEASE_S)
        # Use a new name each time, because a name is free only after the end of its lease.
        if kind == NAMED:
            builder = builder.name(f"bench-{next(self._numbers)}")
        began_s = time.perf_counter()
        lease = builder.acquire()
        took_s = time.perf_counter() - began_s
        lease.free()
        return took_s


def measure_leases(
    folder: Path, horizon_s: int, acquires: int, load_s: float, rounds: int, launches: int, say: LogLine
) -> LeaseFigures:
    """Measure placements, grants per second and launches on private daemons in a new folder.

    Args:
        folder: For the files of all processes.
        horizon_s: The fleet's membership deadline (horizon), in seconds.
        acquires: Number of timed acquires of each kind; the kinds take turns.
        load_s: Duration of each load of grants, in seconds.
        rounds: Number of rounds of launches; host and node take turns.
        launches: Number of pipelined launches in a round.
        say: Receives a line about each measurement.

    Raises MissingPrerequisite, or GpuLeaseError.
    """
    home = folder / "host"
    home.mkdir(parents=True)
    with (
        private_etcd(folder / "etcd", MEMBERS) as members,
        contextlib.ExitStack() as stack,
        PrivateFleet(folder, [member.endpoint for member in members], horizon_s) as fleet,
    ):
        # The host without a fleet keeps its leases in a state folder, as a node does.
        host = lasting_daemon(home)
        stack.callback(end_all, host)
        host.start()
        # With "spread", all nodes get leases. "pack" would fill one node before the next.
        fleet.open_directory("spread")
        leases = _Leases(host.address, fleet.address)
        say(f"grants a second of one daemon without a fleet, {AT_A_TIME} at a time")
        found = LeaseFigures({}, [_grants(leases, 0, HOST, load_s)], {})
        # Grow the fleet step by step, and measure at each size.
        for count in DAEMONS:
            fleet.add(count - len(fleet.nodes))
            fleet.await_nodes()
            for kind in FLEET_KINDS:
                say(f"grants a second of {count} daemons, {kind}, {AT_A_TIME} at a time")
                found.grants.append(_grants(leases, count, kind, load_s))
            if count == TIMED_DAEMONS:
                say(f"{acquires} placements of each kind in a fleet of {count}, and on one host")
                found.placement.update(_placements(leases, acquires))
                say(f"launches at a node of it, and on one host, {rounds} rounds")
                found.launches.update(_launches(host.address, fleet.nodes[0].address, rounds, launches))
        return found


def _grants(leases: _Leases, daemons: int, kind: str, load_s: float) -> dict[str, object]:
    figures = load_figures(lambda: leases.acquire_s(kind), AT_A_TIME, load_s)
    return {"daemons": daemons, "kind": kind, "at_a_time": AT_A_TIME} | _rounded(figures)


def _placements(leases: _Leases, count: int) -> dict[str, Figures]:
    """Time acquires. The kinds take turns, and each is first, second and third equally often."""
    took_s: dict[str, list[float]] = {HOST: [], ANONYMOUS: [], NAMED: []}
    kinds = list(took_s)
    for number in range(count):
        first = number % len(kinds)
        for kind in kinds[first:] + kinds[:first]:
            took_s[kind].append(leases.acquire_s(kind))
    # Also return ratios to the single host in the same run, which depend little on the host's speed.
    found = {kind: percentiles_ms(samples) for kind, samples in took_s.items()}
    ratio = {
        f"{kind}_{name[:3]}": found[kind][name] / found[HOST][name] for kind in FLEET_KINDS for name in found[HOST]
    }
    return {kind: _rounded(figures) for kind, figures in (found | {"ratio": ratio}).items()}


def _launches(host: str, node: str, rounds: int, launches: int) -> dict[str, Figures]:
    """Time calls in a session of an anonymous lease, on the host and on the node in turn."""
    found: dict[str, list[Figures]] = {"host": [], "node": []}
    addresses = {"host": host, "node": node}
    # Each comes first in every second round.
    for number in range(rounds):
        for name in ("host", "node") if number % 2 == 0 else ("node", "host"):
            figures = hot_path(addresses[name], transform_ptx(), launches, SAMPLES)
            found[name].append({row: figures[row] for row in LAUNCH_ROWS})
    both = {name: medians(figures) for name, figures in found.items()}
    ratio = {row: both["node"][row] / both["host"][row] for row in LAUNCH_ROWS}
    return both | {"ratio": _rounded(ratio)}


def _rounded(figures: Figures) -> Figures:
    return {name: round(value, 3) for name, value in figures.items()}
