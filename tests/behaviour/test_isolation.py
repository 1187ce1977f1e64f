"""Two sessions can't see or use each other's memory, modules or lease ids, whatever they send."""

from collections.abc import Iterator
from dataclasses import fields

import pytest

from gpulease.client import Denied, GpuBuilder, GpuSession, InvalidHandle, KernelArgs, LaunchFailed, SyncFailed
from gpulease.client.sync.driver import ask
from gpulease.protocol import Failure, Opcode, Status
from gpulease.protocol.capabilities import Permission
from gpulease.protocol.messages import (
    ArenaCopy,
    Attach,
    Body,
    Data,
    Empty,
    Handle,
    LeaseRef,
    LeaseRenew,
    LeaseRevoke,
    MemAlloc,
    MemKeep,
    MemRead,
    MemWrite,
    Ping,
)
from gpulease.protocol.operations import SESSION_OPCODES, SPECS
from helpers.daemon import Daemon
from helpers.kernels import FAULTS, TRANSFORM, check_main_job, scale_args
from helpers.raw_peer import RawPeer

SECRET = b"a secret of 24 bytes....."[:24]
UNKNOWN_LEASE = 0x1234


class Victim:
    """A session with secret data in its memory."""

    def __init__(self, session: GpuSession) -> None:
        self.session = session
        self.buffer = session.mem_alloc(len(SECRET))
        session.mem_write(self.buffer, 0, SECRET)
        self.module = session.module_load(TRANSFORM)

    def check_unharmed(self) -> None:
        assert self.session.mem_read(self.buffer, 0, len(SECRET)) == SECRET
        check_main_job(self.session)


@pytest.fixture
def victim(daemon: Daemon) -> Iterator[Victim]:
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        victim = Victim(session)
        yield victim
        victim.check_unharmed()


@pytest.fixture
def intruder(daemon: Daemon, victim: Victim) -> Iterator[RawPeer]:
    """Yield a raw connection that is attached to another session."""
    with daemon.builder().acquire() as lease, RawPeer(daemon.address).hello() as peer:
        assert not isinstance(peer.attach(lease.lease_id), Failure)
        yield peer
        assert peer.request(Opcode.PING, Ping(1), lease.lease_id) == Ping(1)


def own_id(daemon: Daemon, victim: Victim) -> int:
    (other,) = {int(report["lease_id"], 16) for report in daemon.leases()} - {victim.session.session_id}
    return other


def test_a_foreign_buffer_is_refused_before_it_is_sent(daemon: Daemon, victim: Victim) -> None:
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        for use in (
            lambda: session.mem_read(victim.buffer, 0, 4),
            lambda: session.mem_write(victim.buffer, 0, b"1234"),
            lambda: session.mem_free(victim.buffer),
        ):
            with pytest.raises(InvalidHandle, match="belongs to another session"):
                use()
        own = session.module_load(TRANSFORM)
        with pytest.raises(InvalidHandle, match="belongs to another session"):
            session.launch(own, "scale", [1], [1], scale_args(victim.buffer, 1))
        with pytest.raises(LaunchFailed, match="belongs to another session"):
            session.launch(victim.module, "scale", [1], [1], scale_args(session.mem_alloc(4), 1))


def test_a_foreign_number_means_nothing_to_a_worker(daemon: Daemon, victim: Victim, intruder: RawPeer) -> None:
    session_id = own_id(daemon, victim)
    attempts: list[tuple[Opcode, Body]] = [
        (Opcode.MEM_READ, MemRead(victim.buffer.handle, 0, len(SECRET))),
        (Opcode.MEM_WRITE, MemWrite(victim.buffer.handle, 0, b"gotcha")),
        (Opcode.MEM_FREE, Handle(victim.buffer.handle)),
        (Opcode.MEM_REUSE, Handle(victim.buffer.handle)),
        (Opcode.MEM_KEEP, MemKeep(victim.buffer.handle, "mine")),
        (Opcode.MODULE_UNLOAD, Handle(victim.module.handle)),
    ]
    touching = {Permission.MEM_READ, Permission.MEM_WRITE}
    named = {op for op in SESSION_OPCODES if SPECS[op].needs.permissions in touching and names_buffer(op)}
    assert named <= {op for op, _ in attempts}
    for op, body in attempts:
        assert intruder.refused(op, body, session_id).status is Status.INVALID_HANDLE


def names_buffer(op: Opcode) -> bool:
    """Return whether an operation's body contains an allocation's handle.

    Arena copies are excluded, because the intruder has no arena.
    """
    request = SPECS[op].request
    return request is not ArenaCopy and "handle" in {field.name for field in fields(request)}


