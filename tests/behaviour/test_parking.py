"""Parked sessions: their bytes leave the card and return, whatever happens to the broker or the worker meanwhile."""

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import pytest
from click.testing import CliRunner

from gpulease.client import (
    Busy,
    CapacityExceeded,
    GpuBuilder,
    GpuExclusivityClass,
    GpuLease,
    GpuSession,
    LeaseExpired,
    NotFound,
    Revoked,
    Unsupported,
    aio,
)
from gpulease.client.cli.__main__ import main
from gpulease.client.core.lease_request import LEASE_ID_VARIABLE
from gpulease.client.sync.driver import ask
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.protocol import Opcode
from gpulease.protocol.address import ADDRESS_VARIABLE
from gpulease.protocol.lease_ids import lease_id_of
from gpulease.protocol.messages import Empty, LeaseRef, LeaseRevoke
from helpers.daemon import Daemon, lent, running
from helpers.lasting import LastingDaemon, lent_lasting, stop_lasting
from helpers.parking import park_limits, row
from helpers.waiting import wait_until

MIB = 1 << 20
SLICE = 60 * MIB
CONFIG = park_limits("4GiB", stay_ms=100)


@pytest.fixture(scope="module")
def parking_daemon() -> Iterator[Daemon]:
    with running(Daemon(vram=("200MiB",), config=CONFIG)) as daemon:
        yield daemon


@pytest.fixture
def node(parking_daemon: Daemon) -> Iterator[Daemon]:
    """Yield a daemon whose card holds three slices of this size at a time."""
    yield from lent(parking_daemon)


@pytest.fixture(scope="module")
def _lasting_nodes() -> Iterator[list[LastingDaemon]]:
    yield from stop_lasting()


@pytest.fixture
def lasting(_lasting_nodes: list[LastingDaemon]) -> Iterator[LastingDaemon]:
    """Return a daemon that the file's tests restart, one after another."""
    yield from lent_lasting(_lasting_nodes, lambda: LastingDaemon(vram=("200MiB",), config=CONFIG))


def parkable(
    address: str, *, idle_s: float = 0, size: int = SLICE, seconds: float = 120, wait_s: float = 0
) -> GpuLease:
    builder = GpuBuilder(address).min_vram(size).lease_secs(seconds).timeout(wait_s).parkable(idle_s)
    return builder.exclusivity(GpuExclusivityClass.SHARED).acquire()


def place(address: str, lease: GpuLease) -> str:
    """Return the phase of a lease's session: where its bytes are."""
    return str(row(address, lease)["park"]["phase"])


def is_parked(address: str, lease: GpuLease) -> Callable[[], bool]:
    return lambda: place(address, lease) == "parked"


def available(address: str) -> int:
    cards = ask(Opcode.GET_INVENTORY, Empty(), address).details
    return int(cards[0]["available_bytes"])


