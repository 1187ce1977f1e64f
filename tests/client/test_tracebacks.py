"""A traceback ends near the caller's line: few frames of the client's own, and no error behind another."""

import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import gpulease.client
from gpulease import client
from gpulease.client import GpuLeaseError, KernelArgs
from gpulease.protocol import Opcode, Status
from helpers.client_faces import Face, Scenario
from helpers.scripted_peer import HangUp, ScriptedPeer

Run = Callable[[Scenario], None]

MAX_OWN_FRAMES = 3
CLIENT = str(Path(gpulease.client.__file__).parent)


def check_frames(error: GpuLeaseError) -> None:
    """At most three frames of the client's in all that Python prints of an error."""
    shown = traceback.TracebackException.from_exception(error)
    own = [frame for frame in shown.stack if frame.filename.startswith(CLIENT)]
    assert 1 <= len(own) <= MAX_OWN_FRAMES, shown.stack.format()
    assert "\nDuring handling of" not in "".join(shown.format())


async def acquire_refused(face: Face, peer: ScriptedPeer) -> Any:
    peer.fail(Opcode.LEASE_ALLOC, Status.CAPACITY_EXCEEDED)
    return face.acquire


async def launch_failed_here(face: Face, peer: ScriptedPeer) -> Any:
    session = await face.open(await face.acquire())
    module = await session.module_load(b"ptx")
    return lambda: session.launch(module, "scale", [1], [1], KernelArgs())


async def launch_failed_there(face: Face, peer: ScriptedPeer) -> Any:
    peer.fail(Opcode.LAUNCH, Status.LAUNCH_FAILED)
    session = await face.open(await face.acquire())
    await session.launch(await session.module_load(b"ptx"), "nothing", [1], [1], KernelArgs())
    return session.sync


async def freed_buffer(face: Face, peer: ScriptedPeer) -> Any:
    session = await face.open(await face.acquire())
    buffer = await session.mem_alloc(4)
    await session.mem_free(buffer)
    return lambda: session.mem_free(buffer)


async def write_outside(face: Face, peer: ScriptedPeer) -> Any:
    session = await face.open(await face.acquire())
    buffer = await session.mem_alloc(4)
    return lambda: session.mem_write(buffer, 0, b"five!")


async def lease_expired(face: Face, peer: ScriptedPeer) -> Any:
    session = await face.open(await face.acquire())
    peer.fail(Opcode.MEM_ALLOC, Status.LEASE_EXPIRED)
    return lambda: session.mem_alloc(4)


async def disconnected(face: Face, peer: ScriptedPeer) -> Any:
    session = await face.open(await face.acquire())
    buffer = await session.mem_alloc(1 << 20)
    peer.on(Opcode.MEM_READ, HangUp())
    peer.report.update(cause="shutdown")
    return lambda: session.mem_read(buffer, 0, 1 << 20)


async def lease_freed(face: Face, peer: ScriptedPeer) -> Any:
    lease = await face.acquire()
    await lease.free()
    return lambda: lease.renew(5)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (acquire_refused, client.CapacityExceeded),
        (launch_failed_here, client.LaunchFailed),
        (launch_failed_there, client.LaunchFailed),
        (freed_buffer, client.InvalidHandle),
        (write_outside, client.InvalidHandle),
        (lease_expired, client.LeaseExpired),
        (disconnected, client.Disconnected),
        (lease_freed, client.LeaseFreed),
    ],
)
def test_few_frames_are_the_client_s(
    run_over_both: Run,
    peer: ScriptedPeer,
    make: Callable[[Face, ScriptedPeer], Awaitable[Callable[[], Awaitable[Any]]]],
    kind: type[GpuLeaseError],
) -> None:
    async def scenario(face: Face) -> None:
        operation = await make(face, peer)
        with pytest.raises(kind) as caught:
            await operation()
        check_frames(caught.value)

    run_over_both(scenario)
