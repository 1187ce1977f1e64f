"""A lease is shared with a token: with whom, for what, and for how long. Also a daemon that requires tokens.

The owner is this process's user, on the Unix socket. The guest is another tenant, over TCP.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpulease.client import (
    Busy,
    Denied,
    GpuSession,
    InvalidHandle,
    InvalidRequest,
    KernelArgs,
    LeaseFreed,
    Permission,
    Revoked,
    SyncFailed,
    aio,
    my_audience,
)
from gpulease.client.core.tokens import GrantPair
from gpulease.client.narrowing import attenuate
from gpulease.client.sync.driver import drive
from gpulease.daemon.contract.control_page import MAX_CONNECTIONS
from gpulease.protocol import Failure, Opcode, Status
from gpulease.protocol.capabilities import NODE_LEASE, SESSION_PERMISSIONS, AttachOption
from gpulease.protocol.limits import MAX_TOKEN_BYTES
from gpulease.protocol.messages import (
    Attach,
    AttachReply,
    Body,
    CapabilityGrant,
    CapabilityIssue,
    CapabilityPresent,
    Data,
    Empty,
    Handle,
    LeaseRef,
    LeaseRenew,
    LeaseRevoke,
    MemAlloc,
    MemRead,
    MemWrite,
)
from gpulease.protocol.opcodes import SessionOption
from gpulease.protocol.primitives import Tlv
from helpers.daemon import SHORT_LEASES_S, Daemon
from helpers.kernels import FAULTS, TRANSFORM, check_main_job, start_stray_store
from helpers.lasting import LastingDaemon
from helpers.raw_peer import RawPeer, lease_alloc
from helpers.shared_lease import TEXT, Shared, sharing
from helpers.waiting import wait_until

SOON_S = 60.0


@pytest.fixture
def shared(daemon: Daemon) -> Iterator[Shared]:
    with sharing(daemon) as shared:
        yield shared


def test_without_a_token_others_find_no_such_lease(shared: Shared) -> None:
    with shared.guest() as peer:
        answer = peer.attach(shared.lease.lease_id)
        assert isinstance(answer, Failure)
        assert answer.status is Status.NOT_FOUND


def test_a_token_lets_another_tenant_in_for_what_it_permits(shared: Shared) -> None:
    with shared.guest() as peer:
        assert isinstance(shared.attach(peer, shared.token(Permission.MEM_READ)), AttachReply)
        assert shared.read(peer) == Data(TEXT)
        for op, body in (
            (Opcode.MEM_WRITE, MemWrite(shared.handle, 0, b"x")),
            (Opcode.MEM_ALLOC, MemAlloc(4)),
            (Opcode.SYNC, Empty()),
        ):
            answer = peer.ask(op, body, shared.lease.lease_id)
            if op is Opcode.SYNC:
                assert answer == Empty()
                continue
            assert isinstance(answer, Failure)
            assert (answer.status, op.name in answer.message) == (Status.DENIED, True)
        assert shared.read(peer) == Data(TEXT)
    check_main_job(shared.session)


def test_a_grant_binds_a_session_on_the_lease_at_hand(shared: Shared) -> None:
    grant = shared.lease.issue(Permission.MEM_READ)
    assert shared.lease.inspect_token(grant).permissions == Permission.MEM_READ
    with GpuSession(shared.lease, grant=grant) as bound:
        buffer = bound.buffer(shared.handle, len(TEXT))
        assert bound.mem_read(buffer, 0, len(TEXT)) == TEXT
        with pytest.raises(Denied, match="MEM_ALLOC"):
            bound.mem_alloc(1)
    with pytest.raises(Denied, match="replayed nonce"):
        GpuSession(shared.lease, grant=grant)
    assert shared.lease.query()["state"] == "active", "of the lease the refusal says nothing"
    shared.lease.renew(60)
    check_main_job(shared.session)
    with shared.daemon.builder().acquire() as other, pytest.raises(InvalidRequest, match="must be of this lease"):
        GpuSession(other, grant=grant)


@pytest.mark.parametrize("is_async", [False, True])
def test_the_clients_faces(shared: Shared, is_async: bool) -> None:
    grant = shared.lease.issue(SESSION_PERMISSIONS, ttl_secs=30)
    assert grant.token.hex() not in repr(grant)
    if not is_async:
        with GpuSession.attach(grant, shared.daemon.address) as session:
            check_main_job(session)
            assert session.lease.remaining_s <= 30
            assert session.session_id == shared.lease.lease_id
            assert session.lease.query()["state"] == "active"
        return

    async def main() -> None:
        async with aio.GpuSession.attach(grant.to_text(), shared.daemon.address) as session:
            buffer = await session.mem_alloc(4)
            await session.mem_write(buffer, 0, b"abcd")
            assert await session.mem_read(buffer, 0, 4) == b"abcd"

    asyncio.run(main())


def test_a_guests_failed_quiet_request_is_reported_to_the_guest_alone(shared: Shared) -> None:
    with shared.guest() as peer:
        shared.attach(peer, shared.token(Permission.MEM_READ | Permission.MEM_WRITE))
        number = peer.quiet(Opcode.MEM_FREE, Handle(12345), shared.lease.lease_id)
        # This reply shows that the worker has served the request before it, and reports only its own refusal.
        assert status_of(peer.ask(Opcode.MODULE_UNLOAD, Handle(1), shared.lease.lease_id)) is Status.DENIED
        shared.session.sync()
        check_main_job(shared.session)
        answer = shared.read(peer)
        assert isinstance(answer, Failure)
        assert (answer.status, answer.failed_request_id) == (Status.INVALID_HANDLE, number)
        assert shared.read(peer) == Data(TEXT)


def test_a_quiet_request_that_is_not_permitted_disturbs_nobody(shared: Shared) -> None:
    with shared.guest() as peer:
        shared.attach(peer, shared.token(Permission.MEM_READ))
        peer.quiet(Opcode.MEM_WRITE, MemWrite(shared.handle, 0, b"x"), shared.lease.lease_id)
        assert peer.goodbye().status is Status.DENIED
    shared.session.sync()
    check_main_job(shared.session)


def test_a_token_opens_one_connection(shared: Shared) -> None:
    token = shared.token()
    with shared.guest() as peer:
        assert isinstance(shared.attach(peer, token), AttachReply)
        assert "(token: replayed nonce)" in shared.refused(token).message
    assert "(token: replayed nonce)" in shared.refused(token).message


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_restarted", [False, True], ids=["", "over a restart"])
def test_a_refused_attach_leaves_the_token_good_for_one(lasting: LastingDaemon, is_restarted: bool) -> None:
    lease = lasting.now.builder().acquire()
    token = lease.issue(Permission.MEM_READ, my_audience(lasting.address)).token
    with (
        GpuSession(lease),
        pytest.raises(
            Busy, match=r"has 1 connection, the maximum for its exclusivity class.*acquire the lease as SHARED"
        ),
    ):
        GpuSession.attach(token, lasting.address)
    if is_restarted:
        # When a grant has been reported, it is on disk, and so are all records before it.
        lasting.now.builder().acquire().free()
        lasting.restart()
    with GpuSession.attach(token, lasting.address):
        pass
    if is_restarted:
        lasting.restart()
    with pytest.raises(Denied, match="replayed nonce"):
        GpuSession.attach(token, lasting.address)
    lease.free()


@pytest.mark.exhaustive
def test_a_refused_attach_leaves_the_second_token_good_for_one_also_over_a_restart(lasting: LastingDaemon) -> None:
    with lasting.now.builder().acquire() as lease:
        grant = GrantPair(None, lease.issue(Permission.TASKLET_SUBMIT))
        with GpuSession(lease), pytest.raises(Busy, match="has 1 connection"):
            GpuSession(lease, grant=grant)
        # When a grant has been reported, it is on disk, and so are all records before it.
        lasting.now.builder().acquire().free()
        lasting.restart()
        with GpuSession(lease, grant=grant) as session:
            buffer = session.mem_alloc(4)
            drive(session._session.operations.use_grant(is_second=True))
            lasting.restart()
            # The worker holds the connection to its second token while no broker runs, and under the next broker.
            with pytest.raises(Denied, match="MEM_READ"):
                session.mem_read(buffer, 0, 4)
            drive(session._session.operations.use_grant(is_second=False))
            assert session.mem_read(buffer, 0, 4) == bytes(4)
        with pytest.raises(Denied, match="replayed nonce"):
            GpuSession(lease, grant=grant)


def test_of_two_who_attach_at_once_with_one_token_one_gets_in(shared: Shared) -> None:
    with ThreadPoolExecutor(2) as pool, shared.guest() as first, shared.guest() as second:
        token = shared.token()
        answers = list(pool.map(lambda peer: shared.attach(peer, token), (first, second)))
        assert sorted(type(answer).__name__ for answer in answers) == ["AttachReply", "Failure"]


def asked(peer: RawPeer, op: Opcode, body: Body) -> Body | Failure:
    return peer.ask(op, body, peer.session_id)


def use(peer: RawPeer, number: int) -> None:
    peer.quiet(Opcode.USE_TOKEN, Handle(number), peer.session_id)


def attached_twice(shared: Shared, peer: RawPeer, *tokens: bytes, first: bytes | None = None) -> object:
    """Attach as the lease's owner, or with the token `first`, with `tokens` as second tokens."""
    peer.session_id = shared.lease.lease_id
    options = [] if first is None else [Tlv(AttachOption.TOKEN, first)]
    options += [Tlv(AttachOption.SECOND_TOKEN, token) for token in tokens]
    return peer.ask(Opcode.ATTACH, Attach(tuple(options)), shared.lease.lease_id)


