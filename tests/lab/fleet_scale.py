"""Measures a fleet: the times of its leases, how soon a name is served again, and how large fleets would behave.

Leases, grants, launches and fail-overs are measured with real daemons on the embedded driver, real directories and a
real etcd. Refusals are simulated, and so are the nodes that send heartbeats to a real etcd.

    PYTHONPATH=.dev python -m tests.lab.fleet_scale --quick
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from gpulease.client.bench.figures import LogLine
from gpulease.client.console.exit_status import MissingPrerequisite
from gpulease.client.console.private_daemon import short_folder, unwound_by_signals
from gpulease.client.console.private_fleet import etcd_program, private_etcd
from gpulease.protocol.json_text import indented_json

from .fleet_fail_over import FAULTS, GOAL_HORIZON_S, STAYS, fails_over, measure_fail_over
from .fleet_leases import measure_leases
from .fleet_tables import fleet_tables

USED: Final = (0.5, 0.9, 0.97)
ORDERS: Final = ("spread", "pack")
MEMBERS: Final = 3
BEAT_S: Final = 5.0
"""Seconds between heartbeats: a sixth of the default membership deadline (horizon)."""

TIMEOUT_S: Final = 1_800.0
"""Longest time for one part, in seconds, so that a part that hangs does not block the run."""

GOAL_PERCENT: Final = 1.0
"""Maximum share of refusals, in percent, if tenants request 90 % of the memory and nodes pack."""

MIN_HORIZON_S: Final = 2
MAX_HORIZON_S: Final = 600
"""Bounds of the membership deadline (horizon) that a daemon accepts, in seconds."""

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The size of one run.

    Attributes:
        nodes: Number of simulated nodes for refusals. Above some hundred nodes, the result does not depend on it.
        beat_nodes: Numbers of simulated nodes that send heartbeats, one for each run.
        beats_for_s: Duration of each such run, in seconds.
        acquires: Number of timed acquires of each kind.
        load_s: Duration of each load of grants, in seconds.
        rounds: Number of rounds of launches, and of each fault.
        launches: Number of pipelined launches in a round.
        horizon_s: The membership deadline (horizon) of the fleets, in seconds.
        faults: Names of the faults.
    """

    nodes: int = 1_000
    beat_nodes: tuple[int, ...] = (1_000, 10_000)
    beats_for_s: float = 20.0
    acquires: int = 300
    load_s: float = 10.0
    rounds: int = 3
    launches: int = 20_000
    horizon_s: int = GOAL_HORIZON_S
    faults: tuple[str, ...] = tuple(FAULTS)


QUICK: Final = FleetPlan(50, (100,), 5.0, 30, 1.0, 1, 5_000, 4, ("daemon", "node", "cut", STAYS))
"""Takes about 90 s on two quiet cores."""


def plan_of(quick: bool, **given: int | None) -> FleetPlan:
    """Return the plan of a normal or a quick run, with its sizes replaced by those that are given."""
    sizes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return replace(QUICK if quick else FleetPlan(), **sizes)


def measure_fleet(plan: FleetPlan, say: LogLine) -> Figures:
    """Measure all parts. Raises MissingPrerequisite, at once if etcd is missing, or GpuLeaseError."""
    etcd_program()
    # Use a short path, because the daemons' sockets are in this folder.
    with unwound_by_signals(), tempfile.TemporaryDirectory(prefix="gpulease-", dir=short_folder()) as name:
        folder = Path(name)
        leases = measure_leases(folder, plan.horizon_s, plan.acquires, plan.load_s, plan.rounds, plan.launches, say)
        fail_over = measure_fail_over(plan.faults, plan.horizon_s, plan.rounds, say)
        return {
            "placement": leases.placement,
            "grants": leases.grants,
            "launches": leases.launches,
            "fail_over": fail_over,
            "refusals": _refusals(plan, say),
            "beats": _beats(plan, folder, say),
        }


def reaches_fleet_goals(found: Figures) -> bool:
    """Return whether packing refuses at most GOAL_PERCENT, and names fail over in time and without an overlap."""
    # The goal is for packing at 90 %: nodes are nearly full, so the placement of leases matters.
    packs_well = all(
        one["refused_percent"] <= GOAL_PERCENT
        for one in found["refusals"]
        if one["order"] == "pack" and one["asked_part"] == 0.9
    )
    return packs_well and fails_over(found["fail_over"])


def _refusals(plan: FleetPlan, say: LogLine) -> list[Figures]:
    found = []
    for used in USED:
        for order in ORDERS:
            say(f"refusals of {plan.nodes:,} simulated nodes, {used:.0%} of their memory asked for, {order}")
            found.append(_figures("placement_refusals", str(plan.nodes), str(used), order))
    return found


def _beats(plan: FleetPlan, folder: Path, say: LogLine) -> list[Figures]:
    found = []
    for count in plan.beat_nodes:
        say(f"beats of {count:,} simulated nodes on {MEMBERS} members of etcd")
        # Use a new etcd for each count, because the data of earlier heartbeats would affect the figures.
        with private_etcd(folder / f"beats-{count}", MEMBERS) as members:
            endpoints = ",".join(member.endpoint for member in members)
            pids = ",".join(str(member.pid) for member in members)
            found.append(_figures("etcd_beats", endpoints, pids, str(count), str(BEAT_S), str(plan.beats_for_s)))
    return found


def _figures(module: str, *arguments: str) -> Figures:
    command = [sys.executable, "-P", str(Path(__file__).with_name(f"{module}.py")), *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False)
    # The figures are the last line; a log may come before them.
    try:
        figures: Figures = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        error = (done.stderr.decode(errors="replace").strip() or "no output").splitlines()[-1]
        raise MissingPrerequisite(f"the fleet can't be measured: {error}. pip install '.[daemon,fleet]'") from None
    return figures


@click.command()
@click.option("--quick", is_flag=True, help="Fewer samples of everything.")
@click.option("--rounds", type=click.IntRange(min=1), help="Rounds of launches, and of each fault: 3, or 1.")
@click.option("--launches", type=click.IntRange(min=1), help="Pipelined launches per round: 20,000, or 5,000.")
@click.option("--leases", "acquires", type=click.IntRange(min=1), help="Timed acquires of each kind: 300, or 30.")
@click.option("--nodes", type=click.IntRange(min=1), help="Nodes with simulated refusals: 1,000, or 50.")
@click.option(
    "--horizon-secs",
    "horizon_s",
    type=click.IntRange(MIN_HORIZON_S, MAX_HORIZON_S),
    help="The membership deadline (horizon): 30, or 4.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def main(quick: bool, as_json: bool, **sizes: int | None) -> None:
    """Measure a fleet; --quick has the second of each pair of sizes. Fails if a name is served twice or too late."""
    try:
        found = measure_fleet(plan_of(quick, **sizes), partial(click.echo, err=True))
    except MissingPrerequisite as error:
        raise click.ClickException(str(error)) from None
    click.echo(indented_json(found) if as_json else fleet_tables(found))
    sys.exit(0 if reaches_fleet_goals(found) else 1)


if __name__ == "__main__":
    main()
