"""Regions of a daemon that is killed and comes back: they go on, and what had begun to end is ended."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from gpulease.client.errors import RegionExpired, RegionFailed, RegionFreed, RegionRevoked
from helpers.lasting import LastingDaemon
from helpers.region_scene import REGION_BYTES, SLICE_BYTES, Scene, scene_of
from helpers.waiting import wait_until

StartLasting = Callable[..., LastingDaemon]


@pytest.fixture
def lasting(start_lasting: StartLasting) -> LastingDaemon:
    return start_lasting()


@contextmanager
def scene_in(lasting: LastingDaemon) -> Iterator[Scene]:
    with scene_of(lasting.now) as scene:
        yield scene
    lasting.check_idle()


def restart(lasting: LastingDaemon, scene: Scene) -> None:
    scene.daemon = lasting.restart()


def test_a_region_goes_on_in_the_next_daemon(lasting: LastingDaemon) -> None:
    with scene_in(lasting) as scene:
        region = scene.region()
        before = scene.daemon.query(region.lease_id)
        restart(lasting, scene)
        scene.double(region)
        scene.check(region, 2)
        after = scene.daemon.query(region.lease_id)
        same = ("parent", "tenant", "size_bytes", "generation", "address", "slot", "number", "state")
        assert [after[name] for name in same] == [before[name] for name in same]


def test_launches_go_on_while_no_daemon_is_there(lasting: LastingDaemon) -> None:
    with scene_in(lasting) as scene:
        region = scene.region()
        lasting.kill()
        scene.double(region)
        scene.check(region, 2)
        scene.daemon = lasting.start()
        scene.double(region)
        scene.check(region, 4)


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (lambda scene, region: scene.daemon.revoke(region.lease_id), RegionRevoked),
        pytest.param(lambda scene, region: region.free(), RegionFreed, marks=pytest.mark.exhaustive),
        pytest.param(lambda scene, region: region.renew(60), None, marks=pytest.mark.exhaustive),
    ],
    ids=["revoke", "free", "renew"],
)
def test_the_next_daemon_is_asked_as_the_last_one_was(
    lasting: LastingDaemon, end: Callable[[Scene, object], None], error: type[RegionFailed] | None
) -> None:
    with scene_in(lasting) as scene:
        region, other = scene.region(), scene.region()
        restart(lasting, scene)
        end(scene, region)
        if error is None:
            scene.double(region)
        else:
            scene.wait_until_returned(region)
            with pytest.raises(error):
                scene.double(region)
        scene.double(other)


def test_one_that_ends_while_no_daemon_is_there_refuses_by_itself_and_is_returned_by_the_next(
    lasting: LastingDaemon,
) -> None:
    with scene_in(lasting) as scene:
        region, other = scene.region(ttl_secs=2), scene.region()
        lasting.kill()

        def is_refused() -> bool:
            try:
                scene.double(region)
            except RegionExpired:
                return True
            return False

        wait_until(is_refused, "the session refuses by itself")
        scene.daemon = lasting.start()
        scene.wait_until_returned(region)
        scene.double(other)


def test_what_ended_before_the_kill_stays_ended(lasting: LastingDaemon) -> None:
    with scene_in(lasting) as scene:
        region, other = scene.region(), scene.region()
        scene.daemon.revoke(region.lease_id)
        restart(lasting, scene)
        report = scene.daemon.query(region.lease_id)
        assert (report["state"], report["cause"], report["parent"]) == (
            "torndown",
            "revoked",
            scene.lease.lease_id_text,
        )
        with pytest.raises(RegionRevoked):
            scene.double(region)
        scene.double(other)


def test_the_next_region_of_a_slot_is_no_earlier_one(lasting: LastingDaemon) -> None:
    with scene_in(lasting) as scene:
        region = scene.region()
        regions = scene.session.region_set([region])
        region.free()
        restart(lasting, scene)
        scene.lease.query()  # a connection to the next daemon, which a request that opens something does not make
        later = scene.region()
        assert scene.daemon.query(later.lease_id)["slot"] == 0
        with pytest.raises(RegionFailed):
            scene.double_in(regions, later)
        scene.double(later)
        scene.check(later, 2)


def test_the_slice_is_whole_after_it(lasting: LastingDaemon) -> None:
    with scene_in(lasting) as scene:
        with scene.region():
            restart(lasting, scene)
        with scene.lease.region(SLICE_BYTES - REGION_BYTES):
            pass


def test_the_lease_s_end_in_the_next_daemon_ends_them(lasting: LastingDaemon) -> None:
    with scene_of(lasting.now) as scene:
        region_id = scene.region().lease_id
        restart(lasting, scene)
    wait_until(lambda: lasting.now.query(region_id)["state"] == "torndown", "the region is returned")
    lasting.check_idle()