def own_token(shared: Shared, permissions: Permission = Permission.TASKLET_SUBMIT, ttl_s: float = 60) -> bytes:
    return shared.lease.issue(permissions, ttl_secs=ttl_s).token


def status_of(answer: object) -> Status:
    assert isinstance(answer, Failure), answer
    return answer.status


def test_a_second_token_bounds_what_is_sent_between_two_use_tokens(shared: Shared) -> None:
    with RawPeer(shared.daemon.address).hello() as peer:
        reply = attached_twice(shared, peer, own_token(shared))
        assert isinstance(reply, AttachReply)
        assert SessionOption.USE_TOKEN in [option.type for option in reply.options]
        assert shared.read(peer) == Data(TEXT)
        use(peer, 1)
        assert status_of(shared.read(peer)) is Status.DENIED
        assert asked(peer, Opcode.SYNC, Empty()) == Empty()
        # One frame carries the change and the request after it.
        use(peer, 0)
        assert shared.read(peer) == Data(TEXT)
        # A failure that is still to be reported does not keep the second token from applying.
        peer.quiet(Opcode.MEM_FREE, Handle(12345), peer.session_id)
        use(peer, 1)
        assert status_of(asked(peer, Opcode.SYNC, Empty())) is Status.INVALID_HANDLE
        assert status_of(shared.read(peer)) is Status.DENIED
        peer.quiet(Opcode.MEM_WRITE, MemWrite(shared.handle, 0, b"x"), peer.session_id)
        assert peer.goodbye().status is Status.DENIED
    check_main_job(shared.session)