def test_the_victims_session_id_on_the_intruders_connection(daemon: Daemon, victim: Victim, intruder: RawPeer) -> None:
    attempts: list[tuple[Opcode, Body]] = [
        (Opcode.MEM_READ, MemRead(victim.buffer.handle, 0, len(SECRET))),
        (Opcode.MEM_WRITE, MemWrite(victim.buffer.handle, 0, b"gotcha")),
        (Opcode.MEM_FREE, Handle(victim.buffer.handle)),
        (Opcode.MEM_REUSE, Handle(victim.buffer.handle)),
        (Opcode.MEM_KEEP, MemKeep(victim.buffer.handle, "mine")),
        (Opcode.MEM_KEPT, Empty()),
        (Opcode.MEM_RESET, Empty()),
        (Opcode.SYNC, Empty()),
        (Opcode.PING, Ping(3)),
    ]
    for op, body in attempts:
        failure = intruder.refused(op, body, victim.session.session_id)
        assert failure.status is Status.INVALID_REQUEST
        assert f"{victim.session.session_id:032x}" in failure.message
    # A quiet request fails as well; the next operation with a reply reports it.
    number = intruder.quiet(Opcode.MEM_FREE, Handle(victim.buffer.handle), victim.session.session_id)
    failure = intruder.refused(Opcode.SYNC, Empty(), own_id(daemon, victim))
    assert (failure.status, failure.failed_request_id) == (Status.INVALID_REQUEST, number)


def test_a_kernel_can_not_reach_another_sessions_memory(daemon: Daemon, victim: Victim) -> None:
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        module = session.module_load(FAULTS)
        args = KernelArgs().push_u64(victim.buffer.handle).push_u64(0)
        session.launch(module, "stray_load", [1], [1], args)
        session.launch(module, "stray_store", [1], [1], args)
        with pytest.raises(SyncFailed):
            session.sync()


def test_attach_to_a_lease_nobody_has(daemon: Daemon) -> None:
    with RawPeer(daemon.address).hello() as peer:
        failure = peer.attach(UNKNOWN_LEASE)
        assert isinstance(failure, Failure)
        assert failure.status is Status.NOT_FOUND
        # The connection is still a control connection.
        assert peer.request(Opcode.PING, Ping(2)) == Ping(2)


def test_another_tenant_can_not_tell_a_lease_from_none(daemon: Daemon, victim: Victim) -> None:
    theirs = victim.session.session_id
    with RawPeer(daemon.tcp_address).hello() as peer:
        for op, body_of in (
            (Opcode.LEASE_QUERY, LeaseRef),
            (Opcode.LEASE_FREE, LeaseRef),
            (Opcode.LEASE_RENEW, lambda lease_id: LeaseRenew(lease_id, 1000)),
        ):
            real, made_up = (peer.refused(op, body_of(number)) for number in (theirs, UNKNOWN_LEASE))
            assert real.status is made_up.status is Status.NOT_FOUND
            assert real.message == made_up.message.replace(f"{UNKNOWN_LEASE:032x}", f"{theirs:032x}")
            assert real.hint == made_up.hint
        real, made_up = (peer.refused(Opcode.ATTACH, Attach(()), number) for number in (theirs, UNKNOWN_LEASE))
        assert real.status is made_up.status is Status.NOT_FOUND
        assert real.message == made_up.message.replace(f"{UNKNOWN_LEASE:032x}", f"{theirs:032x}")


def test_only_operators_revoke(daemon: Daemon, victim: Victim) -> None:
    with RawPeer(daemon.tcp_address).hello() as peer:
        failure = peer.refused(Opcode.LEASE_REVOKE, LeaseRevoke(victim.session.session_id, "mine now"))
        assert failure.status is Status.DENIED
        assert "operator" in failure.message


def test_peers_nobody_vouches_for_see_only_what_they_acquired_themselves(daemon: Daemon, victim: Victim) -> None:
    with RawPeer(daemon.tcp_address).hello() as one, RawPeer(daemon.tcp_address).hello() as other:
        grant = one.acquire()
        listed = [report["lease_id"] for report in one.request(Opcode.LEASE_LIST_ACTIVE, Empty()).report]
        assert listed == [f"{grant.lease_id:032x}"]
        assert other.request(Opcode.LEASE_LIST_ACTIVE, Empty()).report == []
        one.free(grant.lease_id)


def test_an_operator_sees_everybodys_leases(daemon: Daemon, victim: Victim) -> None:
    builder = GpuBuilder(daemon.tcp_address).min_vram(1 << 20)
    with builder.acquire() as lease:
        listed = {report["lease_id"]: report["tenant"] for report in daemon.leases()}
        assert listed[lease.lease_id_text] == "tcp"
        assert len(listed) == 2


def test_denied_is_an_error_of_its_own(daemon: Daemon) -> None:
    with pytest.raises(Denied, match="operator"):
        ask(Opcode.LEASE_REVOKE, LeaseRevoke(UNKNOWN_LEASE, ""), daemon.tcp_address)


def test_memory_of_one_session_never_shows_in_another(daemon: Daemon, victim: Victim, intruder: RawPeer) -> None:
    session_id = own_id(daemon, victim)
    # The same allocation calls may return the same addresses in each process, but it is not the same memory.
    handle = intruder.request(Opcode.MEM_ALLOC, MemAlloc(len(SECRET)), session_id).handle
    reply = intruder.request(Opcode.MEM_READ, MemRead(handle, 0, len(SECRET)), session_id)
    assert reply == Data(bytes(len(SECRET)))
    intruder.request(Opcode.MEM_WRITE, MemWrite(handle, 0, b"\xff" * len(SECRET)), session_id)
