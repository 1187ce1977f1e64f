"""A fleet after a network cut: when the nodes are back, and what happens to claims whose reply was lost."""

from pathlib import Path
from typing import Final

import pytest

from gpulease.client import GpuLeaseError
from helpers.fleet_nemesis import MEMBERS, FleetScene
from helpers.waiting import wait_until

PAIR: Final = ("d0", "d1")
HORIZON_S: Final = 12
"""So long that what a beat finds is deleted before the next beat, even on a busy host."""


@pytest.mark.exhaustive
def test_all_are_back_within_two_beats_and_no_claim_is_orphaned(tmp_path: Path) -> None:
    with FleetScene(tmp_path, HORIZON_S, PAIR) as scene:
        scene.start_tenants()
        wait_until(lambda: all(scene.live().values()), "each node serves names")
        with scene.cut(PAIR, MEMBERS):
            for node in scene.nodes.values():
                node.wait_until_isolated()
            scene.stop_tenants()
            wait_until(lambda: not any(scene.live().values()), "no name is served")
            assert scene.claims(), "they are claimed still"
            before = scene.beats()
        wait_until(lambda: all(scene.beats()[node] >= before[node] + 2 for node in PAIR), "two beats of each")
        assert not [node for node in scene.nodes.values() if node.fleet_check()["detail"]]
        assert scene.claims() == []


@pytest.mark.exhaustive
def test_a_claim_that_was_made_though_its_answer_was_lost_grants_nothing(tmp_path: Path) -> None:
    with FleetScene(tmp_path, HORIZON_S, PAIR) as scene:
        first, second = scene.nodes.values()
        with scene.cut(MEMBERS, PAIR[:1], one_way=True):
            with pytest.raises(GpuLeaseError, match="did not answer"):
                first.builder("alpha").acquire()
            (claim,) = wait_until(scene.claims, "etcd has the claim")
            assert (claim.name, claim.node) == ("alpha", PAIR[0])
            assert not first.now.leases()
        with second.acquire("alpha") as lease:
            assert lease.epoch > claim.epoch
            assert not first.now.leases()
