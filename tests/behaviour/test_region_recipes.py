"""Uses of regions: layers that are replaced, callers that hang up, tenants whose time has ended, graphs that end."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from gpulease.client import Buffer, GpuSession, KernelArgs
from gpulease.client.core.region_sets import RegionSet
from gpulease.client.errors import (
    CapacityExceeded,
    RegionCancelled,
    RegionExpired,
    RegionFailed,
    RegionRevoked,
)
from gpulease.client.sync.graphs import Graph
from gpulease.client.sync.regions import Region
from gpulease.protocol import Status
from helpers.daemon import SHORT_LEASES_S, Daemon
from helpers.kernels import FAULTS, PTX, floats, numbers
from helpers.region_scene import MIB, REGION_BYTES, SLICE_BYTES, N, Scene, scene_of
from helpers.waiting import PATIENCE_S, wait_until

MATRIX = 16
STEPS = 20
QUEUED = 10
BURST = 50
SLOW = 1 << 26
"""Iterations of a kernel that makes everything queued after it wait."""
PATIENT = "[limits]\nregion_grace_ms = 10000\n"
"""Settings with the longest grace period, because this test delays launches."""

StartDaemon = Callable[..., Daemon]


@pytest.fixture
def scene(daemon: Daemon) -> Iterator[Scene]:
    with scene_of(daemon) as scene:
        yield scene


class Network:
    """Two layers. Each is a product with weights, which are in a separate region."""

    def __init__(self, scene: Scene, rng: np.random.Generator) -> None:
        self.scene, self.rng = scene, rng
        self.module = scene.session.module_load((PTX / "programs.sm75.ptx").read_bytes())
        self.given = self.numbers()
        self.x, self.between, self.y = (scene.session.mem_alloc(self.given.nbytes) for _ in range(3))
        scene.session.mem_write(self.x, 0, self.given)

    def numbers(self) -> NDArray[np.float32]:
        """Return random integers as floats, whose products are exact."""
        return self.rng.integers(-9, 9, (MATRIX, MATRIX)).astype(np.float32)

    def layer(self) -> tuple[Region, NDArray[np.float32]]:
        """Return a region with weights, and the weights."""
        weights, region = self.numbers(), self.scene.lease.region(REGION_BYTES)
        self.scene.session.mem_write(region, 0, weights)
        return region, weights

    def forward(self, first: Region, second: Region, regions: RegionSet) -> NDArray[np.float32]:
        """Compute the network's outputs. If a region has ended, raises the error that says how."""
        for given, weights, found in ((self.x, first, self.between), (self.between, second, self.y)):
            self.scene.session.launch(
                self.module, "matmul", [1], [MATRIX, MATRIX], [given, weights, found, MATRIX], regions=regions
            )
        return floats(self.scene.session.mem_read(self.y, 0, self.given.nbytes)).reshape(MATRIX, MATRIX)


def step_args(buffer: Buffer) -> KernelArgs:
    """Return the arguments with which `bias` adds 1 to a counter."""
    return KernelArgs().push_buffer(buffer).push_u32(1).push_f32(1.0)


def counted(session: GpuSession, counter: Buffer) -> int:
    """Return the number of steps that have run."""
    return int(floats(session.mem_read(counter, 0, 4))[0])


def refusal(scene: Scene, launch: Callable[[int], object], began: threading.Event) -> RegionFailed:
    """Launch bursts until a region refuses a launch, and return the refusal.

    `launch` takes the launch's number, from 0.
    """
    numbers_of_all = itertools.count()
    while True:
        try:
            for _ in range(BURST):
                launch(next(numbers_of_all))
            scene.session.sync()
        except RegionFailed as error:
            return error
        began.set()


def step_in(scene: Scene, counter: Buffer, regions: RegionSet) -> Callable[[int], object]:
    """Return a function that launches a step, which adds 1 to the counter. Its number is its position."""
    return lambda number: scene.session.launch(
        scene.module, "bias", [1], [1], step_args(counter), regions=regions, position=number
    )


def counting_graph(scene: Scene, counter: Buffer) -> Graph:
    """Return a graph of steps that each add 1 to the counter."""
    with scene.session.record() as graph:
        for _ in range(STEPS):
            scene.session.launch(scene.module, "bias", [1], [1], step_args(counter))
    return graph


def launches(scene: Scene) -> int:
    """Return the number of kernels that the session's worker has queued."""
    return int(scene.daemon.query(scene.lease.lease_id)["launches"])


def zero(session: GpuSession) -> Buffer:
    """Return a counter, set to 0, in the session's own memory."""
    counter = session.mem_alloc(4)
    session.mem_write(counter, 0, bytes(4))
    return counter


