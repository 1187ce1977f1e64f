"""No name is served twice, whatever is cut off, stopped or killed: real daemons, real etcd, hosts in namespaces."""

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from gpulease.daemon.fleet.records.fleet_records import held_key, name_key
from helpers.broken_fleet import Design
from helpers.fleet_checker import Verdict, check
from helpers.fleet_nemesis import FASTER_PPM, MEMBERS, WORKER, FleetScene
from helpers.fleet_rig import FLEET_PROCESS
from helpers.waiting import wait_until

NEMESIS_S: Final = float(os.environ.get("GPULEASE_NEMESIS_S", "30"))
"""Seconds during which faults are caused."""

WRONG_PPM: Final = 100_000
"""Millionths by which a clock is wrong. This is far beyond the permitted rate, so that it is detected soon."""

PAIR: Final = ("d0", "d1")
FOR_EVER_S: Final = 1 << 20

LONG_HORIZON_S: Final = 20
"""A horizon so long that another tenant gets the name while a node that is cut off still serves it."""

ETCD_LEASE_S: Final = 6
LEADER_STOPPED_S: Final = 8.0
"""Long enough that all of etcd's leases have expired from the stopped leader's view."""

LEADER_ALONE_S: Final = 1.0
"""Long enough that the leader checks its leases, which it does twice a second."""

REVOKED_AFTER_S: Final = 5.0
"""How long revocations may take. A write that is lost times out after 7 s (etcd, ServerConfig.ReqTimeout)."""

REVOKED_AT_ONCE: Final = 18
"""Number of etcd leases that expire together: more than the 16 that a leader revokes at once (etcd, maxPendingRevokes).
"""

LEADERS_STOPPED: Final = 3


@pytest.mark.first
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
def test_a_node_whose_clock_is_wrong_says_so_and_goes_on(tmp_path: Path) -> None:
    with FleetScene(tmp_path, nodes=("d0", "d1", "d2"), faster_ppm=(*FASTER_PPM[:2], WRONG_PPM)) as scene:
        wrong = scene.nodes["d2"]
        wait_until(lambda: "clocks run" in wrong.fleet_check()["detail"], "d2 knows", seen=wrong.logs)
        with wrong.acquire("alpha"):
            pass
        assert not any(scene.nodes[node].fleet_check()["detail"] for node in PAIR)
        with scene.nodes["d1"].acquire("alpha"):
            names = {info.name: info.pid for info in scene.nodes["d1"].processes()}
            assert any(WORKER.fullmatch(name) for name in names)
            assert {"gpul-zygote", FLEET_PROCESS} < set(names)
            assert all(scene.clocks["d1"].is_of(pid) for pid in names.values()), names


@pytest.mark.exhaustive
def test_a_name_whose_claim_somebody_deleted_is_found(tmp_path: Path) -> None:
    """If claims disappear from etcd, the fleet serves a name twice, and the checker finds that."""
    with FleetScene(tmp_path, LONG_HORIZON_S, PAIR) as scene:
        want_for_ever(scene, "d0")
        with scene.cut(["d0"], MEMBERS):
            for key in (name_key("alpha"), held_key("d0", "alpha")):
                scene.cluster.control("del", key.decode())
            want_for_ever(scene, "d1")
            verdict = check(scene.history())
        assert verdict.overlaps, verdict


@pytest.mark.exhaustive
@pytest.mark.parametrize("design", [Design.TRUST, Design.NOCAP])
def test_a_node_that_serves_on_without_etcd_is_found(tmp_path: Path, design: Design) -> None:
    """The name becomes free when etcd's lease expires, or when another node fences this one.

    Then it is served twice.
    """
    with FleetScene(tmp_path, nodes=PAIR, design=design) as scene:
        want_for_ever(scene, "d0")
        with scene.cut(["d0"], MEMBERS):
            want_for_ever(scene, "d1")
            verdict = check(scene.history())
        print(f"{design.name}: {summary(verdict)}")
        assert verdict.overlaps, verdict


@pytest.mark.exhaustive
def test_leases_of_etcd_that_an_old_leader_revokes_are_found(tmp_path: Path) -> None:
    """A stopped leader considers leases expired that another leader has kept alive (etcd, #15247)."""
    with FleetScene(tmp_path, ETCD_LEASE_S, PAIR, Design.LEASE) as scene:
        want_for_ever(scene, "d0")
        scene.start_tenant(1, ["alpha"], ["d1"], hold_s=FOR_EVER_S)
        verdict, stopped = Verdict(0, 0), 0
        while not verdict.overlaps and stopped < LEADERS_STOPPED:
            stopped += 1
            stop_leader(scene)
            time.sleep(REVOKED_AFTER_S)
            serving = wait_until(lambda: [node for node, names in scene.live().items() if names], "a node serves")
            # If etcd's lease is still there, its names end when that lease expires.
            with scene.cut(serving[:1], MEMBERS):
                time.sleep(ETCD_LEASE_S)
            verdict = check(scene.history())
        print(f"LEASE: etcd's leader stopped {stopped} times, {summary(verdict)}")
        assert verdict.overlaps, verdict


def stop_leader(scene: FleetScene) -> None:
    """Stop etcd's leader until all leases have expired for it. Let it begin to revoke them before it learns of a new
    leader.

    Its first revocations are lost. It revokes at most 16 leases at once, and the others when these writes have timed
    out. By then it follows another leader, to which it forwards the revocations.
    """
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: scene.cluster.control("lease", "grant", str(ETCD_LEASE_S - 1)), range(REVOKED_AT_ONCE)))
    leader = scene.cluster.leader()
    scene.cluster.pause(leader)
    with scene.cut([leader.name], MEMBERS):
        time.sleep(LEADER_STOPPED_S)
        scene.cluster.resume(leader)
        time.sleep(LEADER_ALONE_S)


def want_for_ever(scene: FleetScene, node: str) -> None:
    """Start a tenant that requests the name from that node, and wait until it computes there."""
    scene.start_tenant(PAIR.index(node), ["alpha"], [node], hold_s=FOR_EVER_S)
    wait_until(lambda: any(act.node == node for act in scene.acts()), f"{node} serves the name", seen=scene.logs)


def summary(verdict: Verdict) -> str:
    """Return the line with the counts."""
    return str(verdict).partition("\n")[0]
