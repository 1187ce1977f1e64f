"""Regions of a daemon that is killed and restarted: they continue, and those that had begun to end are ended."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from gpulease.client.errors import RegionExpired, RegionFailed, RegionFreed, RegionRevoked
from helpers.lasting import LastingDaemon
from helpers.region_scene import REGION_BYTES, SLICE_BYTES, Scene, scene_of
from helpers.waiting import wait_until


@contextmanager
def scene_in(lasting: LastingDaemon) -> Iterator[Scene]:
    with scene_of(lasting.now) as scene:
        yield scene
    lasting.check_idle()


def test_what_is_with_a_lease_s_regions_in_the_next_daemon(lasting: LastingDaemon) -> None:
    with scene_of(lasting.now) as scene:
        freed, kept, ended, last = (scene.region() for _ in range(4))
        regions = scene.session.region_set([freed])
        freed.free()
        scene.daemon.revoke(ended.lease_id)
        before = scene.daemon.query(kept.lease_id)

        # Launches work while no daemon runs, and with the next one.
        lasting.kill()
        scene.double(kept)
        scene.check(kept, 2)
        scene.daemon = lasting.start()
        scene.double(kept)
        scene.check(kept, 4)
        after = scene.daemon.query(kept.lease_id)
        same = ("parent", "tenant", "size_bytes", "generation", "address", "slot", "number", "state")
        assert [after[name] for name in same] == [before[name] for name in same]

        # Regions that ended before the kill are still ended.
        report = scene.daemon.query(ended.lease_id)
        parent = scene.lease.lease_id_text
        assert (report["state"], report["cause"], report["parent"]) == ("torndown", "revoked", parent)
        with pytest.raises(RegionRevoked):
            scene.double(ended)

        # The next region in a slot must differ from those that had it before the kill.
        scene.lease.query()  # Connects to the next daemon. A request that opens something does not reconnect by itself.
        later = scene.region()
        assert scene.daemon.query(later.lease_id)["slot"] == 0
        with pytest.raises(RegionFailed):
            scene.double_in(regions, later)
        scene.double(later)
        scene.check(later, 2)

        # The next daemon ends regions like the last one did. Afterwards the slice is whole.
        scene.daemon.revoke(last.lease_id)
        scene.wait_until_returned(last)
        with pytest.raises(RegionRevoked):
            scene.double(last)
        scene.double(kept)
        kept.free()
        with scene.lease.region(SLICE_BYTES - REGION_BYTES):
            pass
    # The lease's end also returns the region.
    wait_until(lambda: lasting.now.query(later.lease_id)["state"] == "torndown", "the region is returned")
    lasting.check_idle()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("end", "error"),
    [(lambda scene, region: region.free(), RegionFreed), (lambda scene, region: region.renew(60), None)],
    ids=["free", "renew"],
)
def test_the_next_daemon_is_asked_as_the_last_one_was(
    lasting: LastingDaemon, end: Callable[[Scene, object], None], error: type[RegionFailed] | None
) -> None:
    with scene_in(lasting) as scene:
        region, other = scene.region(), scene.region()
        scene.daemon = lasting.restart()
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
