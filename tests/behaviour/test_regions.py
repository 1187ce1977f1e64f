"""Regions of a real daemon: each ends separately, its session continues, and its bytes belong to the slice again."""

import itertools
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from gpulease.client import GpuSession
from gpulease.client.errors import (
    CapacityExceeded,
    RegionCancelled,
    RegionExpired,
    RegionFailed,
    RegionFenced,
    RegionFreed,
    RegionRevoked,
)
from gpulease.client.sync.regions import Region
from helpers.daemon import Daemon
from helpers.kernels import BLOCK, TRANSFORM, grid_for, numbers
from helpers.region_scene import REGION_BYTES, SLICE_BYTES, N, Scene, scene_of
from helpers.waiting import wait_until


@pytest.fixture
def scene(daemon: Daemon) -> Iterator[Scene]:
    with scene_of(daemon) as scene:
        yield scene


def end_by_revoke(scene: Scene, region: Region) -> None:
    scene.daemon.revoke(region.lease_id)


def end_by_its_lease_s_tenant(scene: Scene, region: Region) -> None:
    region.revoke("because")


def end_by_free(scene: Scene, region: Region) -> None:
    region.free()


ENDS = [
    (end_by_revoke, "revoked", RegionRevoked),
    (end_by_its_lease_s_tenant, "revoked", RegionRevoked),
    (end_by_free, "freed", RegionFreed),
]
End = Callable[[Scene, Region], None]


def test_a_region_is_zero_and_works(scene: Scene) -> None:
    region = scene.lease.region(REGION_BYTES)
    assert not any(scene.session.mem_read(region, 0, region.size_bytes))
    scene.session.mem_write(region, 0, numbers(N))
    scene.double(region)
    scene.check(region, 2)


@pytest.mark.parametrize(("end", "cause", "error"), ENDS, ids=[cause for _, cause, _ in ENDS])
def test_a_region_ends_alone(scene: Scene, end: End, cause: str, error: type[RegionFailed]) -> None:
    region, other = scene.region(), scene.region()
    end(scene, region)
    scene.wait_until_returned(region)
    with pytest.raises(error):
        scene.double(region)
    with pytest.raises((RegionFenced, error)):
        scene.double(region)
    scene.double(other)
    scene.check(other, 2)
    report = scene.daemon.query(region.lease_id)
    assert (report["cause"], report["parent"]) == (cause, scene.lease.lease_id_text)


def test_a_region_that_is_not_renewed_expires(scene: Scene) -> None:
    region, other = scene.region(ttl_secs=0.5), scene.region()
    scene.wait_until_returned(region)
    with pytest.raises(RegionExpired):
        scene.double(region)
    scene.double(other)


def test_a_renewed_region_goes_on(scene: Scene) -> None:
    region = scene.region(ttl_secs=5)
    region.renew(60)
    assert scene.daemon.query(region.lease_id)["remaining_ms"] > 5000
    scene.double(region)


def test_a_cancelled_region_is_taken_again(scene: Scene) -> None:
    region = scene.region()
    region.cancel()
    with pytest.raises(RegionCancelled):
        scene.double(region)
    region.resume()
    scene.double(region)
    scene.check(region, 2)