@dataclass
class Filled:
    """A buffer that fills half of the slice. Every word of it is the mark."""

    session: GpuSession
    mark: int

    def __post_init__(self) -> None:
        self.buffer = self.session.mem_alloc(SLICE // 2)
        self.session.mem_write(self.buffer, 0, self._bytes)

    @property
    def _bytes(self) -> bytes:
        return self.mark.to_bytes(4, "little") * (SLICE // 8)

    def touch(self) -> None:
        self.session.mem_read(self.buffer, 0, 4)

    def check(self) -> None:
        assert bytes(self.session.mem_read(self.buffer, 0, SLICE // 2)) == self._bytes, "wrong bytes"


def test_a_parked_sessions_bytes_are_the_cards_until_the_next_operation(node: Daemon) -> None:
    with parkable(node.address) as lease, GpuSession(lease) as session:
        buffer = Filled(session, 7)
        address, before = buffer.buffer.handle, available(node.address)
        assert lease.park() >= SLICE // 2
        assert available(node.address) == before + SLICE
        shown = row(node.address, lease)["park"]
        assert (shown["phase"], shown["moved_bytes"] >= SLICE // 2, shown["cause"]) == ("parked", True, "tenant")
        buffer.check()
        assert (buffer.buffer.handle, place(node.address, lease)) == (address, "resident")
        assert available(node.address) == before


def test_a_park_comes_after_what_its_program_has_sent(node: Daemon) -> None:
    for shared_memory in (True, False):
        with parkable(node.address) as lease, GpuSession(lease, shared_memory=shared_memory) as session:
            buffer = session.mem_alloc(MIB)
            for turn in range(20):
                session.mem_write(buffer, 0, bytes([turn]) * 1000)
                lease.park()
                assert place(node.address, lease) == "parked"


def test_two_sessions_take_turns_on_a_card_that_holds_one(node: Daemon) -> None:
    with GpuBuilder(node.address).min_vram(90 * MIB).lease_secs(120).acquire():
        leases = [parkable(node.address, wait_s=20) for _ in range(2)]
        sessions = [GpuSession(lease) for lease in leases[:1]]
        buffers = [Filled(sessions[0], 1)]
        sessions.append(GpuSession(leases[1]))
        buffers.append(Filled(sessions[1], 2))
        for _ in range(3):
            for buffer in buffers:
                time.sleep(0.5)
                buffer.check()
        for session, lease in zip(sessions, leases, strict=True):
            session.close()
            lease.free()


def test_an_idle_session_is_parked_and_said_to_be(node: Daemon) -> None:
    with parkable(node.address, idle_s=0.3) as lease, GpuSession(lease) as session:
        buffer = Filled(session, 3)
        wait_until(is_parked(node.address, lease), "the idle session is parked")
        assert row(node.address, lease)["park"]["cause"] == "idle"
        buffer.check()
        wait_until(is_parked(node.address, lease), "it is parked again")
    assert LogEvent.LEASE_PARKED.kind.message in node.log()


def test_who_may_park_and_what_can_not_be_parked(node: Daemon) -> None:
    with GpuBuilder(node.address).min_vram(SLICE).acquire() as fixed, pytest.raises(Unsupported):
        fixed.park()
    with parkable(node.address) as lease:
        answer = ask(Opcode.LEASE_PARK, LeaseRef(lease.lease_id), node.address)
        assert answer.lease_id == lease.lease_id
        wait_until(is_parked(node.address, lease), "an operator has parked it")
    with pytest.raises(NotFound):
        ask(Opcode.LEASE_PARK, LeaseRef(12345), node.address)


def test_a_full_host_refuses_and_the_session_stays(node: Daemon) -> None:
    daemon = Daemon(vram=("200MiB",), config='[limits]\npark_memory = "10MiB"\n')
    try:
        daemon.wait_until_it_answers()
        with parkable(daemon.address) as lease, GpuSession(lease) as session:
            buffer = Filled(session, 4)
            with pytest.raises(CapacityExceeded, match="host memory"):
                lease.park()
            buffer.check()
    finally:
        daemon.stop()


def test_a_return_without_room_is_busy_and_loses_nothing(node: Daemon) -> None:
    with parkable(node.address) as lease, GpuSession(lease) as session:
        buffer = Filled(session, 5)
        lease.park()
        other = GpuBuilder(node.address).min_vram(150 * MIB).lease_secs(120).acquire()
        with other, pytest.raises(Busy, match="parked"):
            buffer.touch()
        buffer.check()


@pytest.mark.parametrize("end", ["revoked", "expired", "dropped"])
def test_the_end_of_a_parked_lease_gives_the_hosts_memory_back(node: Daemon, end: str) -> None:
    # The lease must not expire before the test lets it. On a busy host a longer one is tried.
    for seconds in (3, 15, 75) if end == "expired" else (120,):
        lease = parkable(node.address, seconds=seconds)
        with contextlib.suppress(LeaseExpired):
            session = GpuSession(lease)
            buffer = Filled(session, 6)
            lease.park()
            break
    else:
        raise AssertionError("the lease ended before it was parked")
    if end == "revoked":
        revoke(node.address, lease)
    elif end == "dropped":
        lease.free()
    if end != "dropped":
        with pytest.raises((Revoked, LeaseExpired)):
            park_for_ever(lease, buffer)
    wait_until(lambda: host_bytes(node.address) == 0, "the host's memory is given back")
    wait_until(lambda: not node.has_worker(lease.lease_id), "its worker is gone")


def revoke(address: str, lease: GpuLease) -> None:
    ask(Opcode.LEASE_REVOKE, LeaseRevoke(lease.lease_id, "maintenance"), address)


def park_for_ever(lease: GpuLease, buffer: Filled) -> None:
    while True:
        time.sleep(0.1)
        buffer.touch()
        suppressed_busy(lease.park)


def suppressed_busy(call: Callable[[], object]) -> None:
    with contextlib.suppress(Busy):
        call()


def host_bytes(address: str) -> int:
    cards = ask(Opcode.GET_INVENTORY, Empty(), address).details
    return int(cards[0]["park_host_bytes"])


def test_a_waiting_operation_hears_of_a_revocation(node: Daemon) -> None:
    lease = parkable(node.address, wait_s=60)
    with GpuSession(lease) as session:
        buffer = Filled(session, 6)
        lease.park()
        with GpuBuilder(node.address).min_vram(150 * MIB).lease_secs(120).acquire():
            threading.Timer(0.5, revoke, (node.address, lease)).start()
            # If it waited for room until the end, it would be Busy.
            with pytest.raises(Revoked):
                buffer.touch()


@pytest.mark.parametrize("step", [pytest.param("resident", marks=pytest.mark.exhaustive), "parked", "parking"])
def test_a_broker_that_is_killed_finds_the_session_again(lasting: LastingDaemon, step: str) -> None:
    lease = parkable(lasting.address)
    session = GpuSession(lease)
    buffer = Filled(session, 8)
    if step == "parked":
        lease.park()
    elif step == "parking":
        threading.Thread(target=lambda: suppressed(lease.park), daemon=True).start()
    lasting.restart()
    if step == "parked":
        wait_until(is_parked(lasting.address, lease), "the new broker finds it parked")
        assert host_bytes(lasting.address) > 0
    buffer.check()
    assert place(lasting.address, lease) == "resident"
    lease.park()
    buffer.check()
    session.close()
    lease.free()


def suppressed(call: Callable[[], object]) -> None:
    try:
        call()
    except Exception:
        return


@pytest.mark.parametrize("step", ["resident", "parked"])
def test_a_worker_that_is_killed_ends_its_lease_once(lasting: LastingDaemon, step: str) -> None:
    lease = parkable(lasting.address)
    session = GpuSession(lease)
    Filled(session, 9)
    if step == "parked":
        lease.park()
    os.kill(lasting.worker_pid(lease.lease_id), signal.SIGKILL)
    wait_until(lambda: row(lasting.address, lease)["state"] == "torndown", "the lease has ended")
    assert host_bytes(lasting.address) == 0
    assert lasting.now.log().count("lease memory proved free") <= 1


def test_the_command_parks_a_lease_and_the_list_says_so(node: Daemon) -> None:
    with parkable(node.address) as lease, GpuSession(lease) as session:
        buffer = Filled(session, 2)
        env = {ADDRESS_VARIABLE: node.address}
        parked = CliRunner().invoke(main, ["park", str(lease.lease_id)], env=env)
        assert (parked.exit_code, "are in the host's memory" in parked.output) == (0, True), parked.output
        assert "active (parked" in CliRunner().invoke(main, ["leases"], env=env | {"COLUMNS": "250"}).output
        buffer.check()


def test_a_card_whose_parks_are_paced_says_when_the_next_may_begin() -> None:
    config = CONFIG.replace("parks_per_minute = 1000000", "parks_per_minute = 1")

    with (
        running(Daemon(vram=("200MiB",), config=config)) as paced,
        parkable(paced.address) as lease,
        GpuSession(lease) as session,
    ):

        def shown() -> str:
            return CliRunner(env={ADDRESS_VARIABLE: paced.address, "COLUMNS": "200"}).invoke(main, ["leases"]).stdout

        buffer = Filled(session, 3)
        assert "parks_per_minute" not in shown()
        for _ in range(16):
            lease.park()
            buffer.touch()
        assert "GPU 0 has reached parks_per_minute" in shown()
        assert "other leases' need and operators at once" in shown()
        metrics = ask(Opcode.METRICS, Empty(), paced.address).exposition.splitlines()
        waits = {
            line.split('by="')[1][:4]: float(line.split()[-1]) for line in metrics if "_park_wait_seconds{" in line
        }
        assert waits["need"] == 0 < waits["tena"] <= 60


@pytest.mark.parametrize("cause", ["idle", "tenant"])
def test_a_lease_of_the_command_line_is_parkable(node: Daemon, monkeypatch: pytest.MonkeyPatch, cause: str) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, node.address)
    words = [
        "acquire",
        "--vram",
        "60MiB",
        "--json",
        "--parkable",
        *(["--park-idle", "300ms"] if cause == "idle" else []),
    ]
    acquired = CliRunner().invoke(main, words)
    assert acquired.exit_code == 0, acquired.output
    monkeypatch.setenv(LEASE_ID_VARIABLE, lease_id := json.loads(acquired.stdout)["lease_id"])
    with GpuSession.attach() as session:
        buffer = Filled(session, 3)
        if cause == "tenant":
            # The lease has no idle time, so only a request parks it.
            assert node.query(lease_id_of(lease_id))["park"]["idle_ms"] == 0
            assert CliRunner().invoke(main, ["park", lease_id]).exit_code == 0
        wait_until(lambda: node.query(lease_id_of(lease_id))["park"]["phase"] == "parked", "it is parked")
        assert node.query(lease_id_of(lease_id))["park"]["cause"] == cause
        buffer.check()
    assert CliRunner().invoke(main, ["free"]).exit_code == 0


def test_an_asyncio_program_parks_too(node: Daemon) -> None:
    async def program() -> tuple[int, bytes]:
        wanted = aio.GpuBuilder(node.address).min_vram(SLICE).lease_secs(60).parkable()
        async with await wanted.acquire() as lease, aio.GpuSession(lease) as session:
            buffer = await session.mem_alloc(8 * MIB)
            await session.mem_write(buffer, 0, b"weights")
            moved_bytes = await lease.park()
            return moved_bytes, bytes(await session.mem_read(buffer, 0, 7))

    moved_bytes, data = asyncio.run(program())
    assert (moved_bytes >= 8 * MIB, data) == (True, b"weights")


STORM_TURNS = 40


@pytest.mark.exhaustive
def test_a_storm_of_parks_and_killed_brokers_gives_no_wrong_byte(lasting: LastingDaemon) -> None:
    """Four sessions check their bytes on a card that holds three, while they are parked and brokers are killed."""
    random = Random(5)
    leases = [parkable(lasting.address, idle_s=0.2, wait_s=60, seconds=600) for _ in range(4)]
    sessions = [GpuSession(lease) for lease in leases]
    buffers: list[Filled] = []
    for mark, session in enumerate(sessions, 1):
        buffers.append(Filled(session, mark))
    for _ in range(STORM_TURNS):
        match random.randrange(8):
            case 0:
                lasting.restart()
            case 1 | 2:
                with contextlib.suppress(Busy, CapacityExceeded):
                    random.choice(leases).park()
            case 3:
                time.sleep(0.4)
            case _:
                random.choice(buffers).check()
    for buffer in buffers:
        buffer.check()
    for session, lease in zip(sessions, leases, strict=True):
        session.close()
        lease.free()
    assert host_bytes(lasting.address) == 0
