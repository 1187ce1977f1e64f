"""What programs leave behind in a lease that outlives them: nothing, except what they keep by name.

With a real daemon.
"""

import asyncio
import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from gpulease.client import (
    AllocFailed,
    Buffer,
    GpuExclusivityClass,
    GpuLease,
    GpuSession,
    InvalidHandle,
    InvalidRequest,
    LaunchFailed,
    Permission,
    aio,
)
from gpulease.protocol import Failure, Opcode
from gpulease.protocol.messages import Empty, Freed, Handle, MemAlloc
from helpers.daemon import Daemon, python_environment
from helpers.kernels import TRANSFORM, start_endless
from helpers.raw_peer import RawPeer
from helpers.waiting import wait_until

SLICE = 64 << 20
MOST = 40 << 20
"""More than half of the slice, so that two buffers of this size do not fit."""

PROGRAM = """
import os, signal, sys
from gpulease.client import GpuSession
session = GpuSession.attach()
buffer = session.mem_alloc(40 << 20)
module = session.module_load(open(sys.argv[2], "rb").read())
print("allocated", flush=True)
match sys.argv[1]:
    case "kill": os.kill(os.getpid(), signal.SIGKILL)
    case "exit": os._exit(1)
    case "raise": raise SystemExit(1)
    case "close": session.close()
"""


def lease_of(daemon: Daemon, *, is_shared: bool = False) -> GpuLease:
    builder = daemon.builder(SLICE)
    return (builder.exclusivity(GpuExclusivityClass.SHARED) if is_shared else builder).acquire()


@pytest.mark.parametrize(
    "is_shared", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["exclusive", "shared"]
)
@pytest.mark.parametrize("ends", [["kill"], pytest.param(["close", "exit", "raise"], marks=pytest.mark.exhaustive)])
def test_a_program_in_a_crash_loop_finds_the_memory_free(
    daemon: Daemon, tmp_path: Any, ends: list[str], *, is_shared: bool
) -> None:
    image = tmp_path / "transform.ptx"
    image.write_bytes(TRANSFORM)
    with lease_of(daemon, is_shared=is_shared) as lease:
        names = {"GPULEASE_ADDRESS": daemon.address, "GPULEASE_LEASE_ID": str(lease.lease_id)}
        # Each program finds the slice as the program before has left it.
        for end in (*ends, ends[0]):
            command = [sys.executable, "-c", PROGRAM, end, str(image)]
            ran = subprocess.run(command, env=python_environment() | names, capture_output=True, text=True, check=False)
            assert ran.stdout == "allocated\n", ran.stderr
        wait_until(lambda: not lease.query()["connections"], "the worker has seen their ends")
        report = lease.query()
        # The lease would still contain anything that a program has left.
        assert (report["allocated_bytes"], report["unheld_bytes"], report["kept_memory_bytes"]) == (0, 0, 0)


def test_a_guest_s_memory_ends_with_its_connection_or_its_token(daemon: Daemon) -> None:
    permissions = Permission.MEM_READ | Permission.MEM_WRITE | Permission.TASKLET_SUBMIT
    with lease_of(daemon, is_shared=True) as lease, GpuSession(lease) as owner:
        for revokes in (False, True):
            grant = lease.issue(permissions)
            guest = GpuSession.attach(grant, daemon.address)
            guest.mem_alloc(MOST)
            with pytest.raises(AllocFailed):
                owner.mem_alloc(MOST)
            if revokes:
                lease.revoke_token(grant)
            else:
                guest.close()
            wait_until(lambda: lease.query()["allocated_bytes"] == 0, "it is given back")
            owner.mem_free(owner.mem_alloc(MOST))
            guest.close()


def test_other_sessions_go_on_beside_a_kernel_without_end_of_one_that_ended(daemon: Daemon) -> None:
    with lease_of(daemon, is_shared=True) as lease, GpuSession(lease) as other, GpuSession(lease):
        gone = GpuSession(lease)
        held = gone.mem_alloc(MOST), start_endless(gone, gone.stream())
        gone.close()
        del held
        wait_until(lambda: len(lease.query()["connections"]) == 2, "the worker has seen its end")
        report = lease.query()
        assert (report["unheld_bytes"], report["connections"][0]["held_bytes"]) == (MOST + 4, 0)
        own = other.mem_alloc(1 << 20)
        with pytest.raises(AllocFailed, match="connections that have ended still hold"):
            other.mem_alloc(MOST)
        assert own.is_alive
        lease.free()