def test_a_guest_may_have_two_tokens_but_not_the_second_alone(shared: Shared) -> None:
    token = shared.token(Permission.TASKLET_SUBMIT)
    with shared.guest() as peer:
        assert status_of(attached_twice(shared, peer, token)) is Status.NOT_FOUND
        assert isinstance(attached_twice(shared, peer, token, first=shared.token(Permission.MEM_READ)), AttachReply)
        assert shared.read(peer) == Data(TEXT)
        use(peer, 1)
        assert status_of(shared.read(peer)) is Status.DENIED
        use(peer, 0)
        assert status_of(asked(peer, Opcode.MEM_ALLOC, MemAlloc(4))) is Status.DENIED
        assert shared.read(peer) == Data(TEXT)


def test_a_second_token_that_fails_a_check_refuses_the_attach(shared: Shared) -> None:
    good, spent = own_token(shared), own_token(shared)
    with RawPeer(shared.daemon.address).hello() as first:
        assert isinstance(attached_twice(shared, first, spent), AttachReply)
    with shared.daemon.builder().acquire() as other, RawPeer(shared.daemon.address).hello() as peer:
        for said, tokens, first_token in (
            ("(token: malformed)", [b""], None),
            ("(token: foreign audience)", [shared.token()], None),
            ("(token: replayed nonce)", [spent], None),
            ("(token: permission missing)", [own_token(shared, Permission.LEASE_QUERY)], None),
            ("You have no lease", [other.issue(Permission.MEM_READ).token], None),
            ("at most one token", [good, good], None),
            ("copies of the same token", [good], good),
        ):
            answer = attached_twice(shared, peer, *tokens, first=first_token)
            assert isinstance(answer, Failure)
            assert said in answer.message
        # None of these used up the tokens that were in order.
        assert isinstance(attached_twice(shared, peer, good), AttachReply)
        assert status_of(asked(peer, Opcode.USE_TOKEN, Handle(2))) is Status.INVALID_REQUEST
    with RawPeer(shared.daemon.address).hello() as peer:
        assert isinstance(peer.attach(shared.lease.lease_id), AttachReply)
        assert status_of(asked(peer, Opcode.USE_TOKEN, Handle(1))) is Status.INVALID_REQUEST


