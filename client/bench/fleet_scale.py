"""Measure a fleet without its hosts: refusals of simulated nodes, and simulated nodes' beats on a real etcd."""

import json
import subprocess
import sys
from typing import Any, Final

from gpulease.client.bench.figures import Say
from gpulease.client.cli.exit_status import CannotStart

USED: Final = (0.5, 0.9, 0.97)
ORDERS: Final = ("spread", "pack")
NODES: Final = 1_000
QUICK_NODES: Final = 50
"""Simulated nodes for refusals. What a node meets does not depend on how many there are, beyond some hundred."""

BEAT_NODES: Final = (1_000, 10_000)
QUICK_BEAT_NODES: Final = (100,)
MEMBERS: Final = 3
BEAT_S: Final = 5.0
"""A sixth of the horizon at its default."""

BEATS_FOR_S: Final = 20.0
QUICK_BEATS_FOR_S: Final = 5.0
TIMEOUT_S: Final = 1_800.0
"""Seconds for one part; one that hangs must not hang the benchmark."""

GOAL_PERCENT: Final = 1.0
"""Most refusals where tenants ask for 90 % of the memory and nodes pack."""

Figures = dict[str, Any]


def measure_fleet(nodes: int | None, quick: bool, say: Say) -> Figures:
    """Measure all that needs no fleet; `nodes` are those whose refusals are simulated. Raises CannotStart."""
    nodes = nodes or (QUICK_NODES if quick else NODES)
    found: Figures = {"refusals": [], "beats": []}
    for used in USED:
        for order in ORDERS:
            say(f"refusals of {nodes:,} simulated nodes, {used:.0%} of their memory asked for, {order}")
            found["refusals"].append(_figures("placement_refusals", str(nodes), str(used), order))
    for count in QUICK_BEAT_NODES if quick else BEAT_NODES:
        say(f"beats of {count:,} simulated nodes on {MEMBERS} members of etcd")
        seconds = QUICK_BEATS_FOR_S if quick else BEATS_FOR_S
        found["beats"].append(_figures("etcd_beats", str(MEMBERS), str(count), str(BEAT_S), str(seconds)))
    return found


def packs_well(found: Figures) -> bool:
    """Return whether packing refuses as little as it should."""
    return all(
        one["refused_percent"] <= GOAL_PERCENT
        for one in found["refusals"]
        if one["order"] == "pack" and one["asked_part"] == 0.9
    )


def _figures(module: str, *arguments: str) -> Figures:
    command = [sys.executable, "-P", "-m", f"gpulease.daemon.bench.{module}", *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False)
    try:
        figures: Figures = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = (done.stderr.decode(errors="replace").strip() or "no output").splitlines()[-1]
        raise CannotStart(f"the fleet can't be measured: {said}. pip install '.[daemon,fleet]'") from None
    return figures
