"""Hostile peers at the TLS port, and relays that die: nobody else is affected, and nothing is left behind."""

import os
import signal
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from gpulease.client import Disconnected, GpuSession
from gpulease.client.core import lease as fate
from gpulease.daemon.remote.acceptor import MAX_HANDSHAKES, MAX_REFUSED_RELAYS, SPARE_RELAYS
from gpulease.daemon.remote.pending_connections import MAX_PENDING, NOT_TLS_ALERT
from gpulease.protocol import Opcode, Status
from gpulease.protocol.codec import build_body
from gpulease.protocol.framing import build_frame
from gpulease.protocol.messages import Hello, MemWrite, Ping
from helpers.daemon import Daemon, Faults, running
from helpers.kernels import check_main_job
from helpers.processes import cpu_seconds, is_running, process_info, processes, stop_process
from helpers.raw_peer import connect
from helpers.remote import Pki, gate_pid, relays, spares
from helpers.waiting import wait_until

pytestmark = pytest.mark.exhaustive

HALF_OPEN = 1000
SIDE_PROCESS = "gpulease.daemon.workers.helper_process"


@pytest.fixture(scope="module")
def remote_daemon(pki: Pki) -> Iterator[Daemon]:
    with running(Daemon(tls=True, config=pki.settings("max_connections_per_tenant = 12"))) as daemon:
        yield daemon


@pytest.fixture
def daemon(remote_daemon: Daemon, pki: Pki) -> Iterator[Daemon]:
    """Yield the daemon, with a neighbour's session that must work afterwards. Then nothing of the test may be left."""
    files = len(remote_daemon.open_files())
    with pki.builder(remote_daemon.tls_address, pki.bob).acquire() as lease, GpuSession(lease) as session:
        yield remote_daemon
        check_main_job(session)
    wait_until(lambda: not relays(remote_daemon), "no relay is left", seen=lambda: relays(remote_daemon))
    wait_until(lambda: not remote_daemon.leases(), "no lease is left", seen=remote_daemon.leases)
    wait_until(lambda: len(remote_daemon.open_files()) <= files, "no descriptor is left", seen=remote_daemon.open_files)


