"""RpcServer with callers that write any bytes, ring at any time, or die in any state: others are unaffected."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulease.client import Disconnected
from gpulease.client.http import unix_path
from gpulease.client.serve.rpc import CallTimedOut, RpcClient
from gpulease.client.serve.rpc.server import MAX_CALLERS, MAX_FALSE_BELLS
from gpulease.protocol.rpc import MAX_PAYLOAD_BYTES, REPLY_AT, CallErrorCode, CallHeader, CallStatus
from helpers.daemon import python_environment
from helpers.rpc_rig import ECHO, NEVER, SLOW, RpcRig, raw_caller
from helpers.waiting import PATIENCE_S, wait_until

CALLER = """
import sys, time
sys.path[:0] = sys.argv[3:]
from helpers.rpc_rig import raw_caller
from gpulease.protocol.rpc import CallStatus
with raw_caller(sys.argv[1]) as (sock, shared):
    shared.request.put(1, 3, b"data", CallStatus.EMPTY)
    if sys.argv[2] in ("ready", "rung"):
        shared.request.status = CallStatus.REQUEST_READY
    if sys.argv[2] == "rung":
        sock.send(b"1")
    print("there", flush=True)
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RpcRig]:
    with RpcRig(tmp_path_factory.mktemp("rpc")) as rig:
        yield rig


@pytest.fixture
def neighbour(rig: RpcRig) -> Iterator[RpcClient]:
    """Another caller, with calls that must still be correct afterwards."""
    with RpcClient(rig.address, timeout_s=PATIENCE_S) as client:
        assert client.call(ECHO, b"before").payload == b"before"
        yield client
        assert client.call(ECHO, b"behind").payload == b"behind"
    wait_until(lambda: rig.server.callers == 0, "nobody is connected any more")


@given(
    writes=st.lists(st.tuples(st.integers(0, 65535), st.binary(min_size=1, max_size=64), st.booleans()), max_size=20)
)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_bytes_at_any_time(neighbour: RpcClient, rig: RpcRig, writes: list[tuple[int, bytes, bool]]) -> None:
    with raw_caller(rig.path) as (sock, shared):
        memory = memoryview(shared._map)
        for at, data, rings in writes:
            part = data[: len(memory) - at]
            memory[at : at + len(part)] = part
            memory[12] = at % 6
            if rings:
                sock.send(b"\0")
        memory.release()
    assert neighbour.call(ECHO, b"beside").payload == b"beside"


@pytest.mark.parametrize("payload_len", [MAX_PAYLOAD_BYTES + 1, 2**31, 2**32 - 1])
def test_a_payload_beyond_the_region(neighbour: RpcClient, rig: RpcRig, payload_len: int) -> None:
    with raw_caller(rig.path) as (sock, shared):
        shared.request._memory[:17] = CallHeader(5, ECHO, CallStatus.REQUEST_READY, payload_len).to_bytes()
        sock.send(b"\0")
        assert sock.recv(1)
        header = shared.reply.header()
        assert (header.request_id, header.status) == (5, CallStatus.ERROR)
        assert shared.reply.payload(4)[0] == CallErrorCode.INVALID_REQUEST
        assert shared.request.status == CallStatus.EMPTY


def test_what_is_changed_after_the_bell_changes_nothing(neighbour: RpcClient, rig: RpcRig) -> None:
    with raw_caller(rig.path) as (sock, shared):
        shared.request.put(1, SLOW, b"original", CallStatus.REQUEST_READY)
        sock.send(b"\0")
        wait_until(lambda: shared.request.status == CallStatus.PROCESSING, "it was taken")
        shared.request.put(2, ECHO, b"another!", CallStatus.REQUEST_READY)
        assert sock.recv(1)
        header = shared.reply.header()
        assert (header.request_id, shared.reply.payload(header.payload_len)) == (1, b"original")


def test_bells_without_a_request(neighbour: RpcClient, rig: RpcRig) -> None:
    with raw_caller(rig.path) as (sock, _):
        sock.send(bytes(MAX_FALSE_BELLS + 1))
        assert sock.recv(1) == b""


@pytest.mark.parametrize("state", ["written", "ready", "rung"])
def test_a_caller_is_killed(neighbour: RpcClient, rig: RpcRig, state: str) -> None:
    cancelled = rig.cancelled
    helpers = str(Path(__file__).parents[3])
    command = [sys.executable, "-P", "-c", CALLER, rig.path, state, helpers]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=python_environment()) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        wait_until(lambda: rig.server.callers == 2, "it is connected")
        process.kill()
    wait_until(lambda: rig.server.callers == 1, "it is gone")
    # What nobody waits for any more is given up.
    assert rig.cancelled - cancelled == (state == "rung")


def test_a_caller_that_asks_and_does_not_listen(neighbour: RpcClient, rig: RpcRig) -> None:
    with raw_caller(rig.path) as (sock, shared):
        for number in range(1000):
            shared.request.put(number, ECHO, b"", CallStatus.REQUEST_READY)
            sock.send(b"\0")
            while shared.request.status != CallStatus.EMPTY:
                time.sleep(0)
    assert neighbour.call(ECHO, b"beside").payload == b"beside"


def test_the_memory_is_the_callers_own_and_keeps_its_size(neighbour: RpcClient, rig: RpcRig) -> None:
    with raw_caller(rig.path) as (one_sock, one), raw_caller(rig.path) as (_, other):
        one.request.put(1, ECHO, b"secret", CallStatus.REQUEST_READY)
        one_sock.send(b"\0")
        assert one_sock.recv(1)
        assert bytes(memoryview(other._map)) == bytes(2 * REPLY_AT)


def test_more_callers_than_there_may_be(neighbour: RpcClient, rig: RpcRig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_CALLERS >= 64
    monkeypatch.setattr("gpulease.client.serve.rpc.server.MAX_CALLERS", 2)
    with (
        raw_caller(rig.path),
        RpcClient(rig.address) as third,
        pytest.raises(Disconnected, match="accepts no more"),
    ):
        third.call(ECHO, b"", timeout_s=1)


def test_nobody_spins_while_all_are_idle(neighbour: RpcClient, rig: RpcRig) -> None:
    def waits() -> None:
        with RpcClient(rig.address, spin_ns=200_000) as client:
            used.append(time.thread_time())
            with pytest.raises(CallTimedOut):
                client.call(NEVER, b"", timeout_s=0.5)
            used.append(time.thread_time())

    used: list[float] = []
    before = _cpu_s(rig.thread_id)
    thread = threading.Thread(target=waits)
    thread.start()
    thread.join()
    assert used[1] - used[0] < 0.1
    assert _cpu_s(rig.thread_id) - before < 0.1


def _cpu_s(thread_id: int) -> float:
    fields = Path(f"/proc/self/task/{thread_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_callers_come_back_through_a_socket_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix_path, "CHECK_INTERVAL_S", 0.01)
    with RpcRig(tmp_path) as rig, RpcClient(rig.address, timeout_s=60) as before:
        for _ in range(2):
            os.unlink(rig.path)
            wait_until(lambda: os.path.exists(rig.path), "the socket was made again")
            assert before.call(ECHO, b"on").payload == b"on"
            with RpcClient(rig.address, timeout_s=60) as anew:
                assert anew.call(ECHO, b"anew").payload == b"anew"
