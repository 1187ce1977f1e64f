"""What a client raises when things go wrong, on both APIs."""

import gc
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from gpulease import client
from gpulease.client import Disconnected, GpuBuilder, GpuLeaseError, KernelArgs, LaunchFailed, LoadFailed, SyncFailed
from gpulease.protocol import Connection, Failure, Opcode, Request, Role, Status
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import Empty, HelloReply
from helpers.client_faces import Face, Scenario, any_operation
from helpers.scripted_peer import HangUp, Refusal, SayGoodbye, ScriptedPeer, SendRaw, Silence

Run = Callable[[Scenario], None]

NOBODY: Final = 65534

ERRORS = {
    Status.DISCONNECTED: client.Disconnected,
    Status.LEASE_EXPIRED: client.LeaseExpired,
    Status.FENCED: client.Fenced,
    Status.CAPACITY_EXCEEDED: client.CapacityExceeded,
    Status.UNSUPPORTED: client.Unsupported,
    Status.REVOKED: client.Revoked,
    Status.INVALID_REQUEST: client.InvalidRequest,
    Status.NOT_FOUND: client.NotFound,
    Status.DENIED: client.Denied,
    Status.BUSY: client.Busy,
    Status.INTERNAL: client.GpuLeaseError,
    Status.LEASE_FREED: client.LeaseFreed,
    Status.SESSION_FAILED: client.GpuSessionFailed,
    Status.ALLOC_FAILED: client.AllocFailed,
    Status.INVALID_HANDLE: client.InvalidHandle,
    Status.LOAD_FAILED: client.LoadFailed,
    Status.LAUNCH_FAILED: client.LaunchFailed,
    Status.SYNC_FAILED: client.SyncFailed,
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("status", ERRORS, ids=lambda status: str(status.name))
def test_every_status_has_its_error(
    run: Run, peer: ScriptedPeer, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpulease.client.core.lease.END_REASON_WAIT_S", 0.05)
    peer.fail(Opcode.MEM_ALLOC, status, "no such luck", hint="pray")

    async def scenario(face: Face) -> None:
        async with face.session() as session:
            with pytest.raises(ERRORS[status]) as caught:
                await session.mem_alloc(4)
            assert type(caught.value) is ERRORS[status]
            assert str(caught.value) == "mem_alloc: no such luck. Pray"
            assert caught.value.status is status

    run(scenario)


@pytest.mark.parametrize("op", [Opcode.HELLO, Opcode.LEASE_ALLOC])
def test_a_refusal_on_the_way_to_a_lease(run: Run, peer: ScriptedPeer, op: Opcode) -> None:
    peer.fail(op, Status.BUSY, "too many")

    async def scenario(face: Face) -> None:
        with pytest.raises(client.Busy, match="too many"):
            await face.acquire()

    run(scenario)


@pytest.mark.parametrize("op", [Opcode.HELLO, Opcode.LEASE_ALLOC])
@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (HangUp(), Disconnected),
        (SayGoodbye(Failure(Status.BUSY, "full")), client.Busy),
        (SendRaw(b"HTTP/1.1 400 Bad Request, and a long explanation\r\n\r\n"), Disconnected),
        (SendRaw(b"GPLS\x63" + bytes(35)), client.Unsupported),
        (SendRaw(b"GPLS", closes=True), Disconnected),
    ],
    ids=["eof", "goodbye", "garbage", "version", "truncated"],
)
def test_a_broken_control_connection(
    run: Run, peer: ScriptedPeer, op: Opcode, outcome: Exception, error: type[GpuLeaseError]
) -> None:
    peer.on(op, outcome)

    async def scenario(face: Face) -> None:
        with pytest.raises(error) as caught:
            await face.acquire()
        if error is Disconnected:
            assert peer.address in str(caught.value)

    run(scenario)