@pytest.mark.parametrize("is_quiet", [False, True])
def test_a_second_token_that_is_revoked_ends_nothing_but_its_own_use(shared: Shared, is_quiet: bool) -> None:
    token = own_token(shared)
    with RawPeer(shared.daemon.address).hello() as peer:
        attached_twice(shared, peer, token)
        use(peer, 1)
        assert asked(peer, Opcode.SYNC, Empty()) == Empty()
        shared.lease.revoke_token(token)
        wait_until(lambda: isinstance(asked(peer, Opcode.SYNC, Empty()), Failure), "the worker has read it")
        assert status_of(asked(peer, Opcode.SYNC, Empty())) is Status.DENIED
        if is_quiet:
            # The worker skips the request, and could report that to nobody.
            peer.quiet(Opcode.MODULE_UNLOAD, Handle(1), peer.session_id)
            assert peer.goodbye().status is Status.DENIED
            return
        use(peer, 0)
        assert shared.read(peer) == Data(TEXT)
        use(peer, 1)
        assert status_of(asked(peer, Opcode.SYNC, Empty())) is Status.DENIED


def test_who_may_not_use_it(shared: Shared) -> None:
    own = shared.lease.issue(Permission.MEM_READ).token
    assert "(token: foreign audience)" in shared.refused(own).message
    with pytest.raises(Denied, match="foreign audience"):
        GpuSession.attach(shared.token(), shared.daemon.address)
    assert "(token: permission missing)" in shared.refused(shared.token(Permission.LEASE_QUERY)).message
    with shared.daemon.builder().acquire() as other, shared.guest() as peer:
        answer = peer.ask(Opcode.ATTACH, Attach((Tlv(AttachOption.TOKEN, shared.token()),)), other.lease_id)
        assert isinstance(answer, Failure)
        assert answer.status is Status.NOT_FOUND


@pytest.mark.parametrize("token", [b"", b"x", bytes(MAX_TOKEN_BYTES), bytes(60_000)])
def test_what_is_no_token(shared: Shared, token: bytes) -> None:
    assert "(token: malformed)" in shared.refused(token).message


def test_a_renewal_ends_it_at_the_next_operation(shared: Shared) -> None:
    with shared.guest() as peer:
        token, unused = shared.token(), shared.token()
        shared.attach(peer, token)
        assert shared.read(peer) == Data(TEXT)
        shared.lease.renew(60)
        # The refusal comes with the next operation, or earlier if the worker checks before that.
        answer = peer.ask_or_goodbye(Opcode.MEM_READ, MemRead(shared.handle, 0, len(TEXT)), shared.lease.lease_id)
        assert isinstance(answer, Failure)
        assert (answer.status, "renewed" in answer.message) == (Status.DENIED, True)
        assert "(token: stale generation)" in shared.refused(unused).message
    check_main_job(shared.session)


def test_its_end_ends_a_wait_and_the_launches(shared: Shared) -> None:
    """The guest launches a kernel that never ends. Its SYNC gets a reply when the token expires."""

    def launch_endless(guest: GpuSession) -> None:
        args = KernelArgs().push_buffer(guest.mem_alloc(4))
        guest.launch(guest.module_load(FAULTS), "endless", [1], [1], args)

    guest, _ = shared.short_guest(launch_endless)
    with guest:
        with pytest.raises(Denied, match="token"):
            guest.sync()
        with pytest.raises(Denied, match="token"):
            guest.mem_alloc(4)
    assert shared.lease.query()["state"] == "active"


