"""`gpulease serve models`: the example's digits through shared memory and HTTP, and the end of either side."""

import base64
import os
import re
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from gpulease.client import Disconnected
from gpulease.client.serve.models.example import classify
from gpulease.client.serve.models.example.digits import DIGITS, load_tests, load_weights
from gpulease.client.serve.models.model_settings import EXAMPLE
from gpulease.client.serve.rpc import CallFailed, RpcClient
from gpulease.protocol.rpc import CallErrorCode
from helpers.daemon import Daemon
from helpers.model_process import ModelProcess, infer
from helpers.processes import cpu_seconds, stop_process
from helpers.waiting import wait_until

IMAGES, TRUE_DIGITS = load_tests()
WANTED = load_weights("digits").scores(IMAGES)

CONFIG = f"""
[models.digits]
method_id = 1
module = "{EXAMPLE.parent}/digits.ptx"
kernel = "digits"
weights = "{EXAMPLE.parent}/digits.weights"
constants = [64]
threads_per_block = 64
input_bytes = 256
output_bytes = 40
input_type = "f32"
output_type = "f32"
min_vram_bytes = 1_048_576
lease_secs = 10
max_batch = 20
is_pure = true

[models.obey]
method_id = 7
module = "{Path(__file__).parents[1]}/client/serve/models/kernels.ptx"
kernel = "obey"
weights = "factor"
threads_per_block = 1
input_bytes = 8
output_bytes = 4
min_vram_bytes = 1_048_576
max_kernel_secs = 20
idle_secs = 20
"""


def start(daemon: Daemon, folder: Path) -> ModelProcess:
    (folder / "factor").write_bytes(b"\3\0\0\0")
    (folder / "models.toml").write_text(CONFIG)
    return ModelProcess(daemon, folder, folder / "models.toml")


@pytest.fixture(scope="module")
def server(shared_daemon: Daemon) -> Iterator[ModelProcess]:
    """Run a model server for all tests that leave it as they found it."""
    with tempfile.TemporaryDirectory(prefix="gpul-", dir="/tmp") as folder:
        found = start(shared_daemon, Path(folder))
        try:
            wait_until(lambda: "digits: serves on lease" in found.log(), "it serves", seen=found.log)
            yield found
            found.stop()
        finally:
            found.discard()


@pytest.fixture
def http(server: ModelProcess) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


@pytest.fixture
def rpc(server: ModelProcess) -> Iterator[RpcClient]:
    with server.rpc() as client:
        yield client


def check(answers: list[bytes]) -> None:
    scores = np.frombuffer(b"".join(answers), "<f4").reshape(-1, DIGITS)
    np.testing.assert_allclose(scores, WANTED, atol=1e-3)
    # Every decision equals the reference's, and so does the accuracy.
    np.testing.assert_array_equal(scores.argmax(1), WANTED.argmax(1))
    assert (scores.argmax(1) == TRUE_DIGITS).mean() >= 0.97


# --- real work ---


@pytest.mark.exhaustive
def test_a_foreign_page_in_a_browser_of_this_host_gets_nothing(server: ModelProcess) -> None:
    with server.http() as client:
        assert client.get("/healthz").status_code == 200
        rebound = client.get("/healthz", headers={"Host": "evil.example"})
        assert (rebound.status_code, rebound.json()["code"]) == (421, "unknown_host")
        asked = infer(client, IMAGES[:1].tobytes(), Origin="http://evil.example")
        assert (asked.status_code, asked.json()["code"]) == (403, "foreign_page")


def test_digits_through_shared_memory(rpc: RpcClient) -> None:
    check([rpc.call(1, image).payload for image in IMAGES])
    check([rpc.call(1, IMAGES[at : at + 20]).payload for at in range(0, len(IMAGES), 20)])
    described = rpc.describe()
    assert described["digits"] == {
        "method_id": 1,
        "input_bytes": 256,
        "output_bytes": 40,
        "input_type": "f32",
        "output_type": "f32",
        "max_items": 20,
        "smaller": "",
    }


def test_the_example(server: ModelProcess, rpc: RpcClient, capsys: pytest.CaptureFixture[str]) -> None:
    classify.main(server.rpc_address)
    assert capsys.readouterr().out.startswith("350 of 360 right, ")


