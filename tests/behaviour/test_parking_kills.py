"""kill -9 of the worker, the broker or the zygote in every step of a park and a return, and workers that stop there.

A worker stops itself in a step (`helpers.stopping_worker`), and then the test kills a process. A session that continues
has all its bytes. A session that ends has one end, and its bytes on the card and on the host are free.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gpulease.client import Busy, GpuLeaseError, GpuSessionFailed, RegionFenced, RegionRevoked
from helpers.parking_scene import MIB, PART, SLICE, InBackground, Parked, ParkingNode, own_node
from helpers.stopping_worker import (
    ARRIVE_STEPS,
    KILL_STEPS,
    LEAVE_STEPS,
    MOVE_KILL_STEPS,
    PARK_STEPS,
    RETURN_STEPS,
    STEPS,
)
from helpers.waiting import PATIENCE_S, wait_until


@pytest.fixture(scope="module")
def _nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ParkingNode]]:
    """Yield the node of all tests that need no other one. After a failed test, there is a new one."""
    nodes: list[ParkingNode] = []
    yield nodes
    for node in nodes:
        node.lasting.stop()


@pytest.fixture
def node(_nodes: list[ParkingNode], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ParkingNode]:
    if not _nodes:
        _nodes.append(ParkingNode(tmp_path_factory.mktemp("node")))
    (node,) = _nodes
    yield node
    try:
        node.rest()
    except BaseException:
        _nodes.clear()
        node.lasting.discard()
        raise


def until_stopped(scene: Parked, step: str) -> InBackground:
    """Park the session; for a step of the return, also use it again. Returns once the worker has stopped itself."""
    if step in RETURN_STEPS:
        scene.lease.park()
        doing = InBackground(scene.check)
    else:
        doing = InBackground(scene.lease.park)
    wait_until(lambda: scene.is_stopped, f"the worker stops at {step}")
    return doing


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", STEPS)
def test_a_killed_broker_finds_the_session_in_any_step(step: str, node: ParkingNode) -> None:
    with node.parked(step) as scene:
        doing = until_stopped(scene, step)
        node.restart()
        scene.go_on()
        doing.join(PATIENCE_S)
        assert not doing.is_alive()
        # A park that the killed broker ordered may get no reply, but a request to the session gets one.
        assert step in PARK_STEPS or doing.error is None, doing.error
        # Before any request to the session, one to the broker that needs it. A lost connection opens no region.
        scene.lease.renew(600)
        scene.lease.region(PART).close()
        scene.check()
        scene.lease.park()
        scene.check()
        assert scene.row()["park"]["phase"] == "resident"
        scene.session.close()
        scene.lease.free()
        scene.check_gone()


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", KILL_STEPS)
@pytest.mark.parametrize("whom", ["worker", "zygote", "both, and the broker"])
def test_a_kill_in_any_step_ends_the_lease_once(step: str, whom: str, node: ParkingNode) -> None:
    with node.parked(step, loses_zygote=whom != "worker") as scene:
        doing = until_stopped(scene, step)
        if whom != "worker":
            node.kill_zygote()
        if whom != "zygote":
            # The worker may have died with its zygote.
            with suppress(ProcessLookupError):
                os.kill(scene.pid, signal.SIGKILL)
        if whom == "both, and the broker":
            node.restart()
        doing.join(PATIENCE_S)
        assert not doing.is_alive()
        scene.check_gone()


def on_the_way(node: ParkingNode, scene: Parked, step: str) -> InBackground:
    """Let a session leave its worker, or arrive in another one.

    Returns once a worker has stopped itself at that step.
    """
    if step in LEAVE_STEPS:
        doing = InBackground(scene.leave)
    else:
        scene.leave()
        doing = node.arriving(scene, step)
    wait_until(lambda: scene.is_stopped, f"the worker stops at {step}")
    return doing


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("whom", "step"),
    [
        *(("broker", step) for step in (*LEAVE_STEPS, *ARRIVE_STEPS)),
        *((whom, step) for step in MOVE_KILL_STEPS for whom in ("worker", "zygote")),
        # In these the next broker finds no worker, whatever the step.
        *((whom, step) for step in ("imaged", "arriving") for whom in ("both", "zygote and broker")),
    ],
)
def test_a_kill_on_the_way_to_another_worker(whom: str, step: str, node: ParkingNode) -> None:
    loses_zygote = whom.startswith("zygote")
    with node.parked(step if step in LEAVE_STEPS else "", loses_zygote=loses_zygote) as scene:
        doing = on_the_way(node, scene, step)
        if loses_zygote:
            node.kill_zygote()
            # A worker dies with its zygote, here before it goes on.
            wait_until(lambda: not Path(f"/proc/{scene.pid}").exists(), "the worker has ended")
        if whom in ("worker", "both"):
            os.kill(scene.pid, signal.SIGKILL)
        if whom in ("broker", "both", "zygote and broker"):
            node.restart()
        with suppress(ProcessLookupError):
            scene.go_on()
        doing.join(PATIENCE_S)
        assert not doing.is_alive()
        # If the session has not left its worker, it continues there. Its image was only in the killed broker.
        if whom == "broker" and step in LEAVE_STEPS:
            scene.check()
            scene.leave()
            scene.check()
            scene.session.close()
            scene.lease.free()
        scene.check_gone()


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", [*LEAVE_STEPS, *ARRIVE_STEPS])
def test_a_region_that_is_revoked_on_the_way_to_another_worker(step: str, node: ParkingNode) -> None:
    with node.parked(step if step in LEAVE_STEPS else "") as scene:
        doing = on_the_way(node, scene, step)
        revoking = InBackground(lambda: scene.region.revoke("maintenance"))
        wait_until(lambda: scene.region_row()["state"] != "active", "the region ends")
        scene.go_on()
        for one in (doing, revoking):
            one.join(PATIENCE_S)
            assert not one.is_alive()
        assert revoking.error is None
        for _ in range(2):
            with pytest.raises((RegionRevoked, RegionFenced)):
                scene.session.mem_read(scene.region, 0, 1)
            for mark, part in enumerate(scene.parts[:2], 1):
                assert bytes(scene.session.mem_read(part, 0, PART)) == bytes([mark]) * PART, "wrong bytes"
            wait_until(lambda: scene.region_row()["state"] == "torndown", "the region has ended")
            scene.leave()
        # The memory of the region belongs to the slice again.
        with scene.lease.region(SLICE - 2 * PART) as another:
            assert bytes(scene.session.mem_read(another, 0, PART)) == bytes(PART)
        scene.session.close()
        scene.lease.free()
        scene.check_gone()


@pytest.mark.parametrize("step", ["copying", "copying back"])
def test_a_revoke_ends_a_worker_that_stopped_in_the_middle(step: str, node: ParkingNode) -> None:
    with node.parked(step) as scene:
        doing = until_stopped(scene, step)
        node.lasting.now.revoke(scene.lease.lease_id)
        doing.join(PATIENCE_S)
        assert isinstance(doing.error, GpuLeaseError)
        scene.check_gone()


def test_a_worker_that_stops_in_the_middle_of_a_park_is_answered_for_and_goes_on(tmp_path: Path) -> None:
    with own_node(tmp_path, timeout_s=6) as node, node.parked("copying") as scene:
        doing = until_stopped(scene, "copying")
        doing.join(PATIENCE_S)
        assert isinstance(doing.error, GpuLeaseError)
        assert "park its session" in str(doing.error)
        # The session's bytes stay charged, because nobody knows where they are.
        assert scene.row()["park"]["phase"] == "parking"
        assert node.lasting.now.inventory().details[0]["parked_bytes"] == 0
        scene.go_on()
        wait_until(lambda: scene.row()["park"]["phase"] == "parked", "the park ends after all")
        scene.check()
        scene.session.close()
        scene.lease.free()
        scene.check_gone()


HANGING = ("returning", "returned", "arriving", "adopted")
"""Steps of a return, warm or cold, at which no timer of the lease table runs."""


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ParkingNode]:
    """A node that soon misses a worker's sign of life: after twice the longest sleep of a worker that is idle."""
    constants = {
        "gpulease.daemon.workers.monitors:UNRESPONSIVE_AFTER_S": 10.0,
        "gpulease.daemon.workers.monitors:ROUND_S": 0.05,
    }
    with own_node(tmp_path_factory.mktemp("impatient"), constants=constants) as node:
        yield node


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", HANGING)
def test_a_worker_that_hangs_during_a_return_ends_its_lease(step: str, impatient: ParkingNode) -> None:
    """The wait for a return is bounded by the sign of life that each worker must show."""
    is_cold = step in ARRIVE_STEPS and step not in RETURN_STEPS
    with impatient.parked("" if is_cold else step) as scene:
        doing = on_the_way(impatient, scene, step) if is_cold else until_stopped(scene, step)
        doing.join(PATIENCE_S)
        assert isinstance(doing.error, GpuSessionFailed), doing.error
        scene.check_gone()
        assert scene.row()["cause"] == "unresponsive"


def test_a_host_that_refuses_memory_refuses_the_park_and_says_so(tmp_path: Path) -> None:
    """The kernel refuses a file of the slice's size (RLIMIT_FSIZE), as a host without memory would."""
    within = ("prlimit", f"--fsize={32 * MIB}")
    with own_node(tmp_path, within=within) as node, node.parked(size=64 * MIB) as scene:
        for _ in range(2):
            with pytest.raises(Busy, match="host memory"):
                scene.lease.park()
            scene.check()
        scene.session.close()
        scene.lease.free()
        scene.check_gone()
