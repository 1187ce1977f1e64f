"""SIGKILL and SIGSTOP of each process of a direct move, in each of its steps.

A worker stops itself in a step (`helpers.stopping_worker`), and then the test kills or stops a process. Afterwards one
worker has the whole session, or the session has ended once, as the step and the process decide; both cards and the host
have everything else back.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from gpulease.client import GpuSessionFailed
from helpers.parking_scene import InBackground, Parked, ParkingNode, own_node
from helpers.processes import continue_process, stop_process
from helpers.stopping_worker import BORROW_KILL_STEPS, BORROW_STEPS, LEND_KILL_STEPS, LEND_STEPS
from helpers.waiting import PATIENCE_S, wait_until

CARDS = 2
HANGING = [*((step, "former") for step in LEND_KILL_STEPS), *((step, "next") for step in BORROW_KILL_STEPS)]
# The worker that outlives the broker goes on from its step, and reports it to the next broker. So each step counts.
LENDING = [
    *((step, "broker") for step in LEND_STEPS),
    *((step, whom) for step in LEND_KILL_STEPS for whom in ("former", "former, broker", "zygote")),
]
BORROWING = [
    *((step, whom) for step in BORROW_STEPS for whom in ("broker", "former, broker")),
    *((step, whom) for step in BORROW_KILL_STEPS for whom in ("former", "next", "next, broker", "zygote")),
]


def survives(step: str, whom: str) -> bool:
    """Return whether a session continues whole after these processes were killed in a step; otherwise it ends.

    A zygote's workers die with it. Until the broker has the image, only the former worker has the session. After that,
    the next worker needs the former one no more; but if a broker finds only a next worker that is not done, it can't
    know whether that worker has the whole session.
    """
    if whom in ("zygote", "former, broker"):
        return False
    return whom != "former" or step in BORROW_STEPS


@pytest.fixture(scope="module")
def _nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ParkingNode]]:
    nodes: list[ParkingNode] = []
    yield nodes
    for node in nodes:
        node.lasting.stop()


@pytest.fixture
def node(_nodes: list[ParkingNode], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ParkingNode]:
    """Yield the node of all kills. After a failed test, there is a new one."""
    if not _nodes:
        _nodes.append(ParkingNode(tmp_path_factory.mktemp("node"), cards=CARDS))
    (node,) = _nodes
    yield node
    try:
        node.rest()
    except BaseException:
        _nodes.clear()
        node.lasting.discard()
        raise


def under_way(node: ParkingNode, scene: Parked, step: str) -> tuple[InBackground, int]:
    """Begin a direct move to the second card. Returns once a worker has stopped itself at a step.

    Returns the call, and the pid of the former worker. The scene has that of the worker that has stopped.
    """
    former = scene.pid
    with node.next_workers_stop_at(step if step in BORROW_STEPS else ""):
        doing = InBackground(lambda: scene.leave("1"))
        if step in BORROW_STEPS:
            wait_until(lambda: set(scene.workers()) - {former}, "the next worker is there", seen=scene.workers)
            (scene.pid,) = set(scene.workers()) - {former}
        wait_until(lambda: scene.is_stopped, f"the worker stops at {step}")
    return doing, former


def check_whole(scene: Parked) -> None:
    """Check that one worker has the whole session, that it can move again, and that it returns everything."""
    # A lost connection opens no region: a request to the broker that needs the session, then its bytes.
    scene.lease.renew(600)
    scene.check()
    wait_until(lambda: len(scene.workers()) == 1, "one worker is left", seen=scene.workers)
    # The broker proves the bytes of the other worker free once that has ended.
    wait_until(lambda: scene.holding() == [scene.row()["card_uuid"]], "one card has it", seen=scene.holding)
    uuids = [card["uuid"] for card in scene.node.now.inventory().details]
    # The session can move again, whatever card it is on.
    scene.leave("0" if scene.holding() == uuids[1:] else "1")
    scene.check()
    scene.session.close()
    scene.lease.free()
    scene.check_gone()


def check_over(scene: Parked) -> None:
    """Check that the session has ended because its worker died, and that its client receives that."""
    # While one worker of two is not reaped yet, the lease may be active, with a session that is about to end.
    wait_until(scene.is_over, "the lease has ended", seen=scene.row)
    assert scene.row()["cause"] == "worker_died"
    with pytest.raises(GpuSessionFailed):
        scene.lease.renew(600)
    with pytest.raises(GpuSessionFailed):
        scene.check()
    scene.check_gone()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("step", "whom"), [*LENDING, *BORROWING])
def test_a_kill_in_any_step_of_a_direct_move(step: str, whom: str, node: ParkingNode) -> None:
    with node.parked(step if step in LEND_STEPS else "", loses_zygote=whom == "zygote") as scene:
        doing, former = under_way(node, scene, step)
        for one in whom.split(", "):
            match one:
                case "zygote":
                    node.kill_zygote()
                case "broker":
                    node.restart()
                case _:
                    with suppress(ProcessLookupError):
                        os.kill(former if one == "former" else scene.pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            scene.go_on()
        doing.join(PATIENCE_S)
        assert not doing.is_alive()
        check = check_whole if survives(step, whom) else check_over
        check(scene)


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ParkingNode]:
    """A node that soon misses a worker's sign of life: after twice the longest sleep of a worker that is idle."""
    constants = {
        "gpulease.daemon.workers.monitors:UNRESPONSIVE_AFTER_S": 10.0,
        "gpulease.daemon.workers.monitors:ROUND_S": 0.05,
    }
    with own_node(tmp_path_factory.mktemp("impatient"), constants=constants, cards=CARDS) as node:
        yield node


@pytest.mark.exhaustive
@pytest.mark.parametrize(("step", "whom"), HANGING)
def test_a_worker_that_hangs_in_any_step_of_a_direct_move(step: str, whom: str, impatient: ParkingNode) -> None:
    """If it is the next worker, the former one continues the session. If it is the former one, the lease ends."""
    with impatient.parked(step if whom == "former" else "") as scene:
        doing, former = under_way(impatient, scene, step)
        doing.join(PATIENCE_S)
        assert not doing.is_alive()
        if whom == "former":
            wait_until(scene.is_over, "the lease has ended")
            assert scene.row()["cause"] == "unresponsive"
            scene.check_gone()
        else:
            wait_until(lambda: scene.workers() == [former], "the former worker has the session", seen=scene.workers)
            check_whole(scene)


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", [*LEND_KILL_STEPS, *BORROW_KILL_STEPS])
def test_a_broker_that_stops_for_a_while_in_any_step_of_a_direct_move(step: str, node: ParkingNode) -> None:
    with node.parked(step if step in LEND_STEPS else "") as scene:
        doing, _ = under_way(node, scene, step)
        broker = node.lasting.now.process.pid
        stop_process(broker)
        scene.go_on()
        wait_until(lambda: not scene.is_stopped, "the worker goes on")
        continue_process(broker)
        doing.join(PATIENCE_S)
        assert not doing.is_alive()
        assert doing.error is None, doing.error
        check_whole(scene)


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", BORROW_KILL_STEPS)
def test_a_move_needs_nothing_more_of_a_former_worker_that_has_lent_its_pages(step: str, node: ParkingNode) -> None:
    with node.parked() as scene:
        doing, former = under_way(node, scene, step)
        stop_process(former)
        scene.go_on()
        doing.join(PATIENCE_S)
        assert not doing.is_alive()
        assert doing.error is None, doing.error
        wait_until(lambda: former not in scene.workers(), "the former worker has ended", seen=scene.workers)
        check_whole(scene)