def test_who_holds_the_buffers_is_told(daemon: Daemon) -> None:
    with lease_of(daemon, is_shared=True) as lease, GpuSession(lease) as first, GpuSession(lease) as second:
        buffers = [first.mem_alloc(1 << 20), first.mem_alloc(2 << 20), second.mem_alloc(4 << 20)]
        first.keep(buffers[0], "it")
        report = lease.query()
        assert report["connections"] == [
            {"number": 1, "pid": os.getpid(), "held_bytes": 2 << 20},
            {"number": 2, "pid": os.getpid(), "held_bytes": 4 << 20},
        ]
        assert (report["kept_memory_bytes"], report["unheld_bytes"]) == (1 << 20, 0)
        environment = python_environment() | {"GPULEASE_ADDRESS": daemon.address, "COLUMNS": "200"}
        shown = subprocess.run(
            [sys.executable, "-m", "gpulease.client.cli", "leases"],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        pid = os.getpid()
        assert f"{lease.lease_id}  pid {pid}: 2 MiB, pid {pid}: 4 MiB, kept by name: 1 MiB" in shown.stdout


def test_programs_hand_a_buffer_on_by_name(daemon: Daemon) -> None:
    with lease_of(daemon) as lease:
        with GpuSession(lease) as first:
            made = first.mem_alloc(MOST)
            first.mem_write(made, 0, b"of the first")
            first.keep(made, "steps")
            assert first.mem_read(made, 0, 12) == b"of the first"
            # Without a reference the kept buffer stays.
            del made
            first.sync()
        with GpuSession(lease) as second:
            assert second.kept_names() == {"steps": MOST}
            assert second.mem_read(second.kept("steps"), 0, 12) == b"of the first"
            second.sync()
        with GpuSession(lease) as third:
            own = third.take("steps")
            assert third.mem_read(own, 0, 12) == b"of the first"
            assert third.kept_names() == {}
            with pytest.raises(InvalidHandle, match=r"keeps no buffer with the name 'steps'\. It keeps: none"):
                third.take("steps")
        with GpuSession(lease) as fourth:
            again = fourth.mem_alloc(MOST)
            fourth.keep(again, "steps")
            with pytest.raises(InvalidRequest, match="already kept by the name 'steps'"):
                fourth.keep(fourth.mem_alloc(16), "steps")
            # A kept buffer that is freed is not held by the client for the next allocation of its size.
            fourth.mem_free(again)
            other = fourth.mem_alloc(MOST)
            assert fourth.kept_names() == {}
            assert isinstance(other, Buffer)
            for name in ("", "n" * 257, "a\0b"):
                with pytest.raises(InvalidRequest):
                    fourth.keep(other, name)
            with pytest.raises(InvalidHandle):
                fourth.keep(again, "freed")


def test_a_later_session_does_not_ask_for_the_parameter_types_again(daemon: Daemon) -> None:
    image = TRANSFORM + b"// an image that no other test loads\n"

    def operations_of_load(lease: GpuLease) -> int:
        with GpuSession(lease) as session:
            session.sync()
            before = lease.query()["operations"]
            module = session.module_load(image)
            used = lease.query()["operations"] - before
            # The types are known: the first argument is a pointer.
            with pytest.raises(LaunchFailed):
                session.launch(module, "scale", [1], [1], [np.float32(1.5), 1, 2.0])
            return used

    with lease_of(daemon) as lease:
        assert [operations_of_load(lease) for _ in range(3)] == [2, 1, 1]


def test_the_asyncio_face(daemon: Daemon) -> None:
    async def scenario() -> None:
        builder = aio.GpuBuilder(daemon.address).min_vram(SLICE)
        async with builder.acquire() as lease:
            async with aio.GpuSession(lease) as first:
                await first.keep(await first.mem_alloc(16), "a")
                await first.keep(await first.mem_alloc(32), "b")
                await first.mem_alloc(MOST)
            async with aio.GpuSession(lease) as second:
                assert await second.kept_names() == {"a": 16, "b": 32}
                assert (await second.kept("b")).size_bytes == 32
                taken = await second.take("a")
                await second.mem_alloc(MOST)
                assert await second.reset() == 32
                assert await second.mem_read(taken, 0, 16) == bytes(16)

    asyncio.run(scenario())


def test_an_older_client_s_buffers_stay_until_they_are_reset(daemon: Daemon) -> None:
    with lease_of(daemon) as lease:
        with RawPeer(daemon.address).hello() as old:
            assert not isinstance(old.attach(lease.lease_id), Failure)
            handle = old.request(Opcode.MEM_ALLOC, MemAlloc(MOST), lease.lease_id).handle
        with RawPeer(daemon.address).hello() as old:
            wait_until(lambda: not isinstance(old.attach(lease.lease_id), Failure), "its first connection is gone")
            assert old.request(Opcode.MEM_RESET, Empty(), lease.lease_id) == Freed(0)
            old.request(Opcode.MEM_FREE, Handle(handle), lease.lease_id)
            old.request(Opcode.MEM_ALLOC, MemAlloc(MOST), lease.lease_id)
        assert lease.query()["unheld_bytes"] == MOST
        environment = python_environment() | {"GPULEASE_ADDRESS": daemon.address}
        command = [sys.executable, "-m", "gpulease.client.cli", "free", "--memory", "--json", str(lease.lease_id)]

        def freed() -> Any:
            ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            return json.loads(ran.stdout) if ran.returncode == 0 else None

        assert freed() == {"lease_id": str(lease.lease_id), "freed_bytes": MOST}
        with GpuSession(lease) as session:
            session.mem_alloc(MOST)
            assert freed() is None, "the session is open elsewhere"
        assert lease.is_alive