def first_words(pki: Pki) -> bytes:
    """Return a ClientHello."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = pki.context(pki.ann).wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def check_ann_is_served(daemon: Daemon, pki: Pki) -> None:
    with pki.builder(daemon.tls_address, pki.ann).acquire() as lease, GpuSession(lease) as session:
        session.sync()


# --- before the handshake ---


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", bytes(600), build_frame(Opcode.HELLO, b"", request_id=1), b"\x16\x03\x01\xff\xff\x01"],
)
def test_what_is_no_tls_is_told_so_and_cut(daemon: Daemon, pki: Pki, garbage: bytes) -> None:
    with connect(daemon.tls_address) as sock:
        sock.sendall(garbage)
        assert sock.recv(100) == NOT_TLS_ALERT
        assert sock.recv(100) == b""
    check_ann_is_served(daemon, pki)


# A ClientHello (RFC 8446, 4.1.2) that is complete, with a session id of 34 bytes; and one that is too long for any.
# Random bytes may declare a length for whose rest the server waits.
@pytest.mark.parametrize("length", [b"\x00\x00\x3c", b"\xff\xff\xff"], ids=["whole", "too long"])
def test_garbage_inside_a_record_gets_an_alert_and_no_connection(daemon: Daemon, pki: Pki, length: bytes) -> None:
    with connect(daemon.tls_address) as sock:
        sock.sendall(b"\x16\x03\x01\x00\x40\x01" + length + bytes(range(60)))
        assert sock.recv(100)[:1] == b"\x15"
        assert sock.recv(100) == b""
    check_ann_is_served(daemon, pki)


def test_a_thousand_half_open_connections_cost_no_process_and_hold_up_nobody(daemon: Daemon, pki: Pki) -> None:
    before, begin = len(relays(daemon)), first_words(pki)[:50]
    with ExitStack() as stack:
        half = [stack.enter_context(connect(daemon.tls_address)) for _ in range(HALF_OPEN)]
        for sock in half[::2]:
            # The gate may have cut this connection off already, to make room for later ones.
            with suppress(OSError):
                sock.sendall(begin)
        check_ann_is_served(daemon, pki)
        wait_until(lambda: len(relays(daemon)) <= before, "no process is made for them", seen=lambda: relays(daemon))
        assert gate_files(daemon) < MAX_PENDING + 100


def test_peers_that_stall_in_the_handshake_are_bounded_and_hold_up_nobody(daemon: Daemon, pki: Pki) -> None:
    before = len(relays(daemon))
    hello = first_words(pki)
    with ExitStack() as stack:
        for _ in range(2 * MAX_HANDSHAKES):
            sock = stack.enter_context(connect(daemon.tls_address))
            sock.sendall(hello)
        check_ann_is_served(daemon, pki)
        assert len(relays(daemon)) <= before + MAX_HANDSHAKES + 3
        # They are cut off after their time, even if nobody needs their places, and so is a peer that sends nothing.
        silent = stack.enter_context(connect(daemon.tls_address))
        wait_until(lambda: len(relays(daemon)) <= before, "they are gone", seen=lambda: relays(daemon))
        assert silent.recv(1) == b""


def test_a_byte_at_a_time_is_a_handshake_and_a_session_too(daemon: Daemon, pki: Pki) -> None:
    with connect(daemon.tls_address) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = pki.context(pki.ann).wrap_bio(incoming, outgoing, server_hostname="localhost")

        def send_slowly() -> None:
            for byte in outgoing.read():
                sock.sendall(bytes([byte]))

        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                send_slowly()
                incoming.write(sock.recv(1 << 16))
        spent = cpu_seconds(gate_pid(daemon))
        frame = build_frame(Opcode.HELLO, build_body(Hello(0, "slow", ())), request_id=1)
        for byte in frame:
            tls.write(bytes([byte]))
        send_slowly()
        incoming.write(sock.recv(1 << 16))
        assert tls.read(1 << 16)
        assert cpu_seconds(gate_pid(daemon)) - spent < 0.2


def test_a_flood_from_one_address_crowds_out_itself(pki: Pki, daemon: Daemon) -> None:
    """During the whole test, hundreds of handshakes a second are begun from one address and not continued."""
    files = gate_files(daemon)
    hello, address, port = first_words(pki), "127.0.0.1", int(daemon.tls_address.rpartition(":")[2])
    is_over = threading.Event()

    def flood() -> None:
        begun: deque[socket.socket] = deque()
        while not is_over.wait(0.01):
            with suppress(OSError):
                sock = socket.create_connection((address, port), 5, ("127.0.0.2", 0))
                begun.append(sock)
                sock.sendall(hello)
            if len(begun) > 5 * MAX_HANDSHAKES:
                begun.popleft().close()
        for sock in begun:
            sock.close()

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        time.sleep(0.5)
        check_ann_is_served(daemon, pki)
    finally:
        is_over.set()
        thread.join()
    wait_until(lambda: gate_files(daemon) <= files + 2 * SPARE_RELAYS, "they are gone", seen=lambda: relays(daemon))


def gate_files(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{gate_pid(daemon)}/fd"))


# --- in a session ---


def test_a_relay_that_is_killed_ends_its_connection_alone(
    daemon: Daemon, pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fate, "END_REASON_WAIT_S", 0.2)
    before = {info.pid for info in relays(daemon)}
    with pki.builder(daemon.tls_address, pki.ann).acquire() as lease:
        control = {info.pid for info in relays(daemon)} - before
        with GpuSession(lease) as session:
            (pid,) = {info.pid for info in relays(daemon)} - before - control
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(Disconnected, match="the daemon reports that the lease is still active"):
                session.sync()
        with GpuSession(lease) as session:
            check_main_job(session)


def test_connections_outlive_the_gate_and_it_comes_back(pki: Pki, start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(tls=True, config=pki.settings())
    daemon.allowed_trouble.append("the gate for remote tenants died")
    with pki.builder(daemon.tls_address, pki.ann).acquire() as lease, GpuSession(lease) as session:
        os.kill(gate_pid(daemon), signal.SIGKILL)
        check_main_job(session)
        lease.renew(30)
    wait_until(lambda: daemon.log().count("runs again") == 1, "there is another gate", seen=daemon.log)
    check_ann_is_served(daemon, pki)


def test_connections_outlive_a_gate_that_hangs_and_another_comes(pki: Pki, start_daemon: Callable[..., Daemon]) -> None:
    short = {f"{SIDE_PROCESS}:BEAT_S": 0.2, f"{SIDE_PROCESS}:HUNG_AFTER_S": 6.0}
    daemon = start_daemon(tls=True, config=pki.settings(), faults=Faults(short))
    daemon.allowed_trouble.append("the gate for remote tenants hangs")
    with pki.builder(daemon.tls_address, pki.ann).acquire() as lease, GpuSession(lease) as session:
        gate = gate_pid(daemon)
        stop_process(gate)
        check_main_job(session)
        lease.renew(30)
        # A tenant that connects now waits for the next gate.
        check_ann_is_served(daemon, pki)
        assert not is_running(gate)
        check_main_job(session)
    assert daemon.log().count("it gave no sign of life for 6 s") == 1
    wait_until(lambda: not relays(daemon), "no relay is left", seen=lambda: relays(daemon))


def test_relays_in_their_handshake_are_reaped_without_a_gate(pki: Pki, start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(tls=True, config=pki.settings())
    daemon.allowed_trouble.append("the gate for remote tenants died")
    gate = gate_pid(daemon)
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(connect(daemon.tls_address)).sendall(first_words(pki))
        wait_until(lambda: len(relays(daemon)) == 3, "handshakes are under way", seen=lambda: relays(daemon))
        begun = children_of(gate)
        # Wait for a complete connection: else the last relay may have been forked but not yet reported.
        with pki.peer(daemon.tls_address, pki.ann) as ann:
            ann.hello()
        os.kill(gate, signal.SIGKILL)
    wait_until(lambda: not any(map(process_info, begun)), "none is left, nor its number", seen=lambda: begun)
    wait_until(lambda: daemon.log().count("runs again") == 1, "there is another gate", seen=daemon.log)


def children_of(pid: int) -> set[int]:
    return {info.pid for info in processes() if info.parent == pid}


def children(daemon: Daemon) -> set[int]:
    """Return the broker's children, including those that were just forked."""
    return {info.pid for info in daemon.processes() if info.parent == daemon.process.pid}