def test_a_lease_is_asked_for_in_one_flight_with_hello(tmp_path: Path) -> None:
    path = tmp_path / "d.sock"
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind(str(path))
        listener.listen()
        acquiring = pool.submit(GpuBuilder(f"unix:{path}").min_vram(1).acquire)
        with listener.accept()[0] as daemon:
            server = Connection(Role.SERVER, max_payload_bytes=MAX_PAYLOAD_BYTES)
            server.receive_data(daemon.recv(1 << 16))
            hello = server.next_event()
            assert isinstance(hello, Request)
            server.send_reply(hello, HelloReply(0, "made-up", MAX_PAYLOAD_BYTES, ()))
            wanted = server.next_event()
            assert isinstance(wanted, Request)
            assert wanted.op is Opcode.LEASE_ALLOC
        with pytest.raises(Disconnected):
            acquiring.result()


def test_a_socket_that_is_not_for_this_user(tmp_path: Path) -> None:
    path, user = tmp_path / "d.sock", os.geteuid()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        path.chmod(0)
        if user == 0:
            os.seteuid(NOBODY)  # Root may write to any.
        try:
            with pytest.raises(Disconnected, match=r"Permission denied\. Ask the operator to give this user access"):
                GpuBuilder(f"unix:{path}").min_vram(1).lease_secs(1).acquire()
        finally:
            os.seteuid(user)


def test_no_daemon_at_all(run: Run, peer: ScriptedPeer) -> None:
    async def scenario(face: Face) -> None:
        for address in ("unix:/nowhere/at/all", "tcp:127.0.0.1:1"):
            face.peer.address = address
            with pytest.raises(Disconnected, match=rf"can't connect to {address}: .* Is gpuleased running\?"):
                await face.acquire()

    run(scenario)


@pytest.mark.parametrize("op", ["MEM_ALLOC", "MEM_WRITE", "MEM_READ", "MODULE_LOAD", "SYNC"])
def test_a_failed_launch_is_reported_by_the_next_operation(run: Run, peer: ScriptedPeer, op: str) -> None:
    peer.script[Opcode.LAUNCH] = _refuse_once(Failure(Status.SYNC_FAILED, "illegal address"))

    async def scenario(face: Face) -> None:
        async with face.session() as session:
            buffer, module = await session.mem_alloc(1 << 21), await session.module_load(b"ptx")
            number = await session.launch(module, "nothing", [1], [1], KernelArgs())
            await session.launch(module, "nothing", [1], [1], KernelArgs())
            with pytest.raises(SyncFailed) as caught:
                await any_operation(session, buffer, module, op)
            words = f"{op.lower()}: earlier launch {number} of kernel 'nothing' failed: illegal address"
            assert str(caught.value).startswith(f"{words}; this {op.lower()} was not executed")
            assert caught.value.kernel == "nothing"
            assert caught.value.failure.failed_request_id == number
            assert buffer.is_alive
            await any_operation(session, buffer, module, op)

    run(scenario)


@pytest.mark.parametrize("op", ["MEM_WRITE", "MEM_FREE"])
def test_what_is_handed_over_and_fails_is_told_by_the_next_that_waits(
    run_over_both: Run, peer: ScriptedPeer, op: str
) -> None:
    peer.script[Opcode[op]] = _refuse_once(Failure(Status.INVALID_HANDLE, "gone"))

    async def scenario(face: Face) -> None:
        async with face.session() as session:
            buffer, other = await session.mem_alloc(64), await session.mem_alloc(64)
            if op == "MEM_WRITE":
                await session.mem_write(buffer, 0, bytes(64))
            else:
                await session.mem_free(buffer)
                assert not buffer.is_alive
            await session.mem_write(other, 0, b"skipped")
            with pytest.raises(client.InvalidHandle, match=rf"^sync: earlier {op} \d+ failed: gone; this sync was not"):
                await session.sync()
            assert await session.mem_read(other, 0, 7) == bytes(7)
            await session.mem_write(other, 0, b"written")
            await session.sync()

    run_over_both(scenario)


def test_a_chunk_that_fails_is_the_writes_own_failure(run: Run, peer: ScriptedPeer) -> None:
    peer.script[Opcode.MEM_WRITE] = _refuse_once(Failure(Status.INVALID_HANDLE, "gone"))

    async def scenario(face: Face) -> None:
        async with face.session() as session:
            buffer = await session.mem_alloc(3 << 20)
            with pytest.raises(client.InvalidHandle, match=r"^mem_write: gone"):
                await session.mem_write(buffer, 0, bytes(3 << 20))
            await session.mem_write(buffer, 0, bytes(3 << 20))

    run(scenario)


