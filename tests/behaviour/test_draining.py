"""Draining a host: which requests are still granted, what tenants are told and when, and the operator's commands."""

import asyncio
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from click.testing import CliRunner, Result

from gpulease.client import (
    CapacityExceeded,
    Drained,
    GpuLease,
    GpuLeaseError,
    GpuSession,
    LeaseEvent,
    NotFound,
    Phase,
    aio,
)
from gpulease.client.cli.__main__ import main
from gpulease.client.core import lease as leases
from gpulease.client.sync.driver import ask
from gpulease.client.sync.events import LeaseEvents, WarningWatch
from gpulease.protocol import Opcode, Status
from gpulease.protocol.address import ADDRESS_VARIABLE
from gpulease.protocol.messages import (
    CardDrain,
    Drain,
    DrainStatus,
    Empty,
    LeaseRef,
    LeaseSubscribe,
    LeaseUnsubscribe,
    Ping,
)
from helpers.daemon import Daemon, python_environment
from helpers.kernels import Neighbour
from helpers.lasting import LastingDaemon
from helpers.raw_peer import RawPeer, lease_alloc
from helpers.waiting import wait_until

GIB = 1 << 30


@pytest.fixture
def drained(daemon: Daemon) -> Iterator[Callable[[float], DrainStatus]]:
    """Yield a function that drains the daemon. After the test, the drain is cancelled."""

    def begin(within_s: float) -> DrainStatus:
        status = ask(Opcode.DRAIN, Drain(int(within_s * 1000)), daemon.address)
        assert isinstance(status, DrainStatus)
        return status

    files = len(daemon.open_files())
    yield begin
    ask(Opcode.DRAIN_CANCEL, Empty(), daemon.address)
    daemon.check_idle(files)


@pytest.fixture
def gpulease(daemon: Daemon) -> Callable[..., Result]:
    return lambda *words: CliRunner().invoke(main, list(words), env={ADDRESS_VARIABLE: daemon.address})


def phases(events: list[LeaseEvent]) -> list[object]:
    return [event.phase for event in events]


def test_a_tenant_hears_of_the_drain_and_is_ended_at_its_deadline(
    daemon: Daemon, drained: Callable[[float], DrainStatus]
) -> None:
    lease = daemon.builder().acquire()
    with GpuSession(lease) as session, lease.events() as events:
        neighbour = Neighbour(session)
        first = next(events)
        assert (first.phase, first.generation, first.lost) == (Phase.ACTIVE, 1, 0)
        assert 50 < first.left_s <= 54
        assert drained(50).leases == 1
        warning = next(events)
        assert (warning.phase, warning.cause) == (Phase.WARNING, "")
        assert 0 < warning.left_s <= 50
        assert "drained" in warning.reason
        assert neighbour.check(), "it works until the deadline"
        assert daemon.query(lease.lease_id)["phase"] == "warning"
        assert daemon.query(lease.lease_id)["remaining_ms"] <= 50_000
        began = time.monotonic()
        assert drained(0.5).leases == 1
        again = next(events)
        assert (again.phase, again.cause) == (Phase.WARNING, "")
        assert again.left_s <= 0.5
        rest = list(events)
        assert time.monotonic() - began >= 0.5
        assert phases(rest) == [Phase.GRACE, Phase.TEARDOWN, Phase.ENDED]
        assert {event.cause for event in rest} == {"drained"}
        with pytest.raises(Drained, match="drained"):
            session.sync()
    with pytest.raises(Drained):
        lease.renew(60)
    report = daemon.query(lease.lease_id)
    assert (report["state"], report["cause"], report["phase"]) == ("torndown", "drained", "ended")


