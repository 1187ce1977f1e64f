"""Requests of the gateway, each with its own lease: their results, and every failure."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulease.client import (
    CapacityExceeded,
    GpuLeaseError,
    InvalidRequest,
    LoadFailed,
)
from gpulease.client.serve.gateway import (
    DaemonEffects,
    InferenceKernel,
    InferenceResponse,
    NodeAuthority,
    OperationConflict,
    OperationFailed,
    OperationInProgress,
    OutcomeUnknown,
    SpareConnections,
    SqliteStore,
    StaleEpoch,
    serve_inference_request,
)
from gpulease.client.serve.gateway.inference import MAX_INPUT_BYTES, MAX_LEASE_S, MAX_OUTPUT_BYTES
from gpulease.client.serve.gateway.ledger import Moment
from gpulease.client.serve.gateway.sqlite_store import host_clock
from helpers.daemon import Daemon
from helpers.gateway_rig import Gateway
from helpers.gateway_steps import AFFINE, INPUT, KERNEL, OUTPUT, request, serve_told
from helpers.waiting import wait_until

FAILING = (Path(__file__).parents[1] / "client" / "serve" / "gateway" / "kernels.ptx").read_bytes()
SOON_S = 60.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(tmp_path / "store")
    yield store
    store.close()


@pytest.fixture
def gateway(daemon: Daemon, store: SqliteStore) -> Gateway:
    return Gateway(daemon, store)


def test_a_request_and_its_duplicates(gateway: Gateway) -> None:
    asked = request("one", token_nonce=77)
    first = gateway.serve(asked)
    assert (first.request_id, first.output, first.is_replayed) == ("one", OUTPUT, False)
    assert 0 < first.token_expires_at_unix_secs - asked.now_secs <= asked.lease_ttl_secs + 1
    assert gateway.daemon.query(first.lease_id)["cause"] == "freed"
    for _ in range(3):
        again = gateway.serve(request("one"))
        assert (again.lease_id, again.output, again.is_replayed) == (first.lease_id, OUTPUT, True)
        assert again.token_expires_at_unix_secs == first.token_expires_at_unix_secs
    assert gateway.launches == 1
    other = gateway.serve(request("other"))
    assert other.lease_id != first.lease_id
    assert gateway.launches == 2


def test_another_request_by_the_same_id(gateway: Gateway) -> None:
    gateway.serve(request("one"))
    for change in ({"model_id": "other"}, {"input": b"other"}, {"output_len": 8}):
        with pytest.raises(OperationConflict):
            gateway.serve(request("one", **change))
    # Parameters that are not part of the operation may differ in a repeated request.
    assert gateway.serve(request("one", lease_ttl_secs=7, min_vram=2 << 20)).is_replayed
    assert gateway.launches == 1


def test_inputs_and_outputs_of_any_size(gateway: Gateway) -> None:
    assert gateway.serve(request("empty", input=b"", output_len=7)).output == bytes(7)
    assert gateway.serve(request("longer", output_len=2 * INPUT.nbytes)).output == OUTPUT + bytes(INPUT.nbytes)
    assert gateway.serve(request("shorter", output_len=12)).output == OUTPUT[:12]
    large = request("large", input=INPUT.tobytes() * 4096, output_len=INPUT.nbytes * 4096, min_vram=64 << 20)
    assert gateway.serve(large).output == OUTPUT * 4096


@pytest.mark.parametrize(
    "change",
    [
        {"model_id": ""},
        {"input": bytes(MAX_INPUT_BYTES + 1)},
        {"output_len": 0},
        {"output_len": MAX_OUTPUT_BYTES + 1},
        {"lease_ttl_secs": 0},
        {"lease_ttl_secs": MAX_LEASE_S + 1},
        {"now_secs": float("nan")},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_makes_no_sense_is_not_reserved(gateway: Gateway, change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        gateway.serve(request("nonsense", **change))
    assert gateway.steps == []


# --- pressure ---


@pytest.mark.exhaustive
def test_a_full_card_is_refused_and_nothing_is_held(gateway: Gateway) -> None:
    everything = gateway.daemon.available_bytes()
    with gateway.daemon.builder(everything).acquire():
        begun_s = time.monotonic()
        with pytest.raises(CapacityExceeded):
            gateway.serve(request("pressed"))
        assert time.monotonic() - begun_s < SOON_S
    assert gateway.daemon.available_bytes() == everything
    assert gateway.serve(request("pressed")).output == OUTPUT


def test_a_request_may_wait_for_room_but_not_for_ever(gateway: Gateway) -> None:
    other = gateway.daemon.builder(gateway.daemon.available_bytes()).acquire()
    begun_s = time.monotonic()
    with pytest.raises(CapacityExceeded):
        gateway.serve(request("waits"), wait_s=0.2)
    assert 0.2 <= time.monotonic() - begun_s < SOON_S
    timer = threading.Timer(0.2, other.free)
    timer.start()
    assert gateway.serve(request("waits"), wait_s=20).output == OUTPUT
    timer.join()


def test_a_duplicate_joins_the_one_in_flight(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    arrived, go_on = threading.Event(), threading.Event()

    def stop_at_the_launch(step: str) -> None:
        if step == "guest.launch":
            arrived.set()
            go_on.wait(60)

    answers: list[InferenceResponse] = []

    def first() -> None:
        answers.append(serve_told(gateway.store, gateway.daemon.address, request("same"), stop_at_the_launch))

    threads = [threading.Thread(target=first)]
    threads[0].start()
    arrived.wait(60)
    with pytest.raises(OperationInProgress) as caught:
        gateway.serve(request("same"))
    assert 0 < caught.value.retry_after_s <= 20 + 15
    threads.append(threading.Thread(target=lambda: answers.append(gateway.serve(request("same"), join_s=20))))
    threads[1].start()
    wait_until(lambda: gateway.steps.count("store.reserve") > 3, "it asks again and again")
    go_on.set()
    for thread in threads:
        thread.join()
    assert sorted((answer.is_replayed, answer.output) for answer in answers) == [(False, OUTPUT), (True, OUTPUT)]
    assert gateway.launches == 0


@pytest.mark.parametrize(
    ("paused_at", "launches", "later"), [("store.start", 0, InferenceResponse), ("store.complete", 1, OutcomeUnknown)]
)
def test_a_gateway_that_was_taken_for_dead_and_comes_back(
    gateway: Gateway, tmp_path: Path, paused_at: str, launches: int, later: type
) -> None:
    """The gateway stops before a step for longer than its claim lasts.

    Another attempt runs. Then the first one continues, and learns of it.
    """
    arrived, go_on = threading.Event(), threading.Event()
    steps: list[str] = []
    ends: list[object] = []

    def stop(step: str) -> None:
        steps.append(step)
        if step == paused_at:
            arrived.set()
            go_on.wait(60)

    def first() -> None:
        try:
            ends.append(serve_told(gateway.store, gateway.daemon.address, request("paused"), stop))
        except GpuLeaseError as error:
            ends.append(error)

    def much_later() -> Moment:
        now = host_clock()
        return Moment(now.clock_id, now.now_s + 1000)

    thread = threading.Thread(target=first)
    thread.start()
    arrived.wait(60)
    second = Gateway(gateway.daemon, SqliteStore(tmp_path / "store", clock=much_later))
    try:
        ends.append(second.serve(request("paused")))
    except GpuLeaseError as error:
        ends.append(error)
    go_on.set()
    thread.join()
    second.store.close()
    assert isinstance(ends[0], later)
    assert isinstance(ends[1], StaleEpoch)
    assert (steps.count("guest.launch"), second.launches) == (launches, 1 - launches)


# --- failures ---


def test_a_module_that_does_not_compile_can_be_put_right(gateway: Gateway) -> None:
    with pytest.raises(LoadFailed):
        gateway.serve(request("broken"), image=b"no ptx")
    assert gateway.serve(request("broken")).output == OUTPUT


def test_more_memory_than_was_asked_for(gateway: Gateway) -> None:
    with pytest.raises(GpuLeaseError, match="mem_alloc"):
        gateway.serve(request("large", output_len=MAX_OUTPUT_BYTES, min_vram=1 << 20))
    assert gateway.launches == 0


@pytest.mark.parametrize(
    ("kernel", "lease_s", "kind"),
    [("stray", 20, "SyncFailed"), ("endless", 0.7, "LeaseExpired"), ("nobody", 20, "LaunchFailed")],
)
def test_a_kernel_that_fails_is_an_error_for_ever(gateway: Gateway, kernel: str, lease_s: float, kind: str) -> None:
    asked = request(kernel, lease_ttl_secs=lease_s)
    for _ in range(3):
        with pytest.raises(OperationFailed) as caught:
            gateway.serve(asked, image=FAILING, kernel=InferenceKernel(kernel))
        assert (type(caught.value), caught.value.kind) == (OperationFailed, kind)
    assert gateway.launches == 1


def test_a_lease_that_is_revoked_under_the_launch(gateway: Gateway) -> None:
    def revoke(step: str) -> None:
        if step == "guest.launch":
            (lease,) = gateway.daemon.leases()
            gateway.daemon.revoke(int(lease["lease_id"], 16))

    for _ in range(2):
        with pytest.raises(OperationFailed) as caught:
            serve_told(gateway.store, gateway.daemon.address, request("revoked"), revoke)
        assert caught.value.kind == "Revoked"


@pytest.mark.exhaustive
def test_any_step_may_fail(gateway: Gateway) -> None:
    """Each step fails once with an error: nothing is left behind, and the kernel never runs twice."""
    whole: list[str] = []
    serve_told(gateway.store, gateway.daemon.address, request("whole"), whole.append)
    assert len(whole) > 12
    for number, step in enumerate(whole[:-1]):
        check_failing(gateway, number, step)


def check_failing(gateway: Gateway, number: int, step: str) -> None:
    steps: list[str] = []

    def fail_at_it(told: str) -> None:
        steps.append(told)
        if len(steps) == number + 1:
            raise GpuLeaseError(f"{told} was made to fail")

    def serve() -> InferenceResponse:
        asked = request(f"fails at step {number}")
        return serve_told(gateway.store, gateway.daemon.address, asked, fail_at_it)

    with pytest.raises(GpuLeaseError, match=f"{step} was made to fail"):
        serve()
    wait_until(lambda: not gateway.daemon.leases(), "nothing is held")
    if "guest.launch" in steps:
        with pytest.raises(OperationFailed, match=f"{step} was made to fail"):
            serve()
    else:
        assert serve().output == OUTPUT
    assert steps.count("guest.launch") == 1


def test_requests_on_one_control_connection_and_after_its_end(daemon: Daemon, store: SqliteStore) -> None:
    spare = SpareConnections()
    effects = DaemonEffects(store, daemon.address, spare=spare)

    def serve(request_id: str) -> InferenceResponse:
        asked = request(request_id)
        return serve_inference_request(effects, NodeAuthority(), asked, AFFINE.read_bytes(), KERNEL)

    def kept() -> tuple[int, int]:
        ((channel, _),) = spare._spare
        return channel.sock.fileno(), channel.sock.family

    first = serve("first")
    connection = kept()
    second = serve("second")
    assert kept() == connection
    assert first.lease_id != second.lease_id
    # End a kept connection as a restart of the daemon would.
    spare._spare[0][0].sock.shutdown(socket.SHUT_WR)
    assert serve("third").output == OUTPUT
    # Replace one by a connection that fails only when it is used again.
    near, far = socket.socketpair()
    near.setblocking(False)
    spare._spare[0][0].sock.close()
    spare._spare[0][0].sock = near

    def hang_up() -> None:
        far.recv(1 << 16)
        far.close()

    hanging_up = threading.Thread(target=hang_up)
    hanging_up.start()
    assert serve("fourth").output == OUTPUT
    hanging_up.join()
    leases = {one.lease_id for one in (first, second)}
    assert {daemon.query(lease_id)["cause"] for lease_id in leases} == {"freed"}
    assert not daemon.leases()


def test_without_a_daemon(store: SqliteStore, tmp_path: Path) -> None:
    effects = DaemonEffects(store, f"unix:{tmp_path}/nobody")
    for _ in range(2):
        with pytest.raises(GpuLeaseError, match="nobody"):
            serve_inference_request(effects, NodeAuthority(), request("alone"), b"ptx", KERNEL)