def test_a_gate_whose_files_are_gone_for_a_while(tmp_path: Path, start_daemon: Callable[..., Daemon]) -> None:
    """Gates are started one after another until one works.

    There are never two, whatever they sent before they ended.
    """
    pki = Pki.make(tmp_path)
    patience = Faults({f"{SIDE_PROCESS}:MAX_RESTART_DELAY_S": 1.0})
    daemon = start_daemon(tls=True, config=pki.settings(), faults=patience)
    daemon.allowed_trouble += ["the gate for remote tenants died", "the gate for remote tenants can't be started"]
    hidden = pki.server.key.with_suffix(".hidden")
    pki.server.key.rename(hidden)
    spares(daemon)
    # If a gate ends, its spare relays are the broker's children for a moment.
    known = children(daemon) | children_of(gate_pid(daemon))
    os.kill(gate_pid(daemon), signal.SIGKILL)
    # Stop the broker, so that it receives the next gate's message and its end at the same time.
    (tried,) = wait_until(lambda: children(daemon) - known, "another one is tried")
    stop_process(daemon.process.pid)
    wait_until(lambda: not is_running(tried), "it has ended")
    daemon.process.send_signal(signal.SIGCONT)
    wait_until(lambda: daemon.log().count("can't be started") >= 3, "it was tried again", seen=daemon.log)
    hidden.rename(pki.server.key)
    wait_until(lambda: daemon.log().count("runs again") == 1, "there is another gate", seen=daemon.log)
    assert daemon.log().count("the gate for remote tenants died") == 1
    with pki.builder(daemon.tls_address, pki.ann).acquire() as lease, GpuSession(lease) as session:
        check_main_job(session)
        assert gate_pid(daemon), "there is one"


def test_a_revocation_reaches_relays_of_a_gate_that_died(tmp_path: Path, start_daemon: Callable[..., Daemon]) -> None:
    own = Pki.make(tmp_path / "pki")
    daemon = start_daemon(tls=True, config=own.settings())
    daemon.allowed_trouble.append("the gate for remote tenants died")
    with own.peer(daemon.tls_address, own.ann).hello() as ann, own.peer(daemon.tls_address, own.bob).hello() as bob:
        os.kill(gate_pid(daemon), signal.SIGKILL)
        wait_until(lambda: daemon.log().count("runs again") == 1, "there is another gate", seen=daemon.log)
        own.authority.revoke(own.ann.certificate)
        assert ann.sock.recv(1) == b""
        assert bob.request(Opcode.PING, Ping(1)) == Ping(1)
    wait_until(lambda: not relays(daemon), "no relay is left", seen=lambda: relays(daemon))


def test_a_session_does_not_need_the_broker(pki: Pki, start_daemon: Callable[..., Daemon]) -> None:
    """The session's relay runs as long as the worker, and ends with it."""
    daemon = start_daemon(tls=True, config=pki.settings())
    with pki.peer(daemon.tls_address, pki.ann).hello() as control:
        lease_id = control.acquire().lease_id
        control_relay = {info.pid for info in relays(daemon)}
        with pki.peer(daemon.tls_address, pki.ann).hello() as session:
            session.attach(lease_id)
            (relay,) = {info.pid for info in relays(daemon)} - control_relay
            worker = daemon.worker_pid(lease_id)
            stop_process(worker)
            daemon.kill()
            time.sleep(0.1)
            # The worker dies with its broker. Even if the worker is stopped, its socket is closed then.
            wait_until(lambda: not is_running(worker), "the worker is gone")
            assert session.sock.recv(1) == b""
        wait_until(lambda: not is_running(relay), "its relay is gone")