def test_nobody_is_let_in(daemon: Daemon, drained: Callable[[float], DrainStatus]) -> None:
    with daemon.builder(4 * GIB).acquire() as lease, RawPeer(daemon.address).hello() as peer:
        wanted = lease_alloc(4 * GIB, wait_ms=30_000)
        peer.sock.sendall(peer.connection.send_request(Opcode.LEASE_ALLOC, wanted)[1])
        assert ask(Opcode.PING, Ping(1), daemon.address)
        drained(60)
        failure = peer.next_event().result  # type: ignore[union-attr]
        assert failure.status is Status.DRAINED  # type: ignore[union-attr]
        with pytest.raises(Drained, match=r"being drained: in .* all leases end") as caught:
            daemon.builder().acquire()
        assert "another node" in str(caught.value)
        assert daemon.available_bytes() == 0
        assert 0 < daemon.inventory().details[0]["drain_left_ms"] <= 60_000
        assert lease.is_alive
        ask(Opcode.DRAIN_CANCEL, Empty(), daemon.address)
        assert daemon.inventory().details[0]["drain_left_ms"] is None
        with daemon.builder().acquire() as other:
            assert other.is_alive
        with pytest.raises(CapacityExceeded):
            daemon.builder(4 * GIB).acquire()


def test_a_renewal_reaches_to_the_deadline(daemon: Daemon, drained: Callable[[float], DrainStatus]) -> None:
    with daemon.builder(seconds=5).acquire() as lease:
        drained(20)
        lease.renew(60)
        assert 15 < lease.remaining_s <= 20
        lease.renew(8)
        assert 15 < lease.remaining_s <= 20, "no renewal shortens"
        ask(Opcode.DRAIN_CANCEL, Empty(), daemon.address)
        lease.renew(60)
        assert lease.remaining_s > 55


