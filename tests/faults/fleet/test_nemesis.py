"""No name is served twice, whatever is cut, stopped and killed: real daemons, real etcd, a network in namespaces."""

import os
import random
from pathlib import Path
from typing import Final

import pytest

from helpers.fleet_checker import check
from helpers.fleet_nemesis import FleetScene

NEMESIS_S: Final = float(os.environ.get("GPULEASE_NEMESIS_S", "90"))
"""Seconds of faults."""


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
