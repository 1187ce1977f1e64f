"""The main job, and the failures of a session, on a real card."""

from collections.abc import Iterator

import numpy as np
import pytest

from gpulease.client import (
    AllocFailed,
    GpuBuilder,
    GpuLease,
    GpuSession,
    GpuSessionFailed,
    InvalidHandle,
    InvalidRequest,
    KernelArgs,
    LaunchFailed,
    LoadFailed,
    OperationFailed,
    SyncFailed,
)
from helpers.daemon import Daemon
from helpers.kernels import (
    BLOCK,
    FAULTS,
    PTX,
    TRANSFORM,
    Neighbour,
    check_main_job,
    floats,
    grid_for,
    numbers,
    scale_args,
    start_stray_store,
)
from helpers.nvml import Cards

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SLICE = 64 * MIB
FAR_AWAY = 1 << 40


@pytest.fixture
def lease(daemon: Daemon) -> Iterator[GpuLease]:
    with daemon.builder(SLICE).acquire() as lease:
        yield lease


@pytest.fixture
def session(lease: GpuLease) -> Iterator[GpuSession]:
    with GpuSession(lease) as session:
        yield session


@pytest.mark.parametrize("n", [1, 257, 1_000_003])
def test_main_job(session: GpuSession, n: int) -> None:
    assert session.driver == "cuda"
    check_main_job(session, n)


def test_main_job_over_tcp(daemon: Daemon) -> None:
    builder = GpuBuilder(daemon.tcp_address).min_vram(SLICE)
    with builder.acquire() as lease, GpuSession(lease) as session:
        check_main_job(session)


@pytest.mark.parametrize("name", ["transform.sm75.ptx", "transform.sm80.ptx"])
def test_a_module_lists_its_kernels_and_their_parameters(session: GpuSession, name: str) -> None:
    module = session.module_load((PTX / name).read_bytes())
    assert {kernel: entry.parameter_sizes for kernel, entry in module.kernels.items()} == {
        "scale": (8, 4, 4),
        "bias": (8, 4, 4),
    }
    assert all(entry.max_threads_per_block == 1024 for entry in module.kernels.values())
    faults = session.module_load(FAULTS)
    assert {kernel: entry.parameter_sizes for kernel, entry in faults.kernels.items()} == {
        "stray_store": (8, 8),
        "stray_load": (8, 8),
        "misaligned": (8,),
        "endless": (8,),
        "slow": (8, 4),
        "fill_u32": (8, 4, 4),
    }


def test_one_upload_serves_many_pipelined_launches(lease: GpuLease, session: GpuSession) -> None:
    n, rounds = 1000, 5000
    module = session.module_load(TRANSFORM)
    buffer = session.mem_alloc(4 * n)
    session.mem_write(buffer, 0, numbers(n))
    minus, plus = scale_args(buffer, n, -1.0), scale_args(buffer, n, 1.0)
    for _ in range(rounds):
        session.launch(module, "scale", grid_for(n), BLOCK, minus)
        session.launch(module, "bias", grid_for(n), BLOCK, plus)
    session.sync()
    # x -> 1 - x applied twice is x again.
    np.testing.assert_array_equal(floats(session.mem_read(buffer, 0, 4 * n)), numbers(n))
    assert lease.query()["launches"] == 2 * rounds


def test_large_copies(session: GpuSession) -> None:
    data = np.random.default_rng(5).bytes(40 * MIB + 5)
    buffer = session.mem_alloc(len(data))
    session.mem_write(buffer, 0, data)
    assert session.mem_read(buffer, 0, len(data)) == data
    assert session.mem_read(buffer, 20 * MIB, 9) == data[20 * MIB : 20 * MIB + 9]


