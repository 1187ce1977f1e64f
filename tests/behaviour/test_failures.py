"""The six failures of session operations: each has its own error type, gives the reason, and affects nothing else."""

from collections.abc import Iterator

import pytest

from gpulease.client import (
    AllocFailed,
    GpuLease,
    GpuSession,
    InvalidHandle,
    KernelArgs,
    LaunchFailed,
    LoadFailed,
    OperationFailed,
    SyncFailed,
)
from gpulease.protocol import Opcode, Status
from gpulease.protocol.messages import Empty, Handle, Launch, MemAlloc, MemRead, MemWrite, ModuleLoad
from helpers.daemon import Daemon
from helpers.kernels import FAULTS, TRANSFORM, check_main_job, packed_scale_args, scale_args, start_stray_store
from helpers.raw_peer import RawPeer

SLICE = 1 << 20


@pytest.fixture
def lease(daemon: Daemon) -> Iterator[GpuLease]:
    with daemon.builder(SLICE).acquire() as lease:
        yield lease


@pytest.fixture
def session(lease: GpuLease) -> Iterator[GpuSession]:
    """Yield a session that must still work after its failures."""
    with GpuSession(lease) as session:
        yield session
        check_main_job(session)


class TestAllocFailed:
    def test_over_the_slice(self, session: GpuSession) -> None:
        with pytest.raises(AllocFailed, match=f"{SLICE + 1} bytes were requested; {SLICE} of the slice's") as caught:
            session.mem_alloc(SLICE + 1)
        assert "min_vram" in caught.value.hint
        assert isinstance(caught.value, OperationFailed)

    def test_over_what_is_left(self, session: GpuSession) -> None:
        first = session.mem_alloc(SLICE - 100)
        with pytest.raises(AllocFailed, match="100 of the slice's"):
            session.mem_alloc(101)
        second = session.mem_alloc(100)
        session.mem_free(first)
        session.mem_free(second)
        session.mem_free(session.mem_alloc(SLICE))

    @pytest.mark.parametrize("size_bytes", [1 << 40, 2**64 - 1])
    def test_absurd_sizes(self, session: GpuSession, size_bytes: int) -> None:
        with pytest.raises(AllocFailed):
            session.mem_alloc(size_bytes)

    def test_nothing_at_all(self, daemon: Daemon, lease: GpuLease) -> None:
        with RawPeer(daemon.address).hello() as peer:
            peer.attach(lease.lease_id)
            failure = peer.refused(Opcode.MEM_ALLOC, MemAlloc(0), lease.lease_id)
            assert failure.status is Status.ALLOC_FAILED


class TestInvalidHandle:
    def test_freed(self, session: GpuSession) -> None:
        buffer = session.mem_alloc(16)
        session.mem_free(buffer)
        for use in (
            lambda: session.mem_read(buffer, 0, 1),
            lambda: session.mem_write(buffer, 0, b"x"),
            lambda: session.mem_free(buffer),
            lambda: scale_args(buffer, 1),
        ):
            with pytest.raises(InvalidHandle, match="is freed"):
                use()

    @pytest.mark.parametrize(("offset", "length"), [(0, 17), (16, 1), (17, 0), (2**40, 4)])
    def test_out_of_range(self, session: GpuSession, offset: int, length: int) -> None:
        buffer = session.mem_alloc(16)
        with pytest.raises(InvalidHandle, match="outside"):
            session.mem_read(buffer, offset, length)
        with pytest.raises(InvalidHandle, match="outside"):
            session.mem_write(buffer, offset, bytes(length))

    def test_the_last_byte_and_no_byte_are_in_range(self, session: GpuSession) -> None:
        buffer = session.mem_alloc(16)
        assert session.mem_read(buffer, 15, 1) == b"\0"
        assert session.mem_read(buffer, 16, 0) == b""
        session.mem_write(buffer, 16, b"")

    def test_on_the_wire(self, daemon: Daemon, lease: GpuLease) -> None:
        ident = lease.lease_id
        with RawPeer(daemon.address).hello() as peer:
            peer.attach(ident)
            handle = peer.request(Opcode.MEM_ALLOC, MemAlloc(16), ident).handle
            for op, body in (
                (Opcode.MEM_READ, MemRead(handle, 8, 9)),
                (Opcode.MEM_READ, MemRead(handle, 2**64 - 8, 8)),
                (Opcode.MEM_READ, MemRead(handle + 4, 0, 4)),
                (Opcode.MEM_READ, MemRead(0, 0, 0)),
                (Opcode.MEM_WRITE, MemWrite(handle, 10, bytes(7))),
                (Opcode.MEM_WRITE, MemWrite(handle, 2**64 - 1, b"x")),
                (Opcode.MEM_FREE, Handle(handle + 8)),
                (Opcode.MODULE_UNLOAD, Handle(1)),
                (Opcode.LAUNCH, Launch(1, "scale", 1, 1, 1, 1, 1, 1, 0, b"", ())),
            ):
                failure = peer.refused(op, body, ident)
                assert failure.status is Status.INVALID_HANDLE, (op, body)
                assert failure.hint
            peer.request(Opcode.MEM_FREE, Handle(handle), ident)
            assert peer.refused(Opcode.MEM_FREE, Handle(handle), ident).status is Status.INVALID_HANDLE
            assert peer.refused(Opcode.MEM_READ, MemRead(handle, 0, 1), ident).status is Status.INVALID_HANDLE

    def test_unloaded_module(self, daemon: Daemon, lease: GpuLease) -> None:
        ident = lease.lease_id
        with RawPeer(daemon.address).hello() as peer:
            peer.attach(ident)
            handle = peer.request(Opcode.MEM_ALLOC, MemAlloc(16), ident).handle
            module = peer.request(Opcode.MODULE_LOAD, ModuleLoad(TRANSFORM), ident).module
            launch = Launch(module, "bias", 1, 1, 1, 4, 1, 1, 0, *packed_scale_args(handle, 4))
            peer.request(Opcode.LAUNCH, launch, ident)
            peer.request(Opcode.MODULE_UNLOAD, Handle(module), ident)
            assert peer.refused(Opcode.LAUNCH, launch, ident).status is Status.INVALID_HANDLE
            assert peer.refused(Opcode.MODULE_UNLOAD, Handle(module), ident).status is Status.INVALID_HANDLE
            # A handle is never used for a second object.
            assert peer.request(Opcode.MODULE_LOAD, ModuleLoad(TRANSFORM), ident).module > module