def test_digits_over_http(http: httpx.Client) -> None:
    answers = [infer(http, IMAGES[at : at + 20].tobytes()) for at in range(0, len(IMAGES), 20)]
    assert {(answer.status_code, answer.headers["Gpulease-Model"]) for answer in answers} == {(200, "digits")}
    check([answer.content for answer in answers])
    for value, wanted in ((IMAGES[0].tolist(), WANTED[0]), (IMAGES[:3].tolist(), WANTED[:3])):
        told = http.post("/v1/models/digits/infer", json={"input": value}).json()
        assert told["model"] == "digits"
        np.testing.assert_allclose(told["output"], wanted, atol=1e-3)
    asked = {"input_base64": base64.b64encode(IMAGES[:1].tobytes()).decode()}
    told = http.post("/v1/models/digits/infer", json=asked).json()
    assert told["model"] == "digits"
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(told["output_base64"]), "<f4"), WANTED[0], atol=1e-3)


def test_many_callers_at_once_share_batches(server: ModelProcess, http: httpx.Client) -> None:
    before = counted(http, 'kernel_launch_total{model="digits"}')
    answers: dict[int, bytes] = {}

    def ask(first: int) -> None:
        with server.rpc() as client:
            for at in range(first, len(IMAGES), 8):
                answers[at] = client.call(1, IMAGES[at]).payload

    threads = [threading.Thread(target=ask, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check([answers[at] for at in range(len(IMAGES))])
    assert counted(http, 'kernel_launch_total{model="digits"}') - before < len(IMAGES)


# --- what it says of itself ---


def counted(http: httpx.Client, sample: str) -> float:
    found = re.search(rf"^{re.escape(sample)} (\S+)$", http.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else -1.0


def test_metrics(http: httpx.Client) -> None:
    assert infer(http, IMAGES[:2].tobytes()).status_code == 200
    names = "gpu_lease_seconds_total kernel_launch_total kernel_fail_total bytes_in_total bytes_out_total queue_depth"
    assert [name for name in names.split() if counted(http, f'{name}{{model="digits"}}') < 0] == []
    assert counted(http, 'inference_latency_ms_count{model="digits"}') > 0
    assert counted(http, 'gpu_lease_seconds_total{model="digits"}') > 0
    assert counted(http, 'requests_total{model="digits",outcome="done"}') > 0


def test_health_and_list(http: httpx.Client) -> None:
    health = http.get("/healthz").json()
    assert (health["status"], len(health["models"]["digits"]["lease_id"])) == ("ok", 32)
    assert set(http.get("/v1/models").json()["models"]) == {"digits", "obey"}


@pytest.mark.parametrize(
    ("model", "content", "headers", "status", "code"),
    [
        ("nothing", b"x", {}, 404, "no_such_method"),
        ("digits", b"", {}, 400, "invalid_request"),
        ("digits", b"123", {}, 400, "invalid_request"),
        ("digits", bytes(20 * 256 + 1), {}, 413, "too_large"),
        ("digits", bytes(256), {"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
        ("digits", b"{}", {"Content-Type": "application/json"}, 400, "invalid_request"),
        ("digits", b"[" * 5000, {"Content-Type": "application/json"}, 400, "invalid_request"),
        ("digits", b'{"input_base64": 5}', {"Content-Type": "application/json"}, 400, "invalid_request"),
        ("digits", b'{"input_base64": "", "input": []}', {"Content-Type": "application/json"}, 400, "invalid_request"),
        ("digits", b'{"input": [1, 2]}', {"Content-Type": "application/json"}, 400, "invalid_request"),
        ("digits", b'{"input": [NaN]}', {"Content-Type": "application/json"}, 400, "invalid_request"),
        ("obey", b'{"input": [1, 2]}', {"Content-Type": "application/json"}, 400, "invalid_request"),
        ("digits", bytes(1 << 20), {"Content-Type": "application/json"}, 413, "too_large"),
        ("digits", bytes(256), {"Gpulease-Deadline-Ms": "-1"}, 400, "invalid_request"),
        ("digits", bytes(256), {"Gpulease-Deadline-Ms": "9" * 30}, 400, "invalid_request"),
    ],
)
def test_refusals(
    http: httpx.Client, model: str, content: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    answer = infer(http, content, model=model, **headers)
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert answer.headers["Content-Type"] == "application/problem+json"


def test_a_body_without_a_length_and_without_an_end(server: ModelProcess, http: httpx.Client) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(100):
            yield bytes(1000)

    assert infer(http, pieces()).status_code == 413


def test_requests_through_shared_memory_that_are_refused(rpc: RpcClient) -> None:
    for method_id, payload, code in (
        (99, b"", CallErrorCode.NO_SUCH_METHOD),
        (1, b"123", CallErrorCode.INVALID_REQUEST),
    ):
        with pytest.raises(CallFailed) as raised:
            rpc.call(method_id, payload)
        assert raised.value.code is code


# --- the ends of both sides ---


@pytest.fixture
def own(start_daemon: Callable[..., Daemon]) -> Iterator[tuple[Daemon, ModelProcess, Path]]:
    daemon = start_daemon()
    with tempfile.TemporaryDirectory(prefix="gpul-", dir="/tmp") as name:
        folder = Path(name)
        server = start(daemon, folder)
        try:
            wait_until(daemon.leases, "it has its lease")
            yield daemon, server, folder
        finally:
            server.discard()


@pytest.mark.exhaustive
def test_the_server_is_killed_and_started_anew(own: tuple[Daemon, ModelProcess, Path]) -> None:
    daemon, server, folder = own
    with server.rpc(timeout_s=30) as client:
        assert client.call(1, IMAGES[0]).payload
        server.process.kill()
        server.process.wait()
        # Nobody renews the leases, so at the latest they expire.
        wait_until(lambda: not daemon.leases(), "no lease is left", 60, seen=daemon.leases)
        with pytest.raises(Disconnected):
            client.call(1, IMAGES[0], timeout_s=0.1)
        again = start(daemon, folder)
        try:
            check([client.call(1, image, is_idempotent=True).payload for image in IMAGES])
            again.stop()
        finally:
            again.discard()
    assert daemon.leases() == []


@pytest.mark.exhaustive
def test_the_server_stands_still_for_longer_than_its_lease(own: tuple[Daemon, ModelProcess, Path]) -> None:
    daemon, server, _ = own
    (first,) = [report["lease_id"] for report in daemon.leases()]
    with server.rpc(timeout_s=30) as client:
        assert client.call(1, IMAGES[0]).payload
        stop_process(server.process.pid)
        wait_until(lambda: not daemon.leases(), "its lease has expired", seen=daemon.leases)
        server.process.send_signal(signal.SIGCONT)
        # The server checks its lease before it begins a request, so no request fails.
        assert client.call(1, IMAGES[0]).payload
    assert first not in [report["lease_id"] for report in daemon.leases()]


@pytest.mark.exhaustive
def test_the_end_waits_for_what_was_taken(own: tuple[Daemon, ModelProcess, Path]) -> None:
    daemon, server, _ = own
    answers: list[bytes] = []
    with server.rpc(timeout_s=30) as client:
        assert client.call(7, np.array([0, 1], np.uint32)).payload == b"\4\0\0\0"
        slow = np.array([3, 100_000_000], np.uint32)
        thread = threading.Thread(target=lambda: answers.append(client.call(7, slow).payload))
        thread.start()
        with server.http() as http:
            wait_until(lambda: counted(http, 'kernel_launch_total{model="obey"}') == 2, "it is computed")
        server.stop()
        thread.join()
    assert np.frombuffer(answers[0], np.uint32).tolist() == [3 * 100_000_000 + 1]
    assert daemon.leases() == []
    assert not os.path.exists(server.rpc_address.removeprefix("unix:"))


@pytest.mark.exhaustive
def test_a_call_with_a_deadline_is_refused_as_soon_as_it_can_not_be_kept(
    own: tuple[Daemon, ModelProcess, Path],
) -> None:
    _, server, _ = own
    slow = np.array([3, 500_000_000], np.uint32)
    with server.rpc(timeout_s=30) as one, server.rpc(timeout_s=30) as other, ThreadPoolExecutor(1) as pool:
        with server.http() as http:
            launches = counted(http, 'kernel_launch_total{model="obey"}')
            running = pool.submit(one.call, 7, slow)
            wait_until(lambda: counted(http, 'kernel_launch_total{model="obey"}') > launches, "it is computed")
        with pytest.raises(CallFailed) as raised:
            other.call(7, np.array([0, 1], np.uint32), deadline_s=0.01)
        assert raised.value.code is CallErrorCode.TOO_LATE
        assert running.result().payload == np.uint32(3 * 500_000_000 + 1).tobytes()
        assert other.call(7, np.array([0, 1], np.uint32), deadline_s=30).payload == b"\4\0\0\0"


def test_a_caller_that_sends_its_body_byte_by_byte_holds_nobody_up(server: ModelProcess, http: httpx.Client) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(b"POST /v1/models/digits/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 256\r\n")
        slow.sendall(b"Content-Type: application/octet-stream\r\n\r\n1")
        assert infer(http, IMAGES[:1].tobytes()).status_code == 200


def test_an_idle_server_uses_no_cpu(server: ModelProcess, rpc: RpcClient) -> None:
    rpc.call(1, IMAGES[0])
    before = cpu_seconds(server.process.pid)
    time.sleep(0.5)
    assert cpu_seconds(server.process.pid) - before < 0.05