def test_launches_stop_with_the_token(shared: Shared) -> None:

    def launch_one(guest: GpuSession) -> Callable[[], object]:
        module, args = guest.module_load(TRANSFORM), KernelArgs().push_buffer(guest.mem_alloc(4))
        args.push_u32(1).push_f32(2.0)
        guest.launch(module, "scale", [1], [1], args)
        return lambda: guest.launch(module, "scale", [1], [1], args)

    guest, launch = shared.short_guest(launch_one)
    with guest:
        with contextlib.suppress(Denied):
            while True:
                launch()
        with pytest.raises(Denied, match="token"):
            guest.sync()
        launched = shared.lease.query()["launches"]
        time.sleep(0.05)
        assert shared.lease.query()["launches"] == launched > 0


def test_a_revoked_lease_says_so_to_guests(shared: Shared) -> None:
    grant = shared.lease.issue(SESSION_PERMISSIONS)
    with GpuSession.attach(grant, shared.daemon.address) as guest:
        check_main_job(guest)
        shared.daemon.revoke(shared.lease.lease_id)
        with pytest.raises(Revoked):
            guest.sync()


def test_connections_whose_token_is_over_take_nobodys_place(shared: Shared) -> None:
    def is_let_in() -> bool:
        with shared.guest() as late:
            answer = shared.attach(late, shared.token())
            assert isinstance(answer, AttachReply) or (isinstance(answer, Failure) and answer.status is Status.BUSY)
            return isinstance(answer, AttachReply)

    for ttl_s in SHORT_LEASES_S:
        with contextlib.ExitStack() as stack:
            peers = [stack.enter_context(shared.guest()) for _ in range(MAX_CONNECTIONS - 1)]
            answers = [shared.attach(peer, shared.token(ttl_s=ttl_s)) for peer in peers]
            # On a busy host the tokens may expire before all peers are attached. Then try a longer time.
            if all(isinstance(answer, AttachReply) for answer in answers) and not is_let_in():
                wait_until(is_let_in, "the tokens are over, and there is room")
                assert all(peer.goodbye().status is Status.DENIED for peer in peers)
                return
    raise AssertionError(f"to attach takes longer than {SHORT_LEASES_S[-1]:g} s")


def test_a_guest_gets_no_arena(shared: Shared) -> None:
    grant = shared.lease.issue(SESSION_PERMISSIONS)
    with GpuSession.attach(grant, shared.daemon.address) as guest:
        assert guest._session.attachment.arena is None
        assert guest.empty(4).shape == (4,)


def test_narrowed_tokens(shared: Shared) -> None:
    grant = shared.lease.issue(SESSION_PERMISSIONS, ttl_secs=60)
    weaker = attenuate(grant.token, grant.public_key, permissions=Permission.MEM_READ, ttl_secs=30)
    with GpuSession.attach(weaker, shared.daemon.address) as guest:
        assert guest.lease.remaining_s <= 30
        with pytest.raises(Denied, match="MEM_ALLOC"):
            guest.mem_alloc(4)
    # The narrowed token has the nonce of the first one, so it is used up as well.
    with pytest.raises(Denied, match="replayed"):
        GpuSession.attach(grant, shared.daemon.address)


def test_what_a_token_permits_on_a_control_connection(shared: Shared) -> None:
    lease_id = shared.lease.lease_id
    with shared.guest() as peer:
        assert peer.refused(Opcode.LEASE_QUERY, LeaseRef(lease_id)).status is Status.NOT_FOUND
        held = peer.request(Opcode.CAPABILITY_PRESENT, CapabilityPresent(shared.token(Permission.LEASE_RENEW)))
        assert (held.lease_id, held.permissions) == (lease_id, Permission.LEASE_RENEW)
        assert peer.request(Opcode.LEASE_QUERY, LeaseRef(lease_id)).report["state"] == "active"
        assert peer.refused(Opcode.LEASE_FREE, LeaseRef(lease_id)).status is Status.NOT_FOUND
        assert peer.refused(Opcode.LEASE_REVOKE, LeaseRevoke(lease_id, "")).status is Status.DENIED
        assert peer.request(Opcode.LEASE_RENEW, LeaseRenew(lease_id, 60_000)).generation == 2
        # The renewal made a new generation, and the token is for the generation before.
        assert peer.refused(Opcode.LEASE_RENEW, LeaseRenew(lease_id, 60_000)).status is Status.NOT_FOUND
        assert peer.refused(Opcode.LEASE_QUERY, LeaseRef(lease_id)).status is Status.NOT_FOUND
        peer.request(Opcode.CAPABILITY_PRESENT, CapabilityPresent(shared.token(Permission.REVOKE)))
        assert peer.request(Opcode.LEASE_REVOKE, LeaseRevoke(lease_id, "by token")).outcome == 0