def test_keep_alive_stops_and_says_why(
    daemon: Daemon, drained: Callable[[float], DrainStatus], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Renew long before the lease ends, so that a slow host is not too late.
    monkeypatch.setattr(leases, "RENEW_AT", 0.01)
    lost = threading.Event()
    losses: list[GpuLeaseError] = []

    def on_loss(error: GpuLeaseError) -> None:
        losses.append(error)
        lost.set()

    with daemon.builder(seconds=60).acquire() as lease, lease.keep_alive(on_loss):
        drained(50)
        assert lost.wait(60)
        assert isinstance(losses[0], Drained)
        assert "being drained: the lease lasts" in losses[0].message
        assert lease.is_alive


def test_a_callback_on_warnings(daemon: Daemon, drained: Callable[[float], DrainStatus]) -> None:
    heard: list[LeaseEvent] = []

    def warned(lease: GpuLease) -> WarningWatch:
        heard.clear()
        with ExitStack() as stack:
            ttl_s, watch = lease.remaining_s, stack.enter_context(lease.on_warning(heard.append))
            wait_until(lambda: heard or not lease.is_alive, "its own end is near")
            lease.renew(600)
            assert "renewed" in heard[0].reason
            assert heard[0].left_s <= 0.1 * ttl_s + 0.1
            stack.pop_all()
        return watch

    lease, watch, _ = daemon.short_lease(warned)
    with lease, watch:
        drained(30)
        wait_until(lambda: len(heard) == 2, "the drain is told")
        assert "drained" in heard[1].reason
        assert watch.error is None


def test_the_same_with_coroutines(daemon: Daemon, drained: Callable[[float], DrainStatus]) -> None:
    async def tenant() -> None:
        wish = aio.GpuBuilder(daemon.address).min_vram(1 << 20).lease_secs(60)
        lease = await wish.acquire()
        warned: list[LeaseEvent] = []
        async with lease.events() as events, lease.on_warning(warned.append):
            assert (await anext(events)).phase is Phase.ACTIVE
            task = asyncio.create_task(anext(events))
            await asyncio.sleep(0.05)
            assert not task.done()
            await asyncio.to_thread(drained, 0.3)
            assert (await task).phase is Phase.WARNING
            rest = [event async for event in events]
            assert phases(rest)[-1] is Phase.ENDED
        assert phases(warned) == [Phase.WARNING]
        with pytest.raises(Drained):
            await lease.renew(5)

    asyncio.run(tenant())


def test_a_lease_that_is_renewed_is_warned_of_no_more(daemon: Daemon) -> None:
    def warned(lease: GpuLease) -> LeaseEvents:
        with ExitStack() as stack:
            events = stack.enter_context(lease.events())
            assert next(events).phase is Phase.ACTIVE
            second = next(events)
            # This raises LeaseExpired if the host was too slow to send the warning in time.
            lease.renew(600)
            assert second.phase is Phase.WARNING
            stack.pop_all()
        return events

    lease, events, _ = daemon.short_lease(warned)
    with events:
        back = next(events)
        assert (back.phase, back.generation) == (Phase.ACTIVE, 2)
        lease.free()
        assert phases(list(events)) == [Phase.TEARDOWN, Phase.ENDED]


def test_who_may_listen(daemon: Daemon) -> None:
    with daemon.builder().acquire() as lease, RawPeer(daemon.tcp_address).hello() as stranger:
        subscribe = LeaseSubscribe(lease.lease_id)
        assert stranger.refused(Opcode.LEASE_SUBSCRIBE, subscribe).status is Status.NOT_FOUND
        assert stranger.refused(Opcode.DRAIN, Drain(0)).status is Status.DENIED
        assert stranger.refused(Opcode.DRAIN_CANCEL, Empty()).status is Status.DENIED
        stranger.request(Opcode.LEASE_SUBSCRIBE, LeaseSubscribe(0))
        own = stranger.acquire()
        heard = stranger.next_event()
        assert heard.event.lease_id == own.lease_id, "of its own alone"  # type: ignore[union-attr]
        daemon.revoke(lease.lease_id)
        stranger.sock.sendall(stranger.connection.send_request(Opcode.LEASE_FREE, LeaseRef(own.lease_id))[1])
        told = [stranger.next_event() for _ in range(3)]
        assert {event.event.lease_id for event in told if hasattr(event, "event")} == {own.lease_id}


def test_of_a_lease_that_is_over(daemon: Daemon) -> None:
    lease = daemon.builder().acquire()
    daemon.revoke(lease.lease_id, "maintenance")
    (event,) = lease.events()
    assert (event.phase, event.cause, event.reason) == (Phase.ENDED, "revoked", "maintenance")
    with RawPeer(daemon.address).hello() as peer:
        refused = peer.refused(Opcode.LEASE_SUBSCRIBE, LeaseSubscribe(12345))
        assert refused.status is NotFound.default_status
        assert peer.refused(Opcode.LEASE_UNSUBSCRIBE, LeaseUnsubscribe(2)).status is Status.NOT_FOUND


@pytest.mark.exhaustive
def test_a_drain_outlives_the_daemon_until_it_is_cancelled(start_lasting: Callable[..., LastingDaemon]) -> None:
    lasting = start_lasting(config="warm_contexts = 1")
    lease = lasting.now.builder().acquire()

    def left_ms() -> int | None:
        left: int | None = lasting.now.inventory().details[0]["drain_left_ms"]
        return left

    ask(Opcode.DRAIN, Drain(60_000), lasting.address)
    before_ms = left_ms()
    lasting.restart()
    after_ms = left_ms()
    assert before_ms is not None
    assert after_ms is not None
    assert 0 < after_ms < before_ms
    with pytest.raises(Drained):
        lasting.now.builder().acquire()
    lease.renew(600)
    assert lease.remaining_s <= 60, "no longer than the drain"
    assert "gpulease drain --cancel" in lasting.now.log()

    # A card's drain also survives the daemon, even if the drain of the node is cancelled.
    ask(Opcode.CARD_DRAIN, CardDrain("0", 50_000), lasting.address)
    ask(Opcode.DRAIN_CANCEL, Empty(), lasting.address)
    lasting.restart()
    assert 0 < lasting.now.inventory().details[0]["card_drain_left_ms"] < 50_000
    with pytest.raises(Drained, match="is being drained"):
        lasting.now.builder().acquire()
    assert "--device CARD --cancel" in lasting.now.log()
    ask(Opcode.CARD_DRAIN, CardDrain("0", None), lasting.address)

    ask(Opcode.DRAIN, Drain(0), lasting.address)
    with pytest.raises(Drained):
        lease.renew(60)
    lasting.restart()
    assert left_ms() == 0
    with pytest.raises(Drained):
        lasting.now.builder().acquire()
    ask(Opcode.DRAIN_CANCEL, Empty(), lasting.address)
    lasting.restart()
    assert left_ms() is None
    lasting.now.builder().acquire().free()


@contextmanager
def waiting_for_it(address: str, within: str) -> Iterator["subprocess.Popen[str]"]:
    """Yield a process of `gpulease drain --wait`, once it waits."""
    command = [sys.executable, "-P", "-m", "gpulease.client.cli", "drain", "--within", within, "--wait"]
    with subprocess.Popen(
        command,
        env=python_environment() | {ADDRESS_VARIABLE: address},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert "The node grants no more leases" in process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.exhaustive
def test_who_waits_for_an_empty_node_outlives_its_daemon(start_lasting: Callable[..., LastingDaemon]) -> None:
    lasting = start_lasting()
    lasting.now.builder().acquire()
    with waiting_for_it(lasting.address, "2s") as process:
        lasting.restart()
        output, _ = process.communicate(timeout=60)
        assert (process.returncode, output) == (0, "No lease is left.\n")
    ask(Opcode.DRAIN_CANCEL, Empty(), lasting.address)
    lease = lasting.now.builder().acquire()
    with waiting_for_it(lasting.address, "1h") as process:
        ask(Opcode.DRAIN_CANCEL, Empty(), lasting.address)
        output, _ = process.communicate(timeout=60)
        assert (process.returncode, "is no longer being drained" in output) == (1, True), output
    lease.free()


@pytest.mark.exhaustive
def test_what_is_left_at_its_deadline_is_ended_by_the_next_daemon(start_lasting: Callable[..., LastingDaemon]) -> None:
    lasting = start_lasting()
    lease = lasting.now.builder().acquire()
    ask(Opcode.DRAIN, Drain(300), lasting.address)
    lasting.kill()
    time.sleep(0.3)
    lasting.start()
    wait_until(lambda: lasting.now.query(lease.lease_id)["state"] == "torndown", "it is ended")
    assert lasting.now.query(lease.lease_id)["cause"] == "drained"


def test_what_an_operator_types(
    daemon: Daemon, drained: Callable[[float], DrainStatus], gpulease: Callable[..., Result]
) -> None:
    lease = daemon.builder().acquire()
    done = gpulease("drain", "--within", "1h", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["draining"], told["leases"]) == (True, 1)
    assert 3590 < told["left_s"] <= 3600
    shown = gpulease("info")
    # During the first half minute the output says an hour, then 59 minutes.
    assert re.search(
        r"The node is drained: it grants no leases, and the remaining leases end in (1 h 00|59) min", shown.stdout
    )
    done = gpulease("drain", "--within", "300ms", "--wait")
    assert done.exit_code == 0, done.output
    assert "1 lease is left, and will end within 0.3 s." in done.stdout
    assert "No lease is left." in done.stdout
    assert "all leases have been ended" in gpulease("info").stdout
    heard = gpulease("events", lease.lease_id_text, "--json")
    assert json.loads(heard.stdout)["cause"] == "drained"
    assert "ended  drained  the node is drained" in gpulease("events", lease.lease_id_text).stdout
    assert "it grants leases" in gpulease("drain", "--cancel").stdout
    assert "drained" not in gpulease("info").stdout
    for wrong in ("soon", "-1", "nan", "1e999", "5000h", "5d"):
        assert gpulease("drain", "--within", wrong).exit_code == 2, wrong
    for words in (["--wait"], ["--within", "10m"]):
        assert gpulease("drain", "--cancel", *words).exit_code == 2, words
    assert not json.loads(gpulease("drain", "--cancel", "--json").stdout)["draining"]
    assert gpulease("events", "nonsense").exit_code == 2