def test_memory_is_zero_at_first_and_after_others_had_it(daemon: Daemon) -> None:
    size = 256 * MIB
    for _ in range(3):
        with daemon.builder(size).acquire() as lease, GpuSession(lease) as session:
            for _ in range(2):
                buffer = session.mem_alloc(size)
                assert not np.frombuffer(session.mem_read(buffer, 0, size), np.uint64).any()
                session.mem_write(buffer, 0, b"\xee" * size)
                session.mem_free(buffer)


class TestFailures:
    def test_over_the_slice(self, session: GpuSession) -> None:
        with pytest.raises(AllocFailed, match=f"of the slice's {SLICE} bytes are free"):
            session.mem_alloc(SLICE + 1)
        whole = session.mem_alloc(SLICE)
        with pytest.raises(AllocFailed):
            session.mem_alloc(1)
        session.mem_free(whole)
        check_main_job(session)

    def test_bad_ptx(self, session: GpuSession) -> None:
        lines = TRANSFORM.decode().splitlines()
        at = next(number for number, line in enumerate(lines) if "mul.f32" in line or "mul.rn.f32" in line)
        lines[at] = lines[at].replace("mul", "mulberry", 1)
        with pytest.raises(LoadFailed) as caught:
            session.module_load("\n".join(lines))
        assert caught.value.line == at + 1
        assert f"line {at + 1}" in caught.value.log
        assert caught.value.hint
        check_main_job(session)

    @pytest.mark.parametrize(
        "image", [b"hello", b"\x7fELF" + bytes(200), TRANSFORM[: len(TRANSFORM) // 2]], ids=["text", "elf", "half"]
    )
    def test_what_is_no_module(self, session: GpuSession, image: bytes) -> None:
        with pytest.raises(LoadFailed):
            session.module_load(image)
        check_main_job(session)

    def test_bad_launches(self, session: GpuSession) -> None:
        module = session.module_load(TRANSFORM)
        buffer = session.mem_alloc(4)
        for kernel, grid, block, args in (
            ("nothing", [1], [1], KernelArgs()),
            ("scale", [1], [1], KernelArgs().push_buffer(buffer)),
            ("scale", [1], [1025], scale_args(buffer, 1)),
        ):
            with pytest.raises(LaunchFailed):
                session.launch(module, kernel, grid, block, args)
        check_main_job(session)

    def test_too_much_shared_memory_is_told_later(self, session: GpuSession) -> None:
        module = session.module_load(TRANSFORM)
        buffer = session.mem_alloc(4)
        number = session.launch(module, "scale", [1], [1], scale_args(buffer, 1), shared_bytes=1 << 20)
        with pytest.raises(LaunchFailed) as caught:
            session.sync()
        assert caught.value.failure.failed_request_id == number
        check_main_job(session)

    def test_handles(self, session: GpuSession) -> None:
        buffer = session.mem_alloc(16)
        with pytest.raises(InvalidHandle):
            session.mem_read(buffer, 8, 9)
        session.mem_free(buffer)
        with pytest.raises(InvalidHandle):
            session.mem_write(buffer, 0, b"x")

    def test_an_illegal_address_ends_that_session_only(self, daemon: Daemon) -> None:
        with daemon.builder(SLICE).acquire() as healthy, GpuSession(healthy) as other:
            neighbour = Neighbour(other)
            neighbour.check()
            lease = daemon.builder(SLICE).acquire()
            session = GpuSession(lease)
            module = session.module_load(FAULTS)
            buffer = session.mem_alloc(16)
            number = start_stray_store(session, module, buffer, FAR_AWAY)
            with pytest.raises(SyncFailed, match="illegal") as caught:
                session.sync()
            assert caught.value.failure.failed_request_id in (number, None)
            assert caught.value.kernel in ("stray_store", "")
            neighbour.check()
            # CUDA's errors are sticky: every later operation fails with the same error, until the tenant frees the
            # lease.
            for operation in (session.sync, lambda: session.mem_alloc(4), lambda: session.mem_read(buffer, 0, 4)):
                with pytest.raises(SyncFailed, match="the context is lost"):
                    operation()
            report = daemon.query(lease.lease_id)
            assert (report["state"], report["cause"]) == ("active", None)
            assert "illegal" in report["fault"]
            neighbour.check()
            lease.free()
            assert daemon.query(lease.lease_id)["state"] == "torndown"
            neighbour.check()
            with daemon.builder(SLICE).acquire() as fresh, GpuSession(fresh) as working:
                check_main_job(working)

    def test_a_launch_that_came_as_expected_and_faults_is_named(self, daemon: Daemon) -> None:
        """Native code makes repeated launches, and its counters determine which launch the report names."""
        with daemon.builder(SLICE).acquire() as lease, GpuSession(lease) as session:
            module = session.module_load(FAULTS)
            buffer = session.mem_alloc(64)
            for _ in range(3):
                for offset in (0, 8, 16):
                    start_stray_store(session, module, buffer, offset)
                session.sync()
            number = start_stray_store(session, module, buffer, FAR_AWAY)
            with pytest.raises(SyncFailed, match="illegal") as caught:
                session.sync()
            assert (caught.value.failure.failed_request_id, caught.value.kernel) == (number, "stray_store")

    def test_a_kernel_can_not_reach_another_sessions_memory(self, daemon: Daemon, session: GpuSession) -> None:
        secret = b"a secret of 32 bytes............"
        mine = session.mem_alloc(len(secret))
        session.mem_write(mine, 0, secret)
        lease = daemon.builder(SLICE).acquire()
        with GpuSession(lease) as intruder:
            module = intruder.module_load(FAULTS)
            own = intruder.mem_alloc(16)
            # Each process has its own addresses. This address may be the intruder's own memory, or not mapped at all.
            intruder.launch(module, "fill_u32", [1], [4], KernelArgs().push_u64(mine.handle).push_u32(4).push_u32(7))
            try:
                intruder.sync()
                intruder.mem_free(own)
            except (GpuSessionFailed, OperationFailed):
                pass
        assert session.mem_read(mine, 0, len(secret)) == secret
        try:
            lease.free()
        except GpuSessionFailed:
            daemon.wait_for_end(lease.lease_id)


class TestCards:
    def test_the_inventory_is_nvmls(self, daemon: Daemon, cards: Cards) -> None:
        details = daemon.inventory().details
        assert [card["uuid"] for card in details] == cards.uuids()
        assert all(card["driver"] == "cuda" for card in details)
        for card, total in zip(details, cards.total_bytes(), strict=True):
            assert 0 < card["capacity_bytes"] < total

    def test_pinned_by_uuid_and_by_index(self, daemon: Daemon, cards: Cards) -> None:
        size = 1 << 30
        for index, uuid in enumerate(cards.uuids()):
            for device in (uuid, index):
                before = cards.used_bytes()
                with daemon.builder(size).device(device).acquire() as lease, GpuSession(lease) as session:
                    assert lease.card_uuid == session.card_uuid == uuid
                    buffer = session.mem_alloc(size)
                    session.mem_write(buffer, size - 1, b"x")
                    grown = [now - then for now, then in zip(cards.used_bytes(), before, strict=True)]
                    assert grown[index] >= size
                    assert all(other < size for at, other in enumerate(grown) if at != index)
                    check_main_job_in_place(session)
                cards.check_back_to(before)

    def test_a_card_that_is_not_there(self, daemon: Daemon) -> None:
        with pytest.raises(InvalidRequest, match="No card matches"):
            daemon.builder().device("GPU-00000000-0000-0000-0000-000000000000").acquire()


def check_main_job_in_place(session: GpuSession) -> None:
    """Run a kernel that needs no further memory."""
    module = session.module_load(FAULTS)
    session.launch(module, "fill_u32", [1], [1], KernelArgs().push_u64(0).push_u32(0).push_u32(0))
    session.sync()
