"""A forked child can't use what it inherits of its parent's leases and sessions, and its end changes nothing."""

import os
import subprocess
import sys

import pytest

from gpulease.protocol import Opcode, Phase, Request
from gpulease.protocol.codec import build_body
from gpulease.protocol.framing import build_frame
from gpulease.protocol.messages import Empty, LeaseEvent
from gpulease.protocol.opcodes import Flag
from helpers.scripted_peer import LEASE_ID, ScriptedPeer, SendRaw

PROGRAM = """
import asyncio, gc, multiprocessing, os, sys, threading
from gpulease.client import GpuBuilder, GpuSession, InvalidRequest, KernelArgs, Permission

address, how, ring = sys.argv[1], sys.argv[2], sys.argv[3] == "ring"
lease = GpuBuilder(address).min_vram(1 << 20).acquire()
session = GpuSession(lease, shared_memory=ring)
module = session.module_load(b"ptx")
buffer = session.mem_alloc(4)
stream = session.stream()
launch = lambda: session.launch(module, "nothing", [1], [1], KernelArgs())
launch()

def refused(use):
    try:
        use()
    except InvalidRequest as error:
        assert "the process that forked this one" in str(error), error
    else:
        raise AssertionError(f"{use} was not refused")

def child():
    assert not session.is_alive and not lease.is_alive
    for use in (
        session.sync, launch, stream.sync, lambda: session.mem_alloc(4), lambda: session.mem_write(buffer, 0, b"four"),
        lambda: session.mem_read(buffer, 0, 4), lambda: session.mem_free(buffer), lambda: session.module_load(b"ptx"),
        lambda: session.record().__enter__(), lambda: GpuSession(lease), lease.free, lease.query, lease.events,
        lambda: lease.renew(5), lambda: lease.issue(Permission.MEM_READ),
        lambda: lease.submit("nothing", b"ptx").launch(), lambda: session.empty(4),
    ):
        refused(use)
    lost = []
    with lease.keep_alive(lost.append) as keeper:
        pass
    with session, stream, lease:
        pass
    session.close()

def drops():
    global lease, session, module, buffer, stream, launch
    del lease, session, module, buffer, stream, launch
    gc.collect()

# A thread of the parent's holds the session's lock all the time.
held, done = threading.Event(), threading.Event()
def hold():
    with session._lock:
        held.set()
        done.wait()
holder = threading.Thread(target=hold)
holder.start()
held.wait()
if how == "multiprocessing":
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    status = process.exitcode
else:
    pid = os.fork()
    if not pid:
        # Runs the child's finalizers.
        (child if how == "uses" else drops)()
        sys.exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
done.set()
holder.join()
assert status == 0, status
launch()
session.sync()
assert session.mem_read(buffer, 0, 4) == bytes(4)
lease.query()
"""


@pytest.mark.parametrize("ring", ["ring", "socket"])
@pytest.mark.parametrize("how", ["uses", "drops", "multiprocessing"])
def test_a_child_is_refused_and_its_parent_goes_on(peer: ScriptedPeer, how: str, ring: str) -> None:
    peer.gives_rings = ring == "ring"
    check_program(PROGRAM, peer, how, ring)
    assert peer.ops().count("LEASE_FREE") == peer.ops().count("ATTACH") == 1
    rest = peer.ops()[peer.ops().index("LAUNCH") :]
    assert rest == ["LAUNCH", "LAUNCH", "SYNC", "MEM_READ", "LEASE_QUERY", "LEASE_FREE"], "the child sent nothing"


ASYNC_PROGRAM = """
import asyncio, os, sys
from gpulease.client import InvalidRequest
from gpulease.client.aio import GpuBuilder, GpuSession

async def refused(operation):
    try:
        await operation
    except InvalidRequest as error:
        assert "the process that forked this one" in str(error), error
    else:
        raise AssertionError("it was not refused")

async def uses(lease, session, buffer):
    await refused(session.sync())
    await refused(session.mem_read(buffer, 0, 4))
    await refused(session.mem_write(buffer, 0, b"four"))
    await refused(lease.query())
    await refused(lease.free())
    async with session, lease:
        pass

async def main():
    lease = await GpuBuilder(sys.argv[1]).min_vram(1 << 20).acquire()
    async with lease, GpuSession(lease) as session:
        buffer = await session.mem_alloc(4)
        pid = os.fork()
        if not pid:
            # Its event loop is the parent's too: the child has one of its own.
            asyncio._set_running_loop(None)
            asyncio.run(uses(lease, session, buffer))
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        await session.sync()
        assert await session.mem_read(buffer, 0, 4) == bytes(4)

asyncio.run(main())
"""


def test_the_same_on_the_asyncio_face(peer: ScriptedPeer) -> None:
    check_program(ASYNC_PROGRAM, peer)
    assert peer.ops()[-4:] == ["MEM_ALLOC", "SYNC", "MEM_READ", "LEASE_FREE"]


EVENTS_PROGRAM = """
import os, sys
from gpulease.client import GpuBuilder, InvalidRequest

with GpuBuilder(sys.argv[1]).min_vram(1 << 20).acquire() as lease, lease.events() as events:
    next(events)
    while not events._stream._channel.link.notifications:
        events._stream._channel.pump()
    pid = os.fork()
    if not pid:
        try:
            next(events)
        except InvalidRequest as error:
            assert "the process that forked this one" in str(error), error
            events.close()
            sys.exit(0)
        sys.exit("an event of the parent's was taken")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert events._stream._channel.link.end is None
    assert next(events).reason == "second"
"""


def test_a_child_takes_no_events_of_its_parent_s(peer: ScriptedPeer) -> None:
    def tell_two(request: Request) -> Empty:
        frames = [build_frame(Opcode.LEASE_SUBSCRIBE, b"", request_id=request.request_id, flags=Flag.REPLY)]
        for sequence, reason in enumerate(("first", "second"), 1):
            body = build_body(LeaseEvent(LEASE_ID, sequence, 0, Phase.ACTIVE, 1000, 1, "", reason))
            frames.append(build_frame(Opcode.LEASE_EVENT, body, request_id=request.request_id, flags=Flag.REPLY))
        raise SendRaw(b"".join(frames))

    peer.script[Opcode.LEASE_SUBSCRIBE] = tell_two
    check_program(EVENTS_PROGRAM, peer)
    assert "LEASE_UNSUBSCRIBE" not in peer.ops()


def check_program(program: str, peer: ScriptedPeer, *arguments: str) -> None:
    """Run it to its end, without a word of it on standard error."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, peer.address, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert not done.stderr, done.stderr
    assert done.returncode == 0
