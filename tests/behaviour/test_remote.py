"""Tenants with mutual TLS: what works, how they are identified, and what each may see of the others."""

import asyncio
import os
import platform
import signal
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpulease.client import (
    Denied,
    Disconnected,
    GpuBuilder,
    GpuSession,
    InvalidRequest,
    Permission,
    Revoked,
    Untrusted,
    aio,
)
from gpulease.client.sync.driver import ask
from gpulease.client.sync.lease import my_audience
from gpulease.daemon.remote.acceptor import SPARE_RELAYS
from gpulease.daemon.remote.pki.certificates import Issued, PkiAuthority
from gpulease.protocol import Failure, Opcode, Status
from gpulease.protocol.messages import Attach, Empty, LeaseRef, LeaseRenew, LeaseRevoke, Ping
from gpulease.protocol.ring import SharedMemoryGrant, SharedMemoryRequest
from helpers.daemon import Daemon, python_environment
from helpers.kernels import check_main_job
from helpers.processes import is_running, open_files
from helpers.raw_peer import RawPeer
from helpers.remote import Pki, TlsPeer, gate_pid, relays, spares
from helpers.waiting import wait_until


@pytest.fixture(scope="module")
def remote_daemon(pki: Pki) -> Iterator[Daemon]:
    with pki.daemon('operators = ["ops"]') as daemon:
        yield daemon


@pytest.fixture
def daemon(remote_daemon: Daemon) -> Iterator[Daemon]:
    """Yield the daemon. Afterwards nothing of the test may be left."""
    yield remote_daemon
    wait_until(lambda: not remote_daemon.leases(), "no lease is left", seen=remote_daemon.leases)
    wait_until(lambda: not relays(remote_daemon), "no relay is left", seen=lambda: relays(remote_daemon))


# --- what works ---


@pytest.mark.exhaustive
def test_the_main_job(daemon: Daemon, pki: Pki) -> None:
    with pki.builder(daemon.tls_address, pki.ann).acquire() as lease, GpuSession(lease) as session:
        check_main_job(session)
        assert {report["tenant"] for report in daemon.leases()} == {"ann"}
        lease.renew(30)
        check_main_job(session)