def in_a_thread(work: Callable[[], object]) -> threading.Thread:
    """Run a function in a thread. The thread does not keep the tests from ending if a test fails."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def once(began: threading.Event, work: Callable[[], object]) -> threading.Thread:
    """Run a function in a thread, once `began` is set."""

    def wait_and_work() -> None:
        began.wait(PATIENCE_S)
        work()

    return in_a_thread(wait_and_work)


# --- weights as regions ---


def test_a_layer_is_replaced_while_its_session_goes_on(scene: Scene) -> None:
    network = Network(scene, np.random.default_rng(1))
    worker = scene.daemon.worker_pid(scene.lease.lease_id)
    (first, w1), (second, w2) = network.layer(), network.layer()
    both = scene.session.region_set([first, second])
    np.testing.assert_array_equal(network.forward(first, second, both), network.given @ w1 @ w2)
    second.revoke("a newer layer is there")
    second.close()
    newer, w3 = network.layer()
    both = scene.session.region_set([first, newer])
    np.testing.assert_array_equal(network.forward(first, newer, both), network.given @ w1 @ w3)
    assert scene.daemon.worker_pid(scene.lease.lease_id) == worker


def test_a_revoked_layer_gives_its_name_and_no_result(scene: Scene) -> None:
    network = Network(scene, np.random.default_rng(2))
    (first, _), (second, _) = network.layer(), network.layer()
    both = scene.session.region_set([first, second])
    second.revoke("a newer layer is there")
    with pytest.raises(RegionRevoked) as refused:
        network.forward(first, second, both)
    assert (refused.value.lease_id, refused.value.kernel) == (second.lease_id, "matmul")
    assert not any(scene.session.mem_read(network.y, 0, network.given.nbytes))


# --- a caller that hangs up ---


def test_a_cancel_stops_a_burst_at_the_launch_that_it_names(scene: Scene) -> None:
    region, counter, began = scene.region(), zero(scene.session), threading.Event()
    regions = scene.session.region_set([region])
    cancelling = once(began, region.cancel)
    refused = refusal(scene, step_in(scene, counter, regions), began)
    cancelling.join()
    assert (type(refused), refused.lease_id) == (RegionCancelled, region.lease_id)
    assert refused.position == counted(scene.session, counter)


def test_a_resumed_region_has_its_memory_and_its_sets(scene: Scene) -> None:
    region, began = scene.lease.region(REGION_BYTES), threading.Event()
    regions = scene.session.region_set([region])
    cancelling = once(began, region.cancel)
    refused = refusal(scene, step_in(scene, region, regions), began)
    cancelling.join()
    region.resume()
    scene.session.launch(scene.module, "bias", [1], [1], step_args(region), regions=regions)
    assert refused.position is not None
    assert counted(scene.session, region) == refused.position + 1


def test_other_regions_work_beside_a_cancelled_one(scene: Scene) -> None:
    region, other = scene.region(), scene.region()
    mine, others = scene.session.region_set([region]), scene.session.region_set([other])
    region.cancel()
    for _ in range(3):
        with pytest.raises(RegionCancelled):
            scene.double_in(mine, region)
        scene.double_in(others, other)
    scene.check(other, 8)


# --- a tenant whose time is up ---


def expired(scene: Scene, size_bytes: int) -> Region:
    """Return a region of another tenant that has expired."""
    region = scene.lease.region(size_bytes, tenant="bob", ttl_secs=0.2)
    scene.wait_until_returned(region)
    report = scene.daemon.query(region.lease_id)
    assert (report["tenant"], report["cause"]) == ("bob", "expired")
    return region


def test_the_engine_hears_whose_time_is_up(scene: Scene) -> None:
    with scene.lease.watch_regions() as watch:
        ann, bob = scene.region(), expired(scene, REGION_BYTES)
        regions = scene.session.region_set([ann, bob])
        with pytest.raises(RegionExpired) as refused:
            scene.double_in(regions, ann, position=7)
        told = next(watch)
    assert refused.value.lease_id == bob.lease_id
    assert (told.lease_id, told.status, told.position) == (bob.lease_id, Status.LEASE_EXPIRED, 7)
    scene.check(ann, 1)


def test_bytes_of_an_expired_region_are_the_next_one_s(scene: Scene) -> None:
    most = SLICE_BYTES - 8 * MIB
    gone = expired(scene, most)
    gone.close()
    with scene.lease.region(most) as later:
        assert not any(scene.session.mem_read(later, 0, later.size_bytes))


def test_addresses_of_an_expired_region_are_never_given_again(scene: Scene) -> None:
    gone = expired(scene, REGION_BYTES)
    address = gone.address
    gone.close()
    for _ in range(2 * SLICE_BYTES // REGION_BYTES):
        with scene.lease.region(REGION_BYTES) as later:
            assert later.address + later.size_bytes <= address or address + REGION_BYTES <= later.address


# --- renewal before the end ---


def test_a_region_that_is_kept_alive_outlives_its_deadline(scene: Scene) -> None:
    for ttl_s in SHORT_LEASES_S:
        region = scene.lease.region(REGION_BYTES, ttl_secs=ttl_s)
        deadline = time.monotonic() + ttl_s
        with region.keep_alive() as keeper:
            wait_until(lambda: time.monotonic() > deadline, "the first deadline is past")  # noqa: B023
            if keeper.loss is None:
                scene.double(region)
                return
    pytest.fail("a region that is kept alive expires")


def test_only_a_region_near_its_end_is_renewed(scene: Scene) -> None:
    scene.lease.renew(7000)
    regions = [scene.lease.region(REGION_BYTES, ttl_secs=ttl_s) for ttl_s in (600, 6000)]
    before = [region.generation for region in regions]
    for region in regions:
        if region.remaining_s < 3000:
            region.renew(6000)
    assert [region.generation for region in regions] == [before[0] + 1, before[1]]
    assert all(scene.daemon.query(region.lease_id)["remaining_ms"] > 3_000_000 for region in regions)


# --- a lease that grows and shrinks ---


def test_a_lease_grows_and_shrinks_under_a_region_s_launches(scene: Scene) -> None:
    region, counter = scene.region(), zero(scene.session)
    regions, is_over, began = scene.session.region_set([region]), threading.Event(), threading.Event()
    launched = 0

    def work() -> None:
        nonlocal launched
        while not is_over.is_set():
            scene.session.launch(scene.module, "bias", [1], [1], step_args(counter), regions=regions)
            launched += 1
            began.set()

    working = in_a_thread(work)
    try:
        began.wait(PATIENCE_S)
        scene.lease.grow(SLICE_BYTES)
        with scene.lease.region(SLICE_BYTES + REGION_BYTES) as more:
            scene.session.mem_write(more, 0, numbers(N))
            scene.double(more)
            scene.check(more, 2)
        scene.lease.shrink(SLICE_BYTES)
    finally:
        is_over.set()
        working.join()
    assert counted(scene.session, counter) == launched
    scene.check(region, 1)


def test_a_lease_does_not_shrink_below_its_regions(scene: Scene) -> None:
    with scene.lease.region(SLICE_BYTES // 2) as region:
        scene.session.mem_write(region, 0, numbers(N))
        with pytest.raises(CapacityExceeded):
            scene.lease.shrink(SLICE_BYTES - REGION_BYTES)
        scene.double(region)
        scene.check(region, 2)
    scene.lease.shrink(SLICE_BYTES - REGION_BYTES)


def test_a_lease_does_not_shrink_below_its_buffers(scene: Scene) -> None:
    buffer = scene.session.mem_alloc(SLICE_BYTES // 2)
    with pytest.raises(CapacityExceeded):
        scene.lease.shrink(SLICE_BYTES - REGION_BYTES)
    scene.session.mem_free(buffer)
    scene.session.sync()  # The freed buffer is returned at once.
    scene.lease.shrink(SLICE_BYTES - REGION_BYTES)


def test_bytes_that_a_lease_gives_up_are_another_s(scene: Scene) -> None:
    region, before_bytes = scene.region(), scene.daemon.available_bytes()
    scene.lease.shrink(SLICE_BYTES // 2)
    with scene.daemon.builder(before_bytes + SLICE_BYTES // 2).acquire():
        scene.double(region)
    scene.check(region, 2)


# --- revocation of a region that graphs use ---


def test_graphs_that_are_queued_end_and_none_begins_after_the_refusal(start_daemon: StartDaemon) -> None:
    with scene_of(start_daemon(config=PATIENT)) as scene:
        region, counter, busy = scene.region(), zero(scene.session), scene.session.mem_alloc(4)
        regions, graph = scene.session.region_set([region]), counting_graph(scene, counter)
        faults, begun = scene.session.module_load(FAULTS), launches(scene)
        scene.session.launch(faults, "slow", [1], [1], [busy, SLOW])
        for position in range(QUEUED):
            graph.launch(regions=regions, position=position)
        wait_until(
            lambda: launches(scene) == begun + 1 + QUEUED * STEPS, "all are queued", seen=lambda: launches(scene)
        )
        region.revoke()
        with pytest.raises(RegionRevoked) as refused:
            graph.launch(regions=regions, position=QUEUED)
        scene.session.sync()
        assert refused.value.position == QUEUED
        assert counted(scene.session, counter) == QUEUED * STEPS


def test_a_graph_whose_region_ends_while_it_runs_runs_whole(scene: Scene) -> None:
    region, counter, began = scene.region(), zero(scene.session), threading.Event()
    regions, graph = scene.session.region_set([region]), counting_graph(scene, counter)
    revoking = once(began, region.revoke)
    refused = refusal(scene, lambda number: graph.launch(regions=regions, position=number), began)
    revoking.join()
    assert type(refused) is RegionRevoked
    assert refused.position is not None
    assert counted(scene.session, counter) == refused.position * STEPS