class TestLoadFailed:
    def test_the_log_and_the_line(self, session: GpuSession) -> None:
        lines = TRANSFORM.decode().splitlines()
        wrong = [number for number, line in enumerate(lines) if "ld.global" in line]
        for at in wrong:
            lines[at] = lines[at].replace("ld", "load", 1)
        with pytest.raises(LoadFailed, match=r"load\.global") as caught:
            session.module_load("\n".join(lines))
        assert caught.value.line == wrong[0] + 1
        assert "load.global" in caught.value.log

    def test_one_kernel_that_cannot_run_fails_at_its_launch_alone(self, session: GpuSession) -> None:
        lines = TRANSFORM.decode().splitlines()
        at = next(number for number, line in enumerate(lines) if "mul.f32" in line or "mul.rn.f32" in line)
        lines[at] = lines[at].replace("mul", "mulberry", 1)
        module = session.module_load("\n".join(lines))
        buffer = session.mem_alloc(16)
        session.launch(module, "scale", [1], [4], scale_args(buffer, 4))
        with pytest.raises(LaunchFailed, match="mulberry"):
            session.sync()
        session.launch(module, "bias", [1], [4], scale_args(buffer, 4))
        session.sync()

    @pytest.mark.parametrize(
        "image",
        [
            b"hello",
            b"\x7fELF" + bytes(100),
            b"\0",
            b"\xff\xfe" * 50,
            b".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry f(",
            TRANSFORM[: len(TRANSFORM) // 2],
        ],
        ids=["text", "elf", "nul", "no-utf8", "cut-short", "half"],
    )
    def test_what_is_no_module(self, session: GpuSession, image: bytes) -> None:
        with pytest.raises(LoadFailed) as caught:
            session.module_load(image)
        assert caught.value.message

    def test_a_module_without_kernels_is_one(self, session: GpuSession) -> None:
        module = session.module_load(b".version 7.0\n.target sm_75\n.address_size 64\n")
        assert not module.kernels


class TestLaunchFailed:
    def test_bad_name(self, session: GpuSession) -> None:
        module = session.module_load(TRANSFORM)
        with pytest.raises(LaunchFailed, match="no such kernel; it has bias, scale") as caught:
            session.launch(module, "Scale", [1], [1], KernelArgs())
        assert caught.value.kernel == "Scale"

    @pytest.mark.parametrize(
        "args",
        [
            KernelArgs(),
            KernelArgs().push_u64(0).push_u32(1),
            KernelArgs().push_u32(0).push_u32(1).push_f32(1),
            KernelArgs().push_u64(0).push_u32(1).push_f64(1),
            KernelArgs().push_u64(0).push_u32(1).push_f32(1).push_u32(0),
        ],
        ids=["none", "one-short", "pointer-narrow", "float-wide", "one-more"],
    )
    def test_bad_sizes(self, session: GpuSession, args: KernelArgs) -> None:
        module = session.module_load(TRANSFORM)
        with pytest.raises(LaunchFailed, match="scale"):
            session.launch(module, "scale", [1], [1], args)

    @pytest.mark.parametrize(
        ("grid", "block"),
        [([1], [1025]), ([1], [32, 33]), ([0], [1]), ([1], [0]), ([1, 1, 1, 1], [1]), ([2**32], [1]), ([-1], [1])],
    )
    def test_bad_shapes(self, session: GpuSession, grid: list[int], block: list[int]) -> None:
        module = session.module_load(TRANSFORM)
        buffer = session.mem_alloc(4)
        with pytest.raises(LaunchFailed, match="scale"):
            session.launch(module, "scale", grid, block, scale_args(buffer, 1))

    def test_on_the_wire(self, daemon: Daemon, lease: GpuLease) -> None:
        ident = lease.lease_id
        with RawPeer(daemon.address).hello() as peer:
            peer.attach(ident)
            module = peer.request(Opcode.MODULE_LOAD, ModuleLoad(TRANSFORM), ident).module
            handle = peer.request(Opcode.MEM_ALLOC, MemAlloc(16), ident).handle
            good = packed_scale_args(handle, 4)
            for launch, said in (
                (Launch(module, "nothing", 1, 1, 1, 1, 1, 1, 0, *good), "nothing"),
                (Launch(module, "scale", 1, 1, 1, 1025, 1, 1, 0, *good), "1025 threads"),
                (Launch(module, "scale", 1, 1, 1, 64, 64, 64, 0, *good), "262144 threads"),
                (Launch(module, "scale", 0, 1, 1, 1, 1, 1, 0, *good), "at least 1"),
                (Launch(module, "scale", 1, 1, 1, 1, 0, 1, 0, *good), "at least 1"),
                (Launch(module, "scale", 1, 65536, 1, 1, 1, 1, 0, *good), "grid"),
                (Launch(module, "scale", 1, 1, 1, 1, 1, 1, 1 << 30, *good), "shared memory"),
                (Launch(module, "scale", 1, 1, 1, 1, 1, 1, 0, good[0], (8, 8)), "[8, 4, 4]"),
                (Launch(module, "scale", 1, 1, 1, 1, 1, 1, 0, good[0][:-1], (8, 4, 4)), "must have 16 bytes"),
                (Launch(module, "scale", 1, 1, 1, 1, 1, 1, 0, b"", ()), "[8, 4, 4]"),
            ):
                failure = peer.refused(Opcode.LAUNCH, launch, ident)
                assert failure.status is Status.LAUNCH_FAILED
                assert said in failure.message
            peer.request(Opcode.SYNC, Empty(), ident)


class TestSyncFailed:
    @pytest.mark.parametrize("offset", [1 << 40, 16, -4, -(1 << 20)])
    def test_illegal_store(self, session: GpuSession, offset: int) -> None:
        module = session.module_load(FAULTS)
        buffer = session.mem_alloc(16)
        start_stray_store(session, module, buffer, offset % 2**64)
        with pytest.raises(SyncFailed, match="illegal address") as caught:
            session.sync()
        assert caught.value.kernel == "stray_store"
        assert caught.value.address == (buffer.handle + offset) % 2**64
        assert f"{caught.value.address:#x}" in caught.value.message
        assert caught.value.hint

    def test_illegal_load(self, session: GpuSession) -> None:
        module = session.module_load(FAULTS)
        buffer = session.mem_alloc(16)
        session.launch(module, "stray_load", [1], [1], KernelArgs().push_buffer(buffer).push_u64(1 << 33))
        with pytest.raises(SyncFailed, match="stray_load"):
            session.sync()

    def test_null(self, session: GpuSession) -> None:
        module = session.module_load(FAULTS)
        session.launch(module, "stray_store", [1], [1], KernelArgs().push_u64(0).push_u64(0))
        with pytest.raises(SyncFailed) as caught:
            session.sync()
        assert caught.value.address == 0

    def test_misaligned(self, session: GpuSession) -> None:
        module = session.module_load(FAULTS)
        buffer = session.mem_alloc(16)
        session.launch(module, "misaligned", [1], [1], KernelArgs().push_buffer(buffer))
        with pytest.raises(SyncFailed, match="misaligned address") as caught:
            session.sync()
        assert caught.value.address == buffer.handle + 1

    def test_into_freed_memory(self, session: GpuSession) -> None:
        module = session.module_load(FAULTS)
        buffer = session.mem_alloc(1 << 16)
        address = buffer.handle
        session.mem_free(buffer)
        session.launch(module, "stray_store", [1], [1], KernelArgs().push_u64(address).push_u64(0))
        with pytest.raises(SyncFailed):
            session.sync()

    def test_over_the_end_of_a_buffer(self, session: GpuSession) -> None:
        module = session.module_load(TRANSFORM)
        buffer = session.mem_alloc(4 * 100)
        session.launch(module, "scale", [1], [101], scale_args(buffer, 101))
        with pytest.raises(SyncFailed) as caught:
            session.sync()
        assert caught.value.address == buffer.handle + 400


class TestLeaving:
    def test_a_fault_of_the_last_launch_is_raised(self, lease: GpuLease) -> None:
        with pytest.raises(SyncFailed) as caught, GpuSession(lease) as session:
            number = start_stray_store(session, session.module_load(FAULTS), session.mem_alloc(16))
        assert (caught.value.kernel, caught.value.failure.failed_request_id) == ("stray_store", number)

    def test_a_fault_that_was_handled_is_not_raised_again(self, lease: GpuLease) -> None:
        with GpuSession(lease) as session:
            start_stray_store(session, session.module_load(FAULTS), session.mem_alloc(16))
            with pytest.raises(SyncFailed):
                session.sync()
