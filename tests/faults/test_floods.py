"""More connections than the daemon accepts: each further one gets a reason, and those that are open are served."""

import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from gpulease.client import Busy, GpuSession
from gpulease.client.sync.driver import ask
from gpulease.protocol import Connection, Goodbye, Opcode, Role, Status
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.messages import Ping
from helpers.daemon import Daemon, lent, running
from helpers.kernels import Neighbour, check_main_job
from helpers.raw_peer import RawPeer, connect
from helpers.waiting import wait_until

pytestmark = pytest.mark.exhaustive

LIMIT = 20
OPERATORS = 32
MANY = 3000
TEN_THOUSAND = 10_000
SMALL = f"max_connections = {LIMIT}\nmax_connections_per_tenant = {LIMIT}\n"


@pytest.fixture
def files_enough() -> Iterator[None]:
    """Raise this process's soft limit of open files. Skips the test if the hard limit is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = TEN_THOUSAND + 1000
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"the hard limit of open files is {hard}, this needs {wanted}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def goodbye_on(sock: socket.socket) -> Goodbye:
    """Return the goodbye that the daemon sends before it closes the connection. Fails unless it does both."""
    connection = Connection(Role.CLIENT, max_payload_bytes=MAX_PAYLOAD_BYTES)
    while data := sock.recv(1 << 16):
        connection.receive_data(data)
    event = connection.next_event()
    assert isinstance(event, Goodbye), event
    return event


@pytest.fixture(scope="module")
def shared_small() -> Iterator[Daemon]:
    with running(Daemon(tcp=True, config=SMALL)) as daemon:
        yield daemon


@pytest.fixture
def daemon(shared_small: Daemon) -> Iterator[Daemon]:
    """Yield a daemon with few connections, which are all closed afterwards."""
    yield from lent(shared_small)


def test_one_too_many(daemon: Daemon) -> None:
    with ExitStack() as stack:
        inside = [stack.enter_context(RawPeer(daemon.tcp_address)).hello() for _ in range(LIMIT)]
        with RawPeer(daemon.tcp_address) as late:
            failure = late.goodbye()
            assert failure.status is Status.BUSY
            assert str(LIMIT) in failure.message
            assert failure.hint
        with pytest.raises(Busy, match=str(LIMIT)):
            ask(Opcode.PING, Ping(1), daemon.tcp_address)
        for peer in inside:
            assert peer.request(Opcode.PING, Ping(2)) == Ping(2)
        # An operator can still connect, to get reports and to revoke leases.
        assert daemon.available_bytes() == 6 << 30
        inside.pop().sock.close()
        wait_until(lambda: _is_served(daemon), "a place is free for the next")


def _is_served(daemon: Daemon) -> bool:
    try:
        return bool(ask(Opcode.PING, Ping(3), daemon.tcp_address) == Ping(3))
    except Busy:
        return False


def test_one_tenant_can_not_use_up_all_connections(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(tcp=True, config="max_connections = 40\nmax_connections_per_tenant = 4\n")
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(RawPeer(daemon.tcp_address)).hello()
        with RawPeer(daemon.tcp_address) as late:
            assert "tenant tcp has 4 control connections" in late.goodbye().message
        with daemon.builder().acquire() as lease, GpuSession(lease) as session:
            check_main_job(session)


def test_operators_are_bounded_too(daemon: Daemon) -> None:
    with ExitStack() as stack:
        for _ in range(LIMIT + OPERATORS):
            stack.enter_context(RawPeer(daemon.address)).hello()
        with RawPeer(daemon.address) as late:
            assert late.goodbye().status is Status.BUSY


def test_a_flood_past_the_limit(daemon: Daemon) -> None:
    files = len(daemon.open_files())
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        neighbour = Neighbour(session)
        with ExitStack() as stack:
            # One place is used by the tenant of the lease.
            for _ in range(LIMIT - 1):
                stack.enter_context(RawPeer(daemon.tcp_address)).hello()
            for number in range(MANY):
                with connect(daemon.tcp_address) as sock:
                    assert goodbye_on(sock).failure.status is Status.BUSY
                if number % 100 == 0:
                    neighbour.check()
        # Connections that were open still work: the lease's own, and its session's.
        lease.renew(60)
        neighbour.check()
    daemon.check_idle(files)


def test_ten_thousand_idle_connections_at_once(start_daemon: Callable[..., Daemon], files_enough: None) -> None:
    daemon = start_daemon(tcp=True, config=SMALL)
    files = len(daemon.open_files())
    with daemon.builder().acquire() as lease, GpuSession(lease) as session:
        neighbour = Neighbour(session)
        with ExitStack() as stack:
            # These have completed HELLO, so none of them is closed while the others connect, however long that takes.
            inside = [stack.enter_context(RawPeer(daemon.tcp_address)).hello() for _ in range(LIMIT - 1)]
            socks = []
            for number in range(TEN_THOUSAND):
                socks.append(stack.enter_context(connect(daemon.tcp_address)))
                if number % 500 == 0:
                    neighbour.check()
            assert {goodbye_on(sock).failure.status for sock in socks} == {Status.BUSY}
            neighbour.check()
            # A lease takes six descriptors: its worker's channel, its process, two pages, and two for the session's
            # region words: a mapping and a read-only descriptor. Its connection is one of those that were open.
            assert len(daemon.open_files()) <= files + LIMIT + 6
            inside.pop().sock.close()
            wait_until(lambda: _is_served(daemon), "a place is free for the next")
            with daemon.builder().acquire() as another, GpuSession(another) as late:
                check_main_job(late)
    daemon.check_idle(files)


def test_sessions_do_not_count(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon(tcp=True, config="max_connections = 4\nmax_connections_per_tenant = 4\n")
    with RawPeer(daemon.tcp_address).hello() as owner, ExitStack() as stack:
        ids = [owner.acquire().lease_id for _ in range(12)]
        for ident in ids:
            peer = stack.enter_context(RawPeer(daemon.tcp_address)).hello()
            peer.attach(ident)
            assert peer.request(Opcode.PING, Ping(1), ident) == Ping(1)
        for ident in ids:
            owner.free(ident)