@pytest.mark.parametrize(
    ("permissions", "lease_id", "status"),
    [
        (0x200, None, Status.INVALID_REQUEST),
        (0, None, Status.DENIED),
        (Permission.REVOKE, None, Status.DENIED),
        (Permission.LEASE_ALLOC, NODE_LEASE, Status.DENIED),
        (Permission.MEM_READ, NODE_LEASE, Status.INVALID_REQUEST),
        (Permission.MEM_READ, 0xDEAD, Status.NOT_FOUND),
    ],
)
def test_what_a_tenant_can_not_issue(daemon: Daemon, permissions: int, lease_id: int | None, status: Status) -> None:
    with RawPeer(daemon.tcp_address).hello() as peer:
        grant = peer.acquire()
        wanted = CapabilityIssue(grant.lease_id if lease_id is None else lease_id, permissions, b"", 1000, 0)
        assert peer.refused(Opcode.CAPABILITY_ISSUE, wanted).status is status
        peer.free(grant.lease_id)


def test_an_operator_can_not_share_a_tenants_session(daemon: Daemon) -> None:
    with RawPeer(daemon.tcp_address).hello() as tenant, RawPeer(daemon.address).hello() as operator:
        grant = tenant.acquire()
        shared = CapabilityIssue(grant.lease_id, Permission.MEM_READ, b"", 1000, 0)
        assert operator.refused(Opcode.CAPABILITY_ISSUE, shared).status is Status.NOT_FOUND
        revoking = CapabilityIssue(grant.lease_id, Permission.REVOKE, b"", 1000, 0)
        assert isinstance(operator.request(Opcode.CAPABILITY_ISSUE, revoking), CapabilityGrant)
        tenant.free(grant.lease_id)