def test_the_main_job_with_coroutines(daemon: Daemon, pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    pki.be(pki.ann, monkeypatch)

    async def job() -> None:
        async with (
            aio.GpuBuilder(daemon.tls_address).min_vram(32 << 20).acquire() as lease,
            aio.GpuSession(lease) as session,
        ):
            data = np.arange(4 << 20, dtype=np.uint32)
            buffer = await session.mem_alloc(data.nbytes)
            await session.mem_write(buffer, 0, data)
            back = np.zeros_like(data)
            await asyncio.gather(session.mem_read(buffer, 0, data.nbytes, into=back), session.sync())
            assert (back == data).all()

    asyncio.run(job())


def test_large_and_odd_copies_come_whole(daemon: Daemon, pki: Pki) -> None:
    random = np.random.default_rng(1)
    with pki.builder(daemon.tls_address, pki.ann).min_vram(32 << 20).acquire() as lease, GpuSession(lease) as session:
        for size in (1, 16_384, 65_537, 1_048_575, 20 << 20):
            data = random.integers(0, 256, size, np.uint8)
            buffer = session.mem_alloc(size)
            session.mem_write(buffer, 0, data)
            assert session.mem_read(buffer, 0, size) == data.tobytes()


def test_nothing_is_shared_with_a_relayed_peer(daemon: Daemon, pki: Pki) -> None:
    """The peer's ATTACH requests a ring and an arena, like a local client's."""
    with pki.peer(daemon.tls_address, pki.ann).hello() as peer:
        grant = peer.acquire()
        with pki.peer(daemon.tls_address, pki.ann).hello() as session:
            session.session_id = grant.lease_id
            options = SharedMemoryRequest(ring=True, arena_bytes=1 << 20).to_options()
            given = session.request(Opcode.ATTACH, Attach(options), grant.lease_id).options
            assert SharedMemoryGrant.from_options(given) == SharedMemoryGrant()
            assert session.request(Opcode.PING, Ping(5), grant.lease_id) == Ping(5)
        peer.free(grant.lease_id)


def test_a_token_goes_from_one_remote_tenant_to_another(
    daemon: Daemon, pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pki.builder(daemon.tls_address, pki.ann).exclusivity(0).acquire() as lease, GpuSession(lease) as session:
        buffer = session.mem_alloc(16)
        session.mem_write(buffer, 0, b"sixteen bytes...")
        pki.be(pki.bob, monkeypatch)
        grant = lease.issue(Permission.MEM_READ, audience=my_audience(daemon.tls_address), ttl_secs=60)
        with GpuSession.attach(grant, daemon.tls_address) as guest:
            guest.sync()
        # Ann is not the token's audience.
        pki.be(pki.ann, monkeypatch)
        with pytest.raises(Denied):
            GpuSession.attach(grant, daemon.tls_address)


# --- tenants apart ---


@pytest.mark.parametrize("whose", ["bob", "local"])
def test_a_lease_is_its_tenants_own(daemon: Daemon, pki: Pki, whose: str) -> None:
    with pki.peer(daemon.tls_address, pki.ann).hello() as ann:
        lease_id = ann.acquire().lease_id
        with _stranger(daemon, pki, whose) as peer:
            assert peer.refused(Opcode.LEASE_QUERY, LeaseRef(lease_id)).status is Status.NOT_FOUND
            assert peer.refused(Opcode.LEASE_RENEW, LeaseRenew(lease_id, 5000)).status is Status.NOT_FOUND
            assert peer.refused(Opcode.LEASE_REVOKE, LeaseRevoke(lease_id, "mine")).status is Status.DENIED
            assert peer.request(Opcode.LEASE_LIST_ACTIVE, Empty()).report == []
            refused = peer.attach(lease_id)
            assert isinstance(refused, Failure)
            assert refused.status is Status.NOT_FOUND
        assert [report["lease_id"] for report in ann.request(Opcode.LEASE_LIST_ACTIVE, Empty()).report]
        ann.request(Opcode.LEASE_RENEW, LeaseRenew(lease_id, 5000))
        ann.free(lease_id)


def _stranger(daemon: Daemon, pki: Pki, whose: str) -> Any:
    if whose == "bob":
        return pki.peer(daemon.tls_address, pki.bob).hello()
    return RawPeer(daemon.tcp_address).hello()


def test_only_named_remote_tenants_are_operators(daemon: Daemon, pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    with pki.builder(daemon.tls_address, pki.ann).acquire() as lease, GpuSession(lease) as session:
        pki.be(pki.bob, monkeypatch)
        revoke = LeaseRevoke(lease.lease_id, "maintenance")
        with pytest.raises(Denied, match="this connection is bob"):
            ask(Opcode.LEASE_REVOKE, revoke, daemon.tls_address)
        pki.be(pki.ops, monkeypatch)
        assert ask(Opcode.LEASE_REVOKE, revoke, daemon.tls_address).outcome == 0
        with pytest.raises(Revoked):
            session.sync()


def test_certificates_may_have_names_of_the_operators_choice(
    pki: Pki, start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    table = '[tenant_of_certificate]\n"DNS:127.0.0.2" = "x"\n"URI:gpulease:tenant:ann" = "carol"\n'
    daemon = start_daemon(tls=True, config=pki.settings(table))
    with pki.builder(daemon.tls_address, pki.ann).acquire():
        assert {report["tenant"] for report in daemon.leases()} == {"carol"}
    with pytest.raises(Denied, match="no tenant name is"):
        pki.builder(daemon.tls_address, pki.bob).acquire()


# --- who is refused ---


def test_certificates_that_do_not_hold_are_refused(daemon: Daemon, pki: Pki, tmp_path: Path) -> None:
    other = PkiAuthority.create(tmp_path / "other")
    revoked = pki.authority.issue_tenant("eve")
    pki.authority.revoke(revoked.certificate)
    for who, why in (
        (other.issue_tenant("ann"), "comes from a CA that the node does not trust"),
        (pki.short_lived("late", -1), "has expired"),
        (revoked, "was revoked"),
        (pki.server, "is not a certificate for tenants"),
    ):
        with pytest.raises(Denied, match=f"refused this tenant.*{why}"):
            pki.builder(daemon.tls_address, who).acquire()


def test_who_shows_no_certificate_or_speaks_an_older_tls_is_refused(daemon: Daemon, pki: Pki) -> None:
    with (
        pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"),
        TlsPeer(daemon.tls_address, pki.context(None)) as peer,
    ):
        peer.sock.recv(1)
    old = pki.context(pki.ann)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
        TlsPeer(daemon.tls_address, old)


@pytest.mark.exhaustive
def test_a_revocation_ends_what_is_open_and_lets_in_no_more(
    start_daemon: Callable[..., Daemon], tmp_path: Path
) -> None:
    own = Pki.make(tmp_path / "pki")
    daemon = start_daemon(tls=True, config=own.settings())
    with own.builder(daemon.tls_address, own.bob).acquire() as bobs, GpuSession(bobs) as session:
        with own.peer(daemon.tls_address, own.ann).hello() as ann:
            own.authority.revoke(own.ann.certificate)
            assert ann.sock.recv(1) == b""
        with pytest.raises(Denied, match="was revoked"):
            own.builder(daemon.tls_address, own.ann).acquire()
        session.sync()
        # A revocation list that can't be read lets nobody connect, and does not affect open connections.
        own.authority.crl_path.write_text("no list")
        with pytest.raises(Disconnected):
            own.builder(daemon.tls_address, own.bob).acquire()
        session.sync()
    daemon.allowed_trouble.append('no remote tenant can connect  reason="crl')


def test_a_connection_ends_with_its_certificate(daemon: Daemon, pki: Pki) -> None:
    brief = pki.short_lived("brief", 2)
    with pki.peer(daemon.tls_address, brief).hello() as peer:
        assert peer.sock.recv(1) == b""
    with pytest.raises(Denied, match="has expired"):
        pki.builder(daemon.tls_address, brief).acquire()


# --- servers that the client refuses, and mix-ups ---


@pytest.mark.exhaustive
def test_a_client_believes_nobody_else(daemon: Daemon, pki: Pki, tmp_path: Path, start_daemon: Any) -> None:
    other = PkiAuthority.create(tmp_path / "other")
    builder = GpuBuilder(daemon.tls_address).min_vram(1)
    with pytest.raises(Untrusted, match="can't be verified with"):
        builder.tls(str(pki.ann.certificate), str(pki.ann.key), str(other.certificate_path)).acquire()
    misnamed = pki.authority.issue_server(["elsewhere.example"])
    settings = pki.settings().replace(str(pki.server.certificate), str(misnamed.certificate))
    elsewhere = start_daemon(tls=True, config=settings.replace(str(pki.server.key), str(misnamed.key)))
    with pytest.raises(Untrusted, match=r"not for the name '127.0.0.1'\. Use a name"):
        pki.builder(elsewhere.tls_address, pki.ann).acquire()


def test_mixed_up_ports_are_told(daemon: Daemon, pki: Pki) -> None:
    plain_port = daemon.tls_address.replace("tls:", "tcp:")
    with pytest.raises(Disconnected, match=r"it speaks TLS\. Write the address as tls:HOST:PORT"):
        GpuBuilder(plain_port).min_vram(1).acquire()
    tls_port = daemon.tcp_address.replace("tcp:", "tls:")
    with pytest.raises(Disconnected, match=r"does not speak TLS\. For a daemon's plain TCP port"):
        pki.builder(tls_port, pki.ann).acquire()


def test_missing_and_broken_files_are_told(daemon: Daemon, pki: Pki, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="missing: GPULEASE_TLS_CERTIFICATE, GPULEASE_TLS_KEY, GPULEASE_TLS_CA"):
        GpuBuilder(daemon.tls_address).min_vram(1).acquire()
    broken = Issued(pki.ann.certificate, pki.bob.key)
    with pytest.raises(InvalidRequest, match="can't be used: KEY_VALUES_MISMATCH"):
        pki.builder(daemon.tls_address, broken).acquire()
    with pytest.raises(InvalidRequest, match="can't be used: No such file"):
        pki.builder(daemon.tls_address, Issued(tmp_path / "x", tmp_path / "y")).acquire()


@pytest.mark.exhaustive
def test_a_daemon_whose_files_can_not_be_used_does_not_start(pki: Pki, tmp_path: Path) -> None:
    open_key = tmp_path / "open.key"
    open_key.write_bytes(pki.server.key.read_bytes())
    open_key.chmod(0o644)
    for settings, why in (
        (pki.settings().replace(str(pki.server.key), str(pki.ann.key)), "KEY_VALUES_MISMATCH"),
        (pki.settings().replace(str(pki.server.key), str(open_key)), "can be read by all users: run chmod o-r on it"),
        (pki.settings("max_connections = 0"), "max_connections"),
    ):
        daemon = Daemon(tls=True, config=settings)
        try:
            assert daemon.wait_for_exit() in (69, 78)
            assert why in daemon.log().splitlines()[-1]
            daemon.check_nothing_is_left()
        finally:
            daemon.discard()


# --- processes and keys ---


def test_a_relay_holds_its_own_connection_and_nothing_else(daemon: Daemon, pki: Pki) -> None:
    with pki.peer(daemon.tls_address, pki.ann).hello(), pki.peer(daemon.tls_address, pki.bob).hello():
        both = [info for info in relays(daemon) if info.name == "gpul-relay"]
        assert len(both) == 2
        for relay in both:
            assert sum("socket:" in what for fd, what in open_files(relay.pid).items() if fd > 2) == 2
            assert len([fd for fd in open_files(relay.pid) if fd > 2]) == 2
            status = Path(f"/proc/{relay.pid}/status").read_text()
            assert "NoNewPrivs:\t1" in status
            assert ("Seccomp:\t2" in status) == (platform.machine() == "x86_64")
            if os.geteuid() == 0:
                assert "Uid:\t65534\t65534\t65534\t65534" in status
                assert "CapEff:\t0000000000000000" in status


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may read other processes' memory")
def test_the_nodes_key_is_in_no_relay_that_has_a_tenant(daemon: Daemon, pki: Pki) -> None:
    """Neither is it in relays that wait for a connection. A connection's secrets are only in its own relay."""
    log = pki.server.key.with_suffix(".secrets")
    context = pki.context(pki.ann)
    context.keylog_filename = str(log)
    with TlsPeer(daemon.tls_address, context).hello():
        (anns,) = relays(daemon)
        with pki.peer(daemon.tls_address, pki.bob).hello():
            waiting = {info.pid for info in spares(daemon)}
            holders = _holders(daemon, pki, log)
    assert holders == {"key": {gate_pid(daemon), *waiting}, "secrets": {anns.pid}}


def test_a_relay_that_waits_has_two_sockets_and_goes_with_the_files(pki: Pki, start_daemon: Any) -> None:
    daemon = start_daemon(tls=True, config=pki.settings())
    waiting = spares(daemon)
    for spare in waiting:
        assert all("socket:" in what for fd, what in open_files(spare.pid).items() if fd > 2)
        assert len([fd for fd in open_files(spare.pid) if fd > 2]) == 2
        assert "NoNewPrivs:\t1" in Path(f"/proc/{spare.pid}/status").read_text()
    crl = pki.authority.crl_path
    os.utime(crl, (crl.stat().st_mtime + 1,) * 2)
    with pki.peer(daemon.tls_address, pki.ann).hello():
        (anns,) = relays(daemon)
        assert {info.pid for info in waiting}.isdisjoint({anns.pid, *(info.pid for info in spares(daemon))})
        wait_until(lambda: not any(is_running(info.pid) for info in waiting), "theirs are gone")
    # Relays that are killed while they wait are replaced.
    waiting = spares(daemon)
    for spare in waiting:
        os.kill(spare.pid, signal.SIGKILL)
    wait_until(lambda: not any(is_running(spare.pid) for spare in waiting), "they are gone")
    for _ in range(2):
        with pki.peer(daemon.tls_address, pki.ann).hello():
            assert len(spares(daemon)) == SPARE_RELAYS


def _holders(daemon: Daemon, pki: Pki, log: Path) -> dict[str, set[int]]:
    """Return which of the daemon's processes contain its private key, or the secrets of a connection."""
    pids = [str(info.pid) for info in daemon.processes() if info.name != "gpul-zygote"]
    command = [sys.executable, "-P", "-m", "helpers.memory_search", str(pki.server.key), str(log), *pids]
    done = subprocess.run(command, capture_output=True, text=True, env=python_environment(), check=True, timeout=60)
    return {kind: set(map(int, found)) for kind, *found in (line.split() for line in done.stdout.splitlines())}