def test_a_module_that_does_not_compile(run: Run, peer: ScriptedPeer) -> None:
    peer.fail(Opcode.MODULE_LOAD, Status.LOAD_FAILED, "syntax error", log="line 7: oops", line=7)

    async def scenario(face: Face) -> None:
        async with face.session() as session:
            with pytest.raises(LoadFailed) as caught:
                await session.module_load("bad ptx")
            assert (caught.value.log, caught.value.line) == ("line 7: oops", 7)

    run(scenario)


def test_a_fault_names_kernel_and_address(run: Run, peer: ScriptedPeer) -> None:
    peer.fail(Opcode.SYNC, Status.SYNC_FAILED, "illegal address", kernel="scale", address=0xDEAD)

    async def scenario(face: Face) -> None:
        async with face.session() as session:
            with pytest.raises(SyncFailed) as caught:
                await session.sync()
            assert (caught.value.kernel, caught.value.address) == ("scale", 0xDEAD)

    run(scenario)


@pytest.mark.parametrize("status", [Status.LEASE_EXPIRED, Status.REVOKED, Status.FENCED])
def test_a_lost_lease_stays_lost(run: Run, peer: ScriptedPeer, status: Status) -> None:
    peer.fail(Opcode.SYNC, status, "over")

    async def scenario(face: Face) -> None:
        async with face.session() as session:
            buffer, module = await session.mem_alloc(1 << 21), await session.module_load(b"ptx")
            for op in ("SYNC", "MEM_READ", "LAUNCH", "MEM_ALLOC"):
                with pytest.raises(ERRORS[status], match=f"{op.lower()}: over"):
                    await any_operation(session, buffer, module, op)
            assert not buffer.is_alive

    peer.script[Opcode.MEM_READ] = peer.script[Opcode.SYNC]
    run(scenario)


@pytest.mark.parametrize("status", [Status.LEASE_EXPIRED, Status.REVOKED, Status.LEASE_FREED, Status.NOT_FOUND])
def test_renew_and_free_after_the_end(run: Run, peer: ScriptedPeer, status: Status) -> None:
    for op in (Opcode.LEASE_RENEW, Opcode.LEASE_FREE):
        peer.fail(op, status, "over")

    async def scenario(face: Face) -> None:
        lease = await face.acquire()
        with pytest.raises(ERRORS[status], match="lease_renew: over"):
            await lease.renew(1)
        with pytest.raises(ERRORS[status], match="lease_free: over"):
            await lease.free()

    run(scenario)


def test_control_goes_on_over_a_new_connection(run: Run, peer: ScriptedPeer) -> None:
    async def scenario(face: Face) -> None:
        lease = await face.acquire()
        peer.cut()
        await lease.renew(50)
        assert lease.remaining_s > 49
        peer.cut()
        await lease.free()
        assert peer.ops().count("HELLO") == 3

    run(scenario)