def test_a_daemon_that_demands_tokens(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(tcp=True, config='require_token = ["alloc", "renew", "attach"]\n')

    def token(operator: RawPeer, lease_id: int, permission: Permission) -> CapabilityPresent:
        wanted = CapabilityIssue(lease_id, permission, my_audience(daemon.tcp_address), 60_000, 0)
        return CapabilityPresent(operator.request(Opcode.CAPABILITY_ISSUE, wanted).token)

    with RawPeer(daemon.address).hello() as operator, RawPeer(daemon.tcp_address).hello() as tenant:
        operator.free(operator.acquire().lease_id)
        assert "LEASE_ALLOC" in tenant.refused(Opcode.LEASE_ALLOC, lease_alloc()).message
        tenant.request(Opcode.CAPABILITY_PRESENT, token(operator, NODE_LEASE, Permission.LEASE_ALLOC))
        lease_id = tenant.acquire().lease_id
        renew = LeaseRenew(lease_id, 60_000)
        assert "LEASE_RENEW" in tenant.refused(Opcode.LEASE_RENEW, renew).message
        own = CapabilityIssue(lease_id, Permission.LEASE_RENEW, b"", 60_000, 0)
        assert tenant.refused(Opcode.CAPABILITY_ISSUE, own).status is Status.DENIED
        tenant.request(Opcode.CAPABILITY_PRESENT, token(operator, lease_id, Permission.LEASE_RENEW))
        assert tenant.request(Opcode.LEASE_RENEW, renew).generation == 2
        assert tenant.refused(Opcode.LEASE_RENEW, renew).status is Status.DENIED
        own = CapabilityIssue(lease_id, Permission.MEM_READ, b"", 60_000, 0)
        grant = tenant.request(Opcode.CAPABILITY_ISSUE, own)
        with RawPeer(daemon.tcp_address).hello() as session:
            refused = session.attach(lease_id)
            assert isinstance(refused, Failure)
            assert refused.status is Status.DENIED
            attach = Attach((Tlv(AttachOption.TOKEN, grant.token),))
            assert isinstance(session.ask(Opcode.ATTACH, attach, lease_id), AttachReply)
        tenant.free(lease_id)


@pytest.mark.exhaustive
def test_keys_on_disk_outlive_the_daemon(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    key_file = tmp_path / "token.key"
    audiences = []
    for _ in range(2):
        daemon = start_daemon(tcp=True, config=f'token_key_file = "{key_file}"\n')
        audiences.append(my_audience(daemon.tcp_address))
    assert audiences[0] == audiences[1] != my_audience(daemon.address)


def test_a_guest_that_is_gone(shared: Shared) -> None:
    with shared.guest() as peer:
        shared.attach(peer, shared.token(SESSION_PERMISSIONS))
    wait_until(lambda: shared.session.sync() is None, "the session goes on")  # type: ignore[func-returns-value]
    check_main_job(shared.session)


def test_a_write_that_a_token_does_not_permit_is_told_when_the_block_is_left(shared: Shared) -> None:
    grant = shared.lease.issue(Permission.MEM_READ)
    shared.session.close()
    with pytest.raises(Denied, match="does not permit"), GpuSession.attach(grant, shared.lease.address) as session:
        session.mem_write(session.buffer(shared.handle, len(TEXT)), 0, b"x")


@pytest.mark.parametrize("is_async", [False, True])
def test_a_guest_that_leaves_waits_for_no_kernel_and_takes_no_failure_of_the_owner_s(
    shared: Shared, is_async: bool
) -> None:
    grants = [shared.lease.issue(Permission.MEM_WRITE) for _ in range(2)]
    module = shared.session.module_load(FAULTS)
    buffer = shared.session.mem_alloc(4)

    def leaves(owners: Callable[[], object]) -> None:
        grant, address = grants.pop(), shared.lease.address
        if not is_async:
            with GpuSession.attach(grant, address) as session:
                session.mem_write(session.buffer(shared.handle, len(TEXT)), 0, b"x")
                kept = session.mem_alloc(4)  # Its reply shows that the write is complete before the owner continues.
                owners()
                assert kept.is_alive
            return

        async def main() -> None:
            async with aio.GpuSession.attach(grant, address) as session:
                await session.mem_write(session.buffer(shared.handle, len(TEXT)), 0, b"x")
                kept = await session.mem_alloc(4)
                owners()
                assert kept.is_alive

        asyncio.run(main())

    def faults() -> None:
        before = shared.lease.query()["operations"]
        start_stray_store(shared.session, module, buffer)
        wait_until(lambda: shared.lease.query()["operations"] > before, "the owner's launch was taken")

    leaves(faults)
    with pytest.raises(SyncFailed):
        shared.session.sync()
    leaves(lambda: shared.session.launch(module, "endless", [1], [1], KernelArgs().push_buffer(buffer)))
    assert shared.lease.is_alive, "it was not waited for until the lease's end"
    shared.lease.free()


def test_a_guest_that_leaves_is_told_of_its_own_requests(shared: Shared) -> None:
    def leaves(handle: int) -> None:
        with GpuSession.attach(shared.lease.issue(Permission.MEM_WRITE), shared.lease.address) as session:
            session.mem_write(session.buffer(handle, len(TEXT)), 0, b"x")

    with pytest.raises(InvalidHandle, match="earlier MEM_WRITE"):
        leaves(shared.handle + 1)
    shared.session.sync()
    shared.session.mem_write(shared.session.buffer(shared.handle + 1, 4), 0, b"own")
    leaves(shared.handle)  # The owner's failed request keeps none of the guest's from being done.
    with pytest.raises(InvalidHandle):
        shared.session.sync()
    assert shared.session.mem_read(shared.session.buffer(shared.handle, len(TEXT)), 0, 1) == b"x"


def test_a_lease_that_ended(shared: Shared) -> None:
    grant = shared.lease.issue(Permission.MEM_READ, shared.audience)
    shared.lease.free()
    assert "(token: no such lease)" in shared.refused(grant.token).message
    with pytest.raises(LeaseFreed):
        shared.lease.issue(Permission.MEM_READ)
