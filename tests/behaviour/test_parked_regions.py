"""Regions of a parked session: they return with it, except those that end meanwhile."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from gpulease.client import Busy, GpuExclusivityClass, GpuLeaseError, GpuSession
from gpulease.client.errors import RegionExpired, RegionFailed, RegionFreed, RegionRevoked
from helpers.daemon import Daemon, Faults, running
from helpers.kernels import TRANSFORM, floats
from helpers.lasting import LastingDaemon
from helpers.parking import park_limits
from helpers.region_scene import REGION_BYTES, SLICE_BYTES, N, Scene
from helpers.waiting import wait_until

CONFIG = park_limits("1GiB")


@pytest.fixture(scope="module")
def node() -> Iterator[Daemon]:
    with running(Daemon(vram=("200MiB",), config=CONFIG)) as daemon:
        yield daemon


@pytest.fixture
def lasting(start_lasting: Callable[..., LastingDaemon]) -> LastingDaemon:
    return start_lasting(vram=("200MiB",), config=CONFIG)


@contextmanager
def parkable_scene(daemon: Daemon, wait_s: float = 0) -> Iterator[Scene]:
    builder = daemon.builder(SLICE_BYTES).timeout(wait_s).parkable().exclusivity(GpuExclusivityClass.SHARED)
    with builder.acquire() as lease, GpuSession(lease) as session:
        yield Scene(daemon, lease, session, session.module_load(TRANSFORM))


def is_parked(scene: Scene) -> bool:
    return bool(scene.daemon.query(scene.lease.lease_id)["park"]["phase"] == "parked")


def test_a_launch_that_names_a_region_brings_the_session_back(node: Daemon) -> None:
    with parkable_scene(node) as scene:
        region, other = scene.region(), scene.region()
        before = [node.query(one.lease_id) for one in (region, other)]
        for turn in range(1, 4):
            assert scene.lease.park() >= 2 * REGION_BYTES
            assert is_parked(scene)
            scene.double(region)
            assert not is_parked(scene)
            scene.check(region, 2**turn)
            scene.lease.park()
            scene.check(other, 1)
        same = ("generation", "address", "slot", "number", "state", "size_bytes")
        after = [node.query(one.lease_id) for one in (region, other)]
        assert [[row[name] for name in same] for row in after] == [[row[name] for name in same] for row in before]


@pytest.mark.parametrize(
    ("end", "error"), [("revoked", RegionRevoked), ("expired", RegionExpired), ("freed", RegionFreed)]
)
def test_a_region_that_ends_while_parked_is_returned_and_refused(
    node: Daemon, end: str, error: type[RegionFailed]
) -> None:
    with parkable_scene(node) as scene:
        kept = scene.region()
        region = scene.region(**({"ttl_secs": 2} if end == "expired" else {}))
        scene.lease.park()
        if end == "revoked":
            node.revoke(region.lease_id)
        elif end == "freed":
            region.free()
        scene.wait_until_returned(region)
        assert is_parked(scene), "the end of a region needs nothing of the card"
        with pytest.raises(error):
            scene.double(region)
        scene.double(kept)
        scene.check(kept, 2)
        # The region's memory belongs to the slice again, and contains none of the region's bytes.
        with scene.lease.region(SLICE_BYTES - 2 * REGION_BYTES) as later:
            found = floats(scene.session.mem_read(later, 0, 4 * N))
            np.testing.assert_array_equal(found, np.zeros(N, np.float32))


def test_a_region_is_renewed_while_parked_and_keeps_its_time(node: Daemon) -> None:
    with parkable_scene(node) as scene:
        region = scene.region(ttl_secs=3)
        scene.lease.park()
        for _ in range(3):
            generation = node.query(region.lease_id)["generation"]
            region.renew(60)
            assert node.query(region.lease_id)["generation"] == generation + 1
        assert is_parked(scene)
        scene.double(region)
        scene.check(region, 2)


def test_a_region_asked_for_while_parked_is_opened_by_the_return(node: Daemon) -> None:
    with parkable_scene(node) as scene:
        first = scene.region()
        scene.lease.park()
        second = scene.region()
        assert not is_parked(scene)
        for region in (first, second):
            scene.double(region)
            scene.check(region, 2)


def test_without_room_a_launch_in_a_region_is_busy_and_nothing_is_lost(node: Daemon) -> None:
    with parkable_scene(node) as scene:
        region = scene.region()
        scene.lease.park()
        with node.builder(180 << 20).acquire(), pytest.raises(Busy, match="parked"):
            scene.double(region)
        scene.check(region, 1)
        scene.double(region)
        scene.check(region, 2)


def test_the_end_of_a_parked_lease_ends_its_regions_with_it(node: Daemon) -> None:
    with parkable_scene(node) as scene:
        region = scene.region()
        scene.lease.park()
        node.revoke(scene.lease.lease_id)
        wait_until(lambda: scene.state_of(region) == "torndown", "the region has ended")
        assert node.query(region.lease_id)["cause"] == "revoked"


def test_the_next_daemon_finds_parked_regions_and_ends_what_had_ended(lasting: LastingDaemon) -> None:
    with parkable_scene(lasting.now) as scene:
        kept, ended, late = scene.region(), scene.region(), scene.region(ttl_secs=4)
        scene.lease.park()
        lasting.now.revoke(ended.lease_id)
        lasting.kill()
        scene.daemon = lasting.start()
        wait_until(lambda: is_parked(scene), "the next daemon finds it parked")
        for region in (ended, late):
            scene.wait_until_returned(region)
        scene.double(kept)
        scene.check(kept, 2)
        for region, error in ((ended, RegionRevoked), (late, RegionExpired)):
            with pytest.raises(error):
                scene.double(region)
        scene.lease.park()
        scene.check(kept, 2)
    lasting.check_idle()


def test_the_next_daemon_opens_a_region_in_a_session_whose_park_was_not_recorded(
    start_lasting: Callable[..., LastingDaemon], tmp_path: Path
) -> None:
    """Only the worker knows of the park, and no operation of the session makes it ask for the return."""
    hang = tmp_path / "hang"
    constants = {"gpulease.daemon.record.group_commit:MAX_WAIT_S": 600.0}
    lasting = start_lasting(vram=("200MiB",), config=CONFIG, faults=Faults(constants, hang_commits_while=hang))
    with parkable_scene(lasting.now) as scene:
        first = scene.region()
        hang.write_text("")
        parking = threading.Thread(target=park, args=(scene,))
        parking.start()
        wait_until(lambda: is_parked(scene), "it is parked")
        lasting.kill()
        hang.unlink()
        scene.daemon = lasting.start()
        parking.join()
        second = scene.region()
        assert not is_parked(scene)
        for region in (first, second):
            scene.double(region)
            scene.check(region, 2)


def park(scene: Scene) -> None:
    # The broker is killed before it has replied.
    with suppress(GpuLeaseError):
        scene.lease.park()