def test_a_daemon_that_hangs(run: Run, peer: ScriptedPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def hangs(op: Opcode, limit: str, words: str) -> Iterator[None]:
        """Have the peer not answer an operation, whose limit alone is short: a slow host answers the others in time."""
        peer.on(op, Silence())
        with monkeypatch.context() as short:
            short.setattr(f"gpulease.client.core.{limit}", 0.1)
            with pytest.raises(Disconnected, match=words):
                yield
        del peer.script[op]

    async def scenario(face: Face) -> None:
        with hangs(Opcode.LEASE_ALLOC, "lease.ACQUIRE_REPLY_LIMIT_S", r"lease_alloc: .* did not answer within 0\.1 s"):
            await face.acquire()
        lease = await face.acquire()
        with hangs(
            Opcode.LEASE_RENEW, "exchange.CONTROL_REPLY_LIMIT_S", r"lease_renew: .* did not answer within 0\.1 s"
        ):
            await lease.renew(5)
        assert (await lease.query())["state"] == "active"
        with hangs(Opcode.HELLO, "lease.CONNECT_LIMIT_S", r"connect: .* did not answer within 0\.1 s"):
            await face.acquire()

    run(scenario)


@pytest.mark.parametrize(("earlier", "has_garbage", "tries"), [(None, True, 2), (None, False, 1), (1, True, 1)])
def test_an_allocation_without_room_is_tried_again_if_garbage_had_buffers(
    run: Run, peer: ScriptedPeer, earlier: int | None, has_garbage: bool, tries: int
) -> None:
    async def scenario(face: Face) -> None:
        async with face.session() as session:
            cycle: list[Any] = [await session.mem_alloc(16)]
            if has_garbage:
                cycle.append(cycle)
            peer.fail(Opcode.MEM_ALLOC, Status.ALLOC_FAILED, failed_request_id=earlier, failed_op=None)
            del cycle
            with pytest.raises(client.AllocFailed):
                await session.mem_alloc(16)
            assert peer.ops().count("MEM_ALLOC") == 1 + tries

    gc.collect()
    gc.disable()
    try:
        run(scenario)
    finally:
        gc.enable()


def test_local_launch_checks(run: Run) -> None:
    cases: list[tuple[Any, ...]] = [
        (("other", [1], [1], KernelArgs()), "no such kernel; it has nothing, scale, small"),
        (("other", [1], [1], [b"1234", 7]), "no such kernel; it has nothing, scale, small"),
        (("small", [1], [1], KernelArgs()), "0 arguments were given, but the kernel has 1 parameters"),
        (("small", [1], [1], [np.uint32(1), 2]), "2 arguments were given, but the kernel has 1 parameters"),
        (("scale", [1], [1], [b"12345678", 2.5]), "2 arguments were given, but the kernel has 3 parameters"),
        (("small", [1], [1], KernelArgs().push_u64(1)), "argument 0 has 8 bytes, but the kernel's parameter has 4"),
        (("nothing", [0], [1], KernelArgs()), r"the grid's numbers must be from 1 to 4294967295, not 0"),
        (("nothing", [1], [1, 2**32], KernelArgs()), r"the block's numbers must be"),
        (("nothing", [], [1], KernelArgs()), "1 to 3 dimensions, not 0"),
        (("nothing", [1], [1] * 4, KernelArgs()), "1 to 3 dimensions, not 4"),
        (("nothing", 5, [1], KernelArgs()), r"the grid must be a sequence of integers, not 5\. Write \[5\]"),
        (("nothing", [1.5], [1], KernelArgs()), "must be a sequence of integers"),
        (
            ("small", [1], [65], KernelArgs().push_u32(1)),
            "a block of 65 threads was requested; the kernel allows at most 64",
        ),
        (("nothing", [1], [1], KernelArgs(), None, -1), "shared_bytes"),
        (("small", [1], [1], b"12345", [4]), "have 5 bytes, but the sum of their sizes is 4"),
    ]

    async def scenario(face: Face) -> None:
        async with face.session() as session:
            module = await session.module_load(b"ptx")
            for args, words in cases:
                with pytest.raises(LaunchFailed, match=words) as caught:
                    await session.launch(module, *args)
                assert caught.value.kernel == args[0]
            with pytest.raises(client.InvalidRequest, match="need arg_sizes"):
                await session.launch(module, "small", [1], [1], b"1234")
            with pytest.raises(client.InvalidRequest, match="unless the arguments are raw bytes"):
                await session.launch(module, "small", [1], [1], KernelArgs(), [4])
            with pytest.raises(client.InvalidHandle, match="must be a Module, not"):
                await session.launch("module", "small", [1], [1], KernelArgs())
            await session.sync()
            assert "LAUNCH" not in face.peer.ops()

    run(scenario)


def test_hello_of_a_daemon_that_takes_almost_nothing(run: Run, peer: ScriptedPeer) -> None:
    peer.on(Opcode.HELLO, HelloReply(0, "tiny", 21, ()))

    async def scenario(face: Face) -> None:
        async with face.session() as session:
            buffer = await session.mem_alloc(3)
            await session.mem_write(buffer, 0, b"abc")
            assert await session.mem_read(buffer, 0, 3) == b"abc"

    run(scenario)


def _refuse_once(failure: Failure) -> Callable[[Any], Any]:
    left = [failure]

    def answer(_: Any) -> Any:
        if left:
            raise Refusal(left.pop())
        return Empty()

    return answer
