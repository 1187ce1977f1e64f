"""No name is served twice, whatever is cut, stopped and killed: real daemons, real etcd, a network in namespaces."""

import os
import random
from pathlib import Path
from typing import Final

import pytest

from gpulease.daemon.fleet.fleet_records import held_key, name_key
from helpers.fleet_checker import check
from helpers.fleet_nemesis import MEMBERS, FleetScene
from helpers.waiting import wait_until

NEMESIS_S: Final = float(os.environ.get("GPULEASE_NEMESIS_S", "90"))
"""Seconds of faults."""

LONG_HORIZON_S: Final = 20
"""Time for another tenant to come while a node that is cut off still serves."""


@pytest.mark.exhaustive
@pytest.mark.timeout(NEMESIS_S + 500)
def test_no_name_is_served_twice_under_any_fault(tmp_path: Path) -> None:
    seed = os.environ.get("GPULEASE_NEMESIS_SEED") or str(random.randrange(1 << 32))
    with FleetScene(tmp_path) as scene:
        scene.start_tenants()
        scene.torment(NEMESIS_S, random.Random(seed))
        scene.settle()
        verdict = check(scene.history())
        print(f"seed {seed}, {scene.faults.total()} faults: {dict(scene.faults)}\n{verdict}")
        assert not verdict.broken, f"seed {seed}: {verdict}"
        assert verdict.leases
        assert verdict.acts


@pytest.mark.exhaustive
def test_a_name_whose_claim_somebody_deleted_is_found(tmp_path: Path) -> None:
    """A fleet whose claims do not stay serves a name twice, and the checker sees it."""
    with FleetScene(tmp_path, LONG_HORIZON_S) as scene:
        scene.start_tenant(0, ["alpha"], ["d0"], hold_s=1 << 20)
        wait_until(lambda: scene.live()["d0"], "d0 serves the name")
        with scene.cut(["d0"], MEMBERS):
            for key in (name_key("alpha"), held_key("d0", "alpha")):
                scene.cluster.control("del", key.decode())
            scene.start_tenant(1, ["alpha"], ["d1"])
            wait_until(lambda: scene.live()["d1"], "d1 serves the name, too")
            verdict = check(scene.history())
        scene.stop_tenants()
        assert verdict.overlaps, verdict
