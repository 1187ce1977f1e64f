"""A tenant or an operator revokes one token of a lease: what was opened with it ends, and all else continues."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from gpulease.client import Denied, GpuExclusivityClass, GpuSession, Permission
from gpulease.client.cli.__main__ import main
from gpulease.client.narrowing import attenuate
from gpulease.daemon.contract.control_page import MAX_REVOKED_TOKENS
from gpulease.protocol import Failure, Opcode, Status
from gpulease.protocol.address import ADDRESS_VARIABLE
from gpulease.protocol.capabilities import SESSION_PERMISSIONS
from gpulease.protocol.connection import Goodbye, Reply
from gpulease.protocol.messages import AttachReply, CapabilityPresent, CapabilityRevoke, Data, LeaseRef, MemRead
from helpers.daemon import Daemon
from helpers.kernels import check_main_job, start_endless
from helpers.lasting import LastingDaemon
from helpers.raw_peer import RawPeer
from helpers.shared_lease import TEXT, Shared, sharing
from helpers.waiting import wait_until


@pytest.fixture
def shared(daemon: Daemon) -> Iterator[Shared]:
    with sharing(daemon) as shared:
        yield shared


def refusal_of_a_read(shared: Shared, peer: RawPeer) -> Failure:
    """Return the refusal of a read: a reply, or the worker's goodbye.

    The worker closes connections with revoked tokens after some time.
    """
    body = MemRead(shared.handle, 0, len(TEXT))
    peer.sock.sendall(peer.connection.send_request(Opcode.MEM_READ, body, session_id=shared.lease.lease_id)[1])
    said = peer.next_event()
    failure = said.failure if isinstance(said, Goodbye) else said.result if isinstance(said, Reply) else said
    assert isinstance(failure, Failure), said
    return failure


def test_one_token_ends_and_the_others_go_on(shared: Shared) -> None:
    ended, other, unused = (shared.token() for _ in range(3))
    with shared.guest() as peer, shared.guest() as second:
        assert isinstance(shared.attach(peer, ended), AttachReply)
        assert isinstance(shared.attach(second, other), AttachReply)
        shared.lease.revoke_token(ended)
        shared.lease.revoke_token(ended)
        refused = refusal_of_a_read(shared, peer)
        assert (refused.status, "was revoked" in refused.message) == (Status.DENIED, True)
        shared.lease.revoke_token(unused)
        assert "(token: revoked)" in shared.refused(unused).message
        assert shared.read(second) == Data(TEXT)
    check_main_job(shared.session)


def test_a_wait_under_a_token_ends_with_it(shared: Shared) -> None:
    grant = shared.lease.issue(SESSION_PERMISSIONS)
    with GpuSession.attach(grant, shared.daemon.address) as guest:
        kept = start_endless(guest)
        timer = threading.Timer(0.2, shared.lease.revoke_token, [grant])
        timer.start()
        with pytest.raises(Denied, match="was revoked"):
            guest.sync()
        timer.join()
    del kept


def test_a_token_that_was_shown_counts_no_more_once_it_is_revoked(shared: Shared) -> None:
    whole = shared.lease.issue(Permission.LEASE_QUERY | Permission.LEASE_RENEW, shared.audience, 60)
    narrowed = attenuate(whole.token, whole.public_key, permissions=Permission.LEASE_QUERY)
    with shared.guest() as peer:
        peer.request(Opcode.CAPABILITY_PRESENT, CapabilityPresent(narrowed))
        assert peer.request(Opcode.LEASE_QUERY, LeaseRef(shared.lease.lease_id))
        shared.lease.revoke_token(whole)
        assert peer.refused(Opcode.LEASE_QUERY, LeaseRef(shared.lease.lease_id)).status is Status.NOT_FOUND
        assert "revoked" in peer.refused(Opcode.CAPABILITY_PRESENT, CapabilityPresent(narrowed)).message


def test_who_may_end_a_token(shared: Shared) -> None:
    lease_id, token = shared.lease.lease_id, shared.token()
    nonce = 77
    grant = shared.lease.issue(Permission.MEM_READ, shared.audience, 60, nonce)
    with shared.guest() as holder, RawPeer(shared.daemon.address).hello() as operator:
        for body in (CapabilityRevoke(0, 0, token), CapabilityRevoke(lease_id, nonce, b"")):
            assert holder.refused(Opcode.CAPABILITY_REVOKE, body).status is Status.NOT_FOUND
        assert holder.refused(Opcode.CAPABILITY_REVOKE, CapabilityRevoke(0, 5, b"")).status is Status.NOT_FOUND
        for body, status in (
            (CapabilityRevoke(lease_id, 0, b""), Status.INVALID_REQUEST),
            (CapabilityRevoke(lease_id, 0, b"no token"), Status.DENIED),
            (CapabilityRevoke(1, nonce, b""), Status.NOT_FOUND),
        ):
            assert operator.refused(Opcode.CAPABILITY_REVOKE, body).status is status
        operator.request(Opcode.CAPABILITY_REVOKE, CapabilityRevoke(lease_id, nonce, b""))
    assert "(token: revoked)" in shared.refused(grant.token).message
    with pytest.raises(Denied, match="used before"):
        shared.lease.issue(Permission.MEM_READ, shared.audience, 60, nonce)


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_kept", [True, False], ids=["restarted", "narrowed"])
def test_it_stays_revoked(lasting: LastingDaemon, is_kept: bool) -> None:
    """After a restart of the daemon, and for a holder that narrows the token."""
    wish = lasting.now.builder().exclusivity(GpuExclusivityClass.SHARED)
    with wish.acquire() as lease, GpuSession(lease):
        bound, unused = (lease.issue(SESSION_PERMISSIONS, ttl_secs=200) for _ in range(2))
        token = unused.token
        with GpuSession.attach(bound, lasting.address) as guest:
            lease.revoke_token(unused)
            if is_kept:
                lasting.restart()
            else:
                token = attenuate(token, unused.public_key, permissions=Permission.MEM_READ)
            with pytest.raises(Denied, match="token: revoked"):
                GpuSession.attach(token, lasting.address)
            guest.sync()
            lease.revoke_token(bound)
            with pytest.raises(Denied, match="was revoked"):
                guest.sync()


@pytest.mark.exhaustive
def test_an_operator_finds_it_in_the_audit_log(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    folder = tmp_path / "audit"
    daemon = start_daemon(config=f'audit = "{folder}"\n')
    with daemon.builder().acquire() as lease:
        grant = lease.issue(Permission.MEM_READ)

        def records(kind: str) -> list[dict[str, str]]:
            text = b"".join(path.read_bytes() for path in folder.glob("*.jsonl")).decode()
            found = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
            return [record["data"] for record in found if record["kind"] == kind]

        wait_until(lambda: records("issue"), "it is recorded")
        nonce = records("issue")[0]["nonce"]
        environment = {ADDRESS_VARIABLE: daemon.address}
        done = CliRunner().invoke(main, ["revoke", lease.lease_id_text, "--token", nonce], env=environment)
        assert (done.exit_code, "is no longer valid" in done.output) == (0, True), done.output
        with pytest.raises(Denied, match="token: revoked"):
            GpuSession.attach(grant, daemon.address)
        wait_until(lambda: records("withdraw"), "that is recorded, too")
        who = f"uid:{os.getuid()}"
        expected = {"tenant": who, "by": who, "lease": lease.lease_id_text, "nonce": nonce}
        assert records("withdraw") == [expected]
        assert lease.query()["state"] == "active"
        for words in (("x", "--token", nonce), (lease.lease_id_text, "--token", "77")):
            assert CliRunner().invoke(main, ["revoke", *words], env=environment).exit_code == 2


def test_more_than_a_page_has_room_for(shared: Shared) -> None:
    with RawPeer(shared.daemon.address).hello() as peer:
        for nonce in range(1, MAX_REVOKED_TOKENS + 1):
            peer.request(Opcode.CAPABILITY_REVOKE, CapabilityRevoke(shared.lease.lease_id, nonce, b""))
        failure = peer.refused(Opcode.CAPABILITY_REVOKE, CapabilityRevoke(shared.lease.lease_id, 1 << 100, b""))
        assert (failure.status, "Renew the lease" in failure.hint) == (Status.BUSY, True)
