"""RpcClient with a real server: calls, errors, timeouts; and with servers that violate the protocol."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulease.client import Disconnected, InvalidRequest
from gpulease.client.serve.rpc import Answer, CallFailed, CallTimedOut, RpcClient
from gpulease.client.serve.rpc import client as client_module
from gpulease.client.serve.rpc.shared import MappedCall
from gpulease.protocol.rpc import MAX_PAYLOAD_BYTES, SHARED_BYTES, CallErrorCode, CallHeader, CallStatus, greeting
from helpers.rpc_rig import ECHO, FAIL, HUGE, IN_TIME, NEVER, RAISE, SLOW, TIME_LEFT, RpcRig, scripted_server
from helpers.waiting import PATIENCE_S, wait_until

from . import generate_vectors


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RpcRig]:
    with RpcRig(tmp_path_factory.mktemp("rpc")) as rig:
        yield rig


@pytest.fixture(params=[0, 200_000], ids=["sleeps", "spins"])
def client(rig: RpcRig, request: pytest.FixtureRequest) -> Iterator[RpcClient]:
    with RpcClient(rig.address, timeout_s=PATIENCE_S, spin_ns=request.param) as client:
        yield client


def test_vectors_are_up_to_date() -> None:
    assert generate_vectors.FILE.read_text(encoding="utf-8") == generate_vectors.document()


@given(payload=st.binary(max_size=MAX_PAYLOAD_BYTES))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_calls(client: RpcClient, payload: bytes) -> None:
    assert client.call(ECHO, payload) == Answer(ECHO, payload)


def test_largest_and_more(client: RpcClient) -> None:
    most = np.arange(MAX_PAYLOAD_BYTES, dtype=np.uint8)
    assert client.call(ECHO, most).payload == most.tobytes()
    with pytest.raises(InvalidRequest, match="Use HTTP"):
        client.call(ECHO, bytes(MAX_PAYLOAD_BYTES + 1))
    with pytest.raises(TypeError):
        client.call(ECHO, 5)


def test_errors(client: RpcClient, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CallFailed, match="no room") as raised:
        client.call(FAIL, b"")
    assert (raised.value.code, raised.value.retry_after_s) == (CallErrorCode.QUEUE_FULL, 0.25)
    for method, code in ((HUGE, CallErrorCode.INVALID_REQUEST), (RAISE, CallErrorCode.INTERNAL)):
        with pytest.raises(CallFailed) as raised:
            client.call(method, b"")
        assert raised.value.code is code
    assert client.call(ECHO, b"goes on").payload == b"goes on"
    assert client.describe() == {"echo": 1}


def test_a_call_that_takes_its_time(client: RpcClient) -> None:
    assert client.call(SLOW, b"later").payload == b"later"


def test_a_call_that_takes_too_long(client: RpcClient, rig: RpcRig) -> None:
    cancelled = rig.cancelled
    with pytest.raises(CallTimedOut, match="may have been executed"):
        client.call(NEVER, b"", timeout_s=0.1)
    # On a connection of its own again: what may still come is nobody's.
    assert client.call(ECHO, b"next").payload == b"next"
    wait_until(lambda: rig.cancelled == cancelled + 1, "the server gives it up")


def test_a_call_with_a_deadline_of_its_own(client: RpcClient, monkeypatch: pytest.MonkeyPatch) -> None:
    left_s = float(client.call(TIME_LEFT, b"", deadline_s=60).payload)
    assert 50 < left_s <= 60
    # It is that call's alone.
    assert client.call(TIME_LEFT, b"").payload == b"None"
    with pytest.raises(CallFailed, match="not begun in its time") as raised:
        client.call(IN_TIME, b"", deadline_s=60)
    assert raised.value.code is CallErrorCode.TOO_LATE
    # A server that does not keep to it is not waited for: in all, for a tenth of a second.
    monkeypatch.setattr("gpulease.client.serve.rpc.client.ANSWER_ROOM_S", 0.1 - 60)
    began_s = time.monotonic()
    with pytest.raises(CallTimedOut):
        client.call(NEVER, b"", deadline_s=60)
    assert time.monotonic() - began_s < 60, "the room counts from the deadline"
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidRequest, match="a deadline must be"):
            client.call(ECHO, b"", deadline_s=seconds)


def test_an_answer_where_the_deadline_was_is_no_deadline(client: RpcClient) -> None:
    most = bytes([7]) * MAX_PAYLOAD_BYTES
    for _ in range(2):
        assert client.call(ECHO, most, deadline_s=60).payload == most
        assert client.call(TIME_LEFT, b"").payload == b"None"


def test_a_call_whose_time_is_over_before_it_is_asked(rig: RpcRig, tmp_path: Path) -> None:
    with RpcClient(f"unix:{tmp_path / 'nowhere'}") as client, pytest.raises(Disconnected, match="serve models"):
        client.call(ECHO, b"", deadline_s=0.05)
    with RpcClient(rig.address) as client:
        assert client.call(ECHO, b"")
        # As while another thread's call lasts.
        with client._lock, pytest.raises(CallFailed, match="the call was not sent") as raised:
            client.call(ECHO, b"", deadline_s=0.05)
        assert raised.value.code is CallErrorCode.TOO_LATE


def test_threads_take_turns(client: RpcClient) -> None:
    wrong: list[object] = []

    def call(number: int) -> None:
        for count in range(50):
            data = bytes([number, count]) * number
            if client.call(ECHO, data).payload != data:
                wrong.append((number, count))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# --- servers that are not there, or go ---


def test_a_last_attempt_without_time_does_not_hide_what_the_server_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[str] = []

    def connected(path: str, until: float) -> Any:
        attempts.append(path)
        if len(attempts) == 1:
            raise client_module._NotReceived(Disconnected("rpc: accepts no more"))
        time.sleep(max(0.0, until - time.monotonic()))
        raise client_module._NotReceived(Disconnected("rpc: timed out"), has_no_time=True)

    monkeypatch.setattr(client_module, "_connected", connected)
    with RpcClient(f"unix:{tmp_path / 's'}") as client, pytest.raises(Disconnected, match="accepts no more"):
        client.call(ECHO, b"", timeout_s=1)
    assert len(attempts) == 2


def test_nobody_listens(tmp_path: Path) -> None:
    with (
        RpcClient(f"unix:{tmp_path / 'nowhere'}") as client,
        pytest.raises(Disconnected, match="serve models"),
    ):
        client.call(ECHO, b"", timeout_s=0.05)
    with pytest.raises(InvalidRequest, match="within a host"):
        RpcClient("tcp:127.0.0.1:1")
    with pytest.raises(InvalidRequest):
        RpcClient("nowhere")


def test_a_server_that_comes_later_and_one_that_was_started_anew(tmp_path: Path) -> None:
    with RpcClient(f"unix:{tmp_path / 'rpc.sock'}", timeout_s=PATIENCE_S) as client:
        answers: list[Answer] = []
        early = threading.Thread(target=lambda: answers.append(client.call(ECHO, b"early")))
        early.start()
        time.sleep(0.05)
        with RpcRig(tmp_path):
            early.join()
            assert answers == [Answer(ECHO, b"early")]
        with RpcRig(tmp_path):
            # The connection is dead, and nobody can have heard the call: it is asked on a new one.
            assert client.call(ECHO, b"again").payload == b"again"


def test_a_server_that_goes_under_a_call(tmp_path: Path) -> None:
    with RpcClient(f"unix:{tmp_path / 'rpc.sock'}", timeout_s=PATIENCE_S) as client:
        raised: list[BaseException] = []

        def call() -> None:
            try:
                client.call(NEVER, b"")
            except Disconnected as error:
                raised.append(error.with_traceback(None))

        with RpcRig(tmp_path) as rig:
            assert client.call(ECHO, b"")
            thread = threading.Thread(target=call)
            thread.start()
            while not any(caller._call for caller in rig.server._callers):
                time.sleep(0.001)
        thread.join()
        assert "may have been executed" in str(raised)


# --- servers that keep to no rules ---


def wrong_memory(size: int) -> int:
    fd = os.memfd_create("wrong", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    return fd


@pytest.mark.parametrize(
    ("data", "sizes"),
    [
        (b"", []),
        (b"HTTP/1.1 400 Bad", []),
        (greeting(), []),
        (greeting()[:9], [SHARED_BYTES]),
        (greeting(), [SHARED_BYTES]),  # not sealed: it could be made smaller under the caller
        (greeting(), [4096]),
        (greeting(), [SHARED_BYTES, SHARED_BYTES]),
    ],
)
def test_no_greeting(tmp_path: Path, data: bytes, sizes: list[int]) -> None:
    fds = [wrong_memory(size) for size in sizes]
    try:
        with (
            scripted_server(tmp_path / "s", (data, fds)) as address,
            RpcClient(address) as client,
            pytest.raises(Disconnected),
        ):
            client.call(ECHO, b"", timeout_s=0.01)
    finally:
        for fd in fds:
            os.close(fd)


@pytest.mark.parametrize(
    "reply",
    [
        (99, 1, CallStatus.RESPONSE_READY, 0),
        (None, 1, CallStatus.RESPONSE_READY, MAX_PAYLOAD_BYTES + 1),
        (None, 1, CallStatus.RESPONSE_READY, 2**32 - 1),
        (None, 1, CallStatus.ERROR, 3),
        (None, 1, CallStatus.PROCESSING, 0),
        (None, 1, 255, 0),
    ],
)
def test_replies_that_make_no_sense(tmp_path: Path, reply: tuple[Any, ...]) -> None:
    request_id, *rest = reply
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "s"))
        sock.listen()

        def serve() -> None:
            peer, _ = sock.accept()
            shared, fd = MappedCall.make()
            socket.send_fds(peer, [greeting()], [fd])
            os.close(fd)
            peer.recv(1)
            asked = shared.request.header().request_id
            shared.reply._memory[:17] = CallHeader(asked if request_id is None else request_id, *rest).to_bytes()
            peer.send(b"\0")
            peer.recv(1)
            peer.close()
            shared.close()

        thread = threading.Thread(target=serve)
        thread.start()
        with RpcClient(f"unix:{tmp_path / 's'}") as client, pytest.raises(Disconnected, match="is invalid"):
            client.call(ECHO, b"", timeout_s=PATIENCE_S)
        thread.join()
