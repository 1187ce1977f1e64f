"""The gateway over HTTP: a real process, a real socket and a real daemon."""

import base64
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gpulease.client.serve.gateway.inference import MAX_INPUT_BYTES
from helpers.daemon import Daemon
from helpers.gateway_process import BINARY, GatewayProcess, infer
from helpers.gateway_steps import INPUT, OUTPUT
from helpers.waiting import wait_until

MODELS = Path(__file__).parents[1] / "client" / "serve" / "gateway" / "models.toml"
SIZE = INPUT.nbytes
SOON_S = 60.0
IN_FLIGHT = 2


@pytest.fixture(scope="module")
def gateway(shared_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    """Run a gateway for all tests that leave it as they found it."""
    folder = tmp_path_factory.mktemp("gateway")
    bounds = (
        "--max-in-flight",
        str(IN_FLIGHT),
        "--max-queue",
        "1",
        "--queue-secs",
        "0.5",
        "--join-secs",
        "0.6",
        "--host-name",
        "models.example",
    )
    found = GatewayProcess(shared_daemon, folder, "--models", str(MODELS), *bounds)
    # The gateway keeps control connections for later requests: one for each request in flight.
    shared_daemon.kept_connections = IN_FLIGHT
    try:
        yield found
        found.stop()
    finally:
        found.discard()
        shared_daemon.kept_connections = 0


@pytest.fixture
def client(gateway: GatewayProcess, daemon: Daemon) -> Iterator[httpx.Client]:
    with gateway.client() as client:
        yield client


def code_of(answer: httpx.Response) -> str:
    assert answer.headers["Content-Type"] == "application/problem+json"
    problem = answer.json()
    assert problem["status"] == answer.status_code
    assert problem["detail"]
    return str(problem["code"])


def counted(client: httpx.Client, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", client.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


# --- requests ---


def test_a_request_in_bytes_and_its_duplicate(client: httpx.Client, daemon: Daemon) -> None:
    first = infer(client, '"bytes 1"', INPUT.tobytes(), SIZE)
    assert (first.status_code, first.content) == (200, OUTPUT), first.text
    assert first.headers["Idempotency-Replayed"] == "false"
    lease_id = first.headers["Gpulease-Lease-Id"]
    assert daemon.query(int(lease_id, 16))["cause"] == "freed"
    assert 0 < int(first.headers["Gpulease-Token-Expires-At"]) - time.time() <= 11
    # A key with quotes is the same as without them.
    again = infer(client, "bytes 1", INPUT.tobytes(), SIZE)
    assert (again.status_code, again.content) == (200, OUTPUT)
    assert (again.headers["Idempotency-Replayed"], again.headers["Gpulease-Lease-Id"]) == ("true", lease_id)


def test_a_request_in_json(client: httpx.Client) -> None:
    asked = {"input_base64": base64.b64encode(INPUT.tobytes()).decode(), "output_len": SIZE}
    keys = {"Idempotency-Key": "json 1"}
    first = client.post("/v1/models/affine/infer", json=asked, headers=keys)
    assert first.status_code == 200, first.text
    told = first.json()
    assert base64.b64decode(told.pop("output_base64")) == OUTPUT
    assert (told.pop("request_id"), told.pop("is_replayed")) == ("json 1", False)
    assert len(told.pop("lease_id")) == 32
    assert told.pop("token_expires_at_unix_secs") > time.time()
    assert told == {}
    # The same request in another encoding is the same request.
    other = infer(client, "json 1", INPUT.tobytes(), SIZE, Accept="application/json")
    assert other.json() == first.json() | {"is_replayed": True}


def test_the_largest_input(client: httpx.Client) -> None:
    answer = infer(client, "largest", b"\0" * MAX_INPUT_BYTES, 8)
    assert (answer.status_code, answer.content) == (200, b"\0\0\x80\x3f" * 2), answer.text


def test_what_is_served(client: httpx.Client) -> None:
    assert set(client.get("/v1/models").json()["models"]) == {"affine", "stray", "endless"}
    assert client.get("/healthz").json() == {"status": "ok", "in_flight": 0, "queued": 0}
    assert client.get("/nothing").status_code == 404
    assert client.get("/v1/models/affine/infer").status_code == 405


def test_a_foreign_page_in_a_browser_of_this_host_gets_nothing(client: httpx.Client) -> None:
    rebound = client.get("/healthz", headers={"Host": "evil.example"})
    assert (rebound.status_code, code_of(rebound)) == (421, "unknown_host")
    assert "--host-name" in rebound.json()["detail"]
    asked = infer(client, "foreign", INPUT.tobytes(), SIZE, Origin="http://evil.example")
    assert (asked.status_code, code_of(asked)) == (403, "foreign_page")
    assert client.get("/metrics", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403


def test_the_operator_names_the_proxy_that_browsers_know(client: httpx.Client) -> None:
    # The proxy's name is in Host, or only in Origin if the proxy writes its own Host.
    assert client.get("/healthz", headers={"Host": "models.example"}).status_code == 200
    page = {"Origin": "https://models.example", "Sec-Fetch-Site": "same-origin"}
    assert infer(client, "by proxy", INPUT.tobytes(), SIZE, **page).content == OUTPUT


# --- refusals ---


@pytest.mark.parametrize(
    ("key", "query", "headers", "status", "code"),
    [
        (None, "?output_len=4", {}, 400, "invalid_request"),
        ("", "?output_len=4", {}, 400, "invalid_request"),
        ("x" * 201, "?output_len=4", {}, 400, "invalid_request"),
        ("k", "", {}, 400, "invalid_request"),
        ("k", "?output_len=-1", {}, 400, "invalid_request"),
        ("k", "?output_len=0", {}, 400, "invalid_request"),
        ("k", "?output_len=16777217", {}, 400, "invalid_request"),
        ("k", "?output_len=99999999999999999999", {}, 400, "invalid_request"),
        ("k", "?output_len=4", {"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
        ("k", "", {"Content-Type": "application/json"}, 400, "invalid_request"),
    ],
)
def test_what_makes_no_sense(
    client: httpx.Client, key: str | None, query: str, headers: dict[str, str], status: int, code: str
) -> None:
    keys = {} if key is None else {"Idempotency-Key": key}
    answer = client.post(f"/v1/models/affine/infer{query}", content=b"four", headers=BINARY | keys | headers)
    assert (answer.status_code, code_of(answer)) == (status, code)
    assert "Retry-After" not in answer.headers


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b"{}",
        b"[1]",
        b'{"input_base64": 5, "output_len": 4}',
        b'{"input_base64": "!", "output_len": 4}',
        b'{"input_base64": "", "output_len": true}',
        b'{"input_base64": "", "output_len": 4, "more": 1}',
        b"\xff",
    ],
)
def test_json_that_makes_no_sense(client: httpx.Client, body: bytes) -> None:
    headers = {"Idempotency-Key": "k", "Content-Type": "application/json"}
    answer = client.post("/v1/models/affine/infer", content=body, headers=headers)
    assert (answer.status_code, code_of(answer)) == (400, "invalid_request")


def test_a_key_of_another_request(client: httpx.Client) -> None:
    assert infer(client, "used", INPUT.tobytes(), SIZE).status_code == 200
    other = infer(client, "used", b"else", SIZE)
    assert (other.status_code, code_of(other)) == (422, "key_conflict")
    unknown = infer(client, "used", b"else", SIZE, model="nobody")
    assert (unknown.status_code, code_of(unknown)) == (404, "no_such_model")


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_that_is_too_large(client: httpx.Client, is_chunked: bool) -> None:
    def pieces() -> Iterator[bytes]:
        for _ in range(17):
            yield bytes(1 << 20)

    content = pieces() if is_chunked else bytes(MAX_INPUT_BYTES + 1)
    answer = infer(client, "too large", content, 4)
    assert (answer.status_code, code_of(answer)) == (413, "too_large")


def test_a_body_that_says_it_is_too_large_is_not_waited_for(gateway: GatewayProcess, client: httpx.Client) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as peer:
        peer.sendall(
            b"POST /v1/models/affine/infer?output_len=4 HTTP/1.1\r\nHost: localhost\r\nIdempotency-Key: k\r\n"
            b"Content-Type: application/octet-stream\r\nContent-Length: 1000000000000\r\n\r\n"
        )
        assert peer.recv(65536).startswith(b"HTTP/1.1 413 ")


def test_a_kernel_that_faults_is_never_a_success(client: httpx.Client) -> None:
    for _ in range(2):
        answer = infer(client, "stray", b"x", 16, model="stray")
        assert (answer.status_code, code_of(answer)) == (500, "operation_failed")
        assert (answer.json()["kind"], answer.json()["request_id"]) == ("SyncFailed", "stray")


# --- pressure ---


def test_no_room_on_the_card(client: httpx.Client, daemon: Daemon) -> None:
    with daemon.builder(daemon.available_bytes()).acquire():
        answer = infer(client, "no room", INPUT.tobytes(), SIZE)
        assert (answer.status_code, code_of(answer)) == (503, "no_capacity")
        assert answer.headers["Retry-After"] == "1"
    assert infer(client, "no room", INPUT.tobytes(), SIZE).content == OUTPUT


@pytest.mark.exhaustive
def test_a_full_queue_a_wait_that_is_too_long_and_one_in_flight(gateway: GatewayProcess, client: httpx.Client) -> None:
    """Two kernels that run until their leases end use both slots. The next request waits, and one more is refused."""
    answers: dict[str, httpx.Response] = {}

    def ask(key: str, model: str) -> None:
        with gateway.client() as own:
            answers[key] = infer(own, key, b"x", 4, model=model)

    busy = [threading.Thread(target=ask, args=(key, "endless")) for key in ("busy 1", "busy 2")]
    for thread in busy:
        thread.start()
    wait_until(lambda: client.get("/healthz").json()["in_flight"] == 2, "both are served")
    waits = threading.Thread(target=ask, args=("waits", "affine"))
    waits.start()
    wait_until(lambda: client.get("/healthz").json()["queued"] == 1, "one waits")
    begun_s = time.monotonic()
    full = infer(client, "one more", b"x", 4)
    assert time.monotonic() - begun_s < SOON_S
    assert (full.status_code, code_of(full), full.headers["Retry-After"]) == (429, "queue_full", "1")
    waits.join()
    late = answers["waits"]
    assert (late.status_code, code_of(late), late.headers["Retry-After"]) == (503, "queue_timeout", "1")
    for thread in busy:
        thread.join()
    assert {answers[key].json()["kind"] for key in ("busy 1", "busy 2")} == {"LeaseExpired"}
    # A request that waited, or was refused, had not begun.
    assert infer(client, "waits", INPUT.tobytes(), SIZE).content == OUTPUT


def test_a_duplicate_of_one_in_flight(gateway: GatewayProcess, client: httpx.Client) -> None:
    answers: list[httpx.Response] = []

    def ask() -> None:
        with gateway.client() as own:
            answers.append(infer(own, "twice", b"x", 4, model="endless"))

    first, other = threading.Thread(target=ask), threading.Thread(target=ask)
    first.start()
    wait_until(lambda: client.get("/healthz").json()["in_flight"] == 1, "it is served")
    other.start()
    # The request waits without using a slot, so that others are served meanwhile.
    wait_until(lambda: client.get("/healthz").json() == {"status": "ok", "in_flight": 1, "queued": 1}, "it waits")
    other.join()
    assert (answers[0].status_code, code_of(answers[0])) == (409, "in_progress")
    assert 1 <= int(answers[0].headers["Retry-After"]) <= 5
    first.join()
    assert (answers[1].status_code, code_of(answers[1])) == (500, "operation_failed")


def test_a_client_that_hangs_up_does_not_undo_what_it_began(gateway: GatewayProcess, client: httpx.Client) -> None:
    before = counted(client, 'gpulease_gateway_requests_total{model="endless",outcome="operation_failed"}')
    with gateway.client() as own, pytest.raises(httpx.ReadTimeout):
        own.post(
            "/v1/models/endless/infer?output_len=4",
            content=b"x",
            headers=BINARY | {"Idempotency-Key": "gone"},
            timeout=httpx.Timeout(SOON_S, read=0.3),
        )
    name = 'gpulease_gateway_requests_total{model="endless",outcome="operation_failed"}'
    wait_until(lambda: counted(client, name) == before + 1, "it was ended and recorded")
    again = infer(client, "gone", b"x", 4, model="endless")
    assert (again.status_code, code_of(again)) == (500, "operation_failed")


# --- metrics, and its end ---


def test_metrics(client: httpx.Client) -> None:
    name = 'gpulease_gateway_requests_total{{model="affine",outcome="{}"}}'
    before = {outcome: counted(client, name.format(outcome)) for outcome in ("done", "replayed")}
    for _ in range(3):
        infer(client, "counted", INPUT.tobytes(), SIZE)
    assert counted(client, name.format("done")) == before["done"] + 1
    assert counted(client, name.format("replayed")) == before["replayed"] + 2
    assert counted(client, 'gpulease_gateway_request_seconds_count{model="affine"}') >= 3
    assert counted(client, 'gpulease_gateway_input_bytes_total{model="affine"}') >= 3 * SIZE
    assert counted(client, "gpulease_gateway_in_flight") == 0


IN_PLACE = """.version 7.0
.target sm_75
.address_size 64
.visible .entry invert(.param .u32 output_len, .param .u64 buffer)
{
    .reg .pred %p<2>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<4>;
    ld.param.u32 %r1, [output_len];
    ld.param.u64 %rd1, [buffer];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra END;
    cvta.to.global.u64 %rd2, %rd1;
    cvt.u64.u32 %rd3, %r5;
    add.s64 %rd2, %rd2, %rd3;
    ld.global.u8 %r6, [%rd2];
    not.b32 %r7, %r6;
    st.global.u8 [%rd2], %r7;
END:
    ret;
}
"""
IN_PLACE_MODEL = """[models.invert]
ptx = "invert.ptx"
kernel = "invert"
bytes_per_thread = 1
arguments = ["output_len:u32", "inout"]
min_vram_bytes = 1_048_576
"""


def test_a_kernel_of_another_signature(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "invert.ptx").write_text(IN_PLACE)
    (tmp_path / "models.toml").write_text(IN_PLACE_MODEL)
    gateway = GatewayProcess(daemon, tmp_path, "--models", str(tmp_path / "models.toml"))
    try:
        with gateway.client() as client:
            # The output is as long as the input, or shorter, or longer. Memory after the input is zero.
            for output_len, wanted in ((4, b"\xfe\xfd\xfc\xfb"), (2, b"\xfe\xfd"), (6, b"\xfe\xfd\xfc\xfb\xff\xff")):
                answer = infer(client, f"{output_len}", b"\1\2\3\4", output_len, model="invert")
                assert (answer.status_code, answer.content) == (200, wanted), answer.text
        gateway.stop()
    finally:
        gateway.discard()


def one_piece_and_a_pause() -> Iterator[bytes]:
    yield b"half"
    time.sleep(0.6)


@pytest.mark.exhaustive
def test_a_unix_socket_a_slow_body_and_a_graceful_stop(daemon: Daemon, tmp_path: Path) -> None:
    listen = f"unix:{daemon.folder}/gateway.sock"
    gateway = GatewayProcess(daemon, tmp_path, "--models", str(MODELS), "--body-secs", "0.3", listen=listen)
    answers: list[httpx.Response] = []
    try:
        with gateway.client() as client:
            assert infer(client, "by unix", INPUT.tobytes(), SIZE).content == OUTPUT
            # Browsers can't connect to a Unix socket, so any Host is accepted. But a proxy passes on the Origin of a
            # page.
            assert infer(client, "foreign", b"x", 4, Origin="http://evil.example").status_code == 403
            slow = infer(client, "slow", one_piece_and_a_pause(), SIZE)
            assert (slow.status_code, code_of(slow)) == (408, "body_too_slow")

            def ask() -> None:
                with gateway.client() as own:
                    answers.append(infer(own, "last", b"x", 4, model="endless"))

            last = threading.Thread(target=ask)
            last.start()
            wait_until(lambda: client.get("/healthz").json()["in_flight"] == 1, "it is served")
        gateway.process.send_signal(signal.SIGTERM)
        last.join()
        # The request that had begun got its outcome before the gateway ended.
        assert json.loads(answers[0].text)["kind"] == "LeaseExpired"
        gateway.stop()
    finally:
        gateway.discard()
    assert not Path(listen.removeprefix("unix:")).exists()


def test_peers_that_are_no_http_clients(gateway: GatewayProcess, client: httpx.Client) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    hostile = (
        b"\0" * 100,
        b"POST /v1/models/affine/infer HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"POST /v1/models/affine/infer?output_len=4 HTTP/1.1\r\nHost: localhost\r\nIdempotency-Key: k\r\n"
        b"Content-Type: application/octet-stream\r\nContent-Length: 10\r\n\r\nhalf",
    )
    for data in hostile:
        with socket.create_connection((host, int(port))) as peer:
            peer.sendall(data)
            peer.shutdown(socket.SHUT_WR)
            peer.settimeout(60)
            assert b" 200 " not in peer.recv(65536).partition(b"\r\n")[0]
    assert client.get("/healthz").status_code == 200