def test_its_bytes_come_back_to_the_slice(scene: Scene) -> None:
    for _ in range(10):
        with scene.lease.region(SLICE_BYTES // 2), pytest.raises(CapacityExceeded):
            scene.lease.region(SLICE_BYTES)
    assert scene.daemon.query(scene.lease.lease_id)["regions"] == []


def test_the_lease_s_end_ends_its_regions(daemon: Daemon) -> None:
    with scene_of(daemon) as scene:
        region = scene.region()
        region_id = region.lease_id
        assert daemon.query(scene.lease.lease_id)["regions"] == [region.lease_id_text]
    wait_until(lambda: daemon.query(region_id)["state"] == "torndown", "the region is returned")
    assert daemon.query(region_id)["cause"] == "freed"


def test_a_watch_is_told_of_the_first_launch_that_is_refused(scene: Scene) -> None:
    region = scene.region()
    with region.watch() as watch:
        scene.daemon.revoke(region.lease_id)
        with pytest.raises(RegionRevoked):
            scene.double(region, position=77)
        told = next(iter(watch))
    assert told is not None
    assert (told.lease_id, told.kernel, told.position) == (region.lease_id, "scale", 77)
    assert told.flipped_ns <= told.seen_ns


def test_a_launch_behind_a_wait_is_refused_by_a_load_before_it_is_sent(scene: Scene) -> None:
    region, other = scene.region(), scene.region()
    mine, others = scene.session.region_set([region]), scene.session.region_set([other])
    with scene.session.record() as graph:
        scene.session.launch(scene.module, "scale", grid_for(N), BLOCK, [other, N, np.float32(2)])
    scene.double_in(mine, region)
    with region.watch() as watch:
        scene.daemon.revoke(region.lease_id)
        launches = int(scene.daemon.query(scene.lease.lease_id)["launches"])
        for position, kind in ((5, RegionRevoked), (6, RegionFenced)):
            with pytest.raises(kind) as refused:
                scene.session.launch(
                    scene.module,
                    "scale",
                    grid_for(N),
                    BLOCK,
                    [region, N, np.float32(2)],
                    regions=mine,
                    position=position,
                )
            error = refused.value
            assert (error.lease_id, error.kernel, error.site) == (region.lease_id, "scale", 0)
            assert error.position == position
            scene.session.sync()
        with pytest.raises(RegionFenced):
            graph.launch(regions=scene.session.region_set([region, other]), position=7)
        scene.session.sync()
        with pytest.raises(RegionFenced):
            scene.session.mem_write(region, 0, numbers(N))
        told = iter(watch)
        assert [(event.position, event.kernel) for event in itertools.islice(told, 4) if event is not None] == [
            (5, "scale"),
            (6, "scale"),
            (7, "scale"),
            (0, ""),
        ]
    scene.double_in(others, other)
    assert int(scene.daemon.query(scene.lease.lease_id)["launches"]) == launches + 1
    scene.check(other, 2)


def test_a_refusal_in_a_burst_names_its_first_launch_that_did_not_begin(scene: Scene) -> None:
    """The worker may have refused a launch that the client had sent already, and skipped other launches after it."""
    region, other = scene.region(), scene.region()
    mine, others = scene.session.region_set([region]), scene.session.region_set([other])
    revoking = threading.Thread(target=scene.daemon.revoke, args=(region.lease_id,))
    begun = 0
    with pytest.raises(RegionRevoked) as refused:  # noqa: PT012  # whichever of these calls finds it
        for position in itertools.count():
            args = [other, N, np.float32(1)]
            scene.session.launch(scene.module, "scale", grid_for(N), BLOCK, args, regions=mine, position=position)
            begun += 1
            if position == 20:
                revoking.start()
    revoking.join()
    assert refused.value.position is not None
    assert refused.value.position <= begun
    scene.double_in(others, other)
    scene.check(other, 2)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_session_without_the_words_learns_of_the_end_from_the_worker(daemon: Daemon, shared_memory: bool) -> None:
    with daemon.builder(SLICE_BYTES).acquire() as lease, GpuSession(lease, shared_memory=shared_memory) as session:
        region = lease.region(REGION_BYTES)
        module, regions = session.module_load(TRANSFORM), session.region_set([region])
        daemon.revoke(region.lease_id)
        with pytest.raises(RegionRevoked) as refused:  # noqa: PT012  # whichever of these calls finds it
            session.launch(module, "scale", grid_for(N), BLOCK, [region, N, np.float32(2)], regions=regions)
            session.sync()
    assert (refused.value.failure.failed_request_id is None) == shared_memory


def test_a_lease_grows_for_a_region_and_shrinks(scene: Scene) -> None:
    with pytest.raises(CapacityExceeded):
        scene.lease.region(SLICE_BYTES + REGION_BYTES)
    scene.lease.grow(SLICE_BYTES)
    with scene.lease.region(SLICE_BYTES + REGION_BYTES) as region:
        scene.session.mem_write(region, 0, numbers(N))
        scene.double(region)
        scene.check(region, 2)
    scene.lease.shrink(SLICE_BYTES)
    assert scene.daemon.query(scene.lease.lease_id)["size_bytes"] == SLICE_BYTES