def test_a_tenant_that_dies_inside_a_frame_is_forgotten(daemon: Daemon, pki: Pki) -> None:
    with pki.builder(daemon.tls_address, pki.ann).acquire() as lease:
        for cut in (1, 30, 20_000):
            with pki.peer(daemon.tls_address, pki.ann).hello() as peer:
                peer.attach(lease.lease_id)
                frame = build_frame(
                    Opcode.MEM_WRITE,
                    build_body(MemWrite(1, 0, bytes(100_000))),
                    request_id=9,
                    session_id=lease.lease_id,
                )
                peer.sock.sendall(frame[:cut])
                peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            # The session permits one connection, so wait until the old one is closed.
            wait_until(lambda: not lease.query()["connections"], "the worker drops the connection")
        with GpuSession(lease) as session:
            check_main_job(session)


def test_bytes_changed_on_the_way_end_the_connection(daemon: Daemon, pki: Pki) -> None:
    with pki.peer(daemon.tls_address, pki.ann).hello() as peer, socket.socket(fileno=os.dup(peer.sock.fileno())) as raw:
        raw.settimeout(60)
        raw.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
        # The server sends an alert, and closes the connection.
        while raw.recv(1 << 16):
            pass


def rests(pid: int) -> bool:
    """Whether a process uses hardly any processor time for 0.3 s."""
    spent = cpu_seconds(pid)
    time.sleep(0.3)
    return cpu_seconds(pid) - spent < 0.1


def test_a_tenant_that_does_not_read_holds_up_itself_alone(daemon: Daemon, pki: Pki) -> None:
    with pki.builder(daemon.tls_address, pki.ann).acquire() as lease:
        before = {info.pid for info in relays(daemon)}
        with pki.peer(daemon.tls_address, pki.ann).hello() as peer:
            peer.attach(lease.lease_id)
            (relay,) = {info.pid for info in relays(daemon)} - before
            peer.sock.settimeout(0.3)
            ping = build_frame(Opcode.PING, build_body(Ping(1)), request_id=1, session_id=lease.lease_id)
            with pytest.raises(TimeoutError):
                peer.sock.sendall(ping * (64 << 20 >> 5))
            check_ann_is_served_by_the_broker(daemon, pki)
            # Wait until the data under way has been processed.
            wait_until(lambda: rests(relay), "the relay rests")
            memory = Path(f"/proc/{relay}/status").read_text()
            (resident,) = [line.split()[1] for line in memory.splitlines() if line.startswith("RssAnon")]
            assert int(resident) < 32 << 10


def check_ann_is_served_by_the_broker(daemon: Daemon, pki: Pki) -> None:
    with pki.peer(daemon.tls_address, pki.ann).hello() as peer:
        assert peer.request(Opcode.PING, Ping(3)) == Ping(3)


def test_idle_relays_cost_nothing(daemon: Daemon, pki: Pki) -> None:
    with pki.peer(daemon.tls_address, pki.ann).hello():
        pids = [info.pid for info in relays(daemon)]
        time.sleep(0.2)
        before = [cpu_seconds(pid) for pid in pids]
        time.sleep(0.5)
        assert [cpu_seconds(pid) for pid in pids] == before


def test_connections_of_one_tenant_are_bounded(daemon: Daemon, pki: Pki) -> None:
    with ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(pki.peer(daemon.tls_address, pki.ann)).hello()
        with pki.peer(daemon.tls_address, pki.ann) as peer:
            assert peer.goodbye().status is Status.BUSY
        # A tenant that connects repeatedly, and stays connected after a refusal, gets no further relay.
        for _ in range(2 * MAX_REFUSED_RELAYS):
            with suppress(OSError):
                stack.enter_context(pki.peer(daemon.tls_address, pki.ann))
        wait_until(
            lambda: len(relays(daemon)) <= 12 + MAX_REFUSED_RELAYS + 2, "no more are kept", seen=lambda: relays(daemon)
        )
        with pki.peer(daemon.tls_address, pki.bob).hello() as other:
            assert other.request(Opcode.PING, Ping(2)) == Ping(2)
    wait_until(lambda: len(relays(daemon)) == 2, "theirs are gone", seen=lambda: relays(daemon))
    check_ann_is_served(daemon, pki)
