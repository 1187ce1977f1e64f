"""A lease whose owner, this process's user on the Unix socket, shares it with another tenant over TCP."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from gpulease.client import Denied, GpuExclusivityClass, GpuLease, GpuSession, Permission, my_audience
from gpulease.protocol import Failure, Opcode
from gpulease.protocol.capabilities import SESSION_PERMISSIONS, AttachOption
from gpulease.protocol.messages import Attach, Empty, MemRead
from gpulease.protocol.primitives import Tlv
from helpers.daemon import SHORT_LEASES_S, Daemon
from helpers.raw_peer import RawPeer

T = TypeVar("T")

TEXT = b"shared between tenants.."


@dataclass
class Shared:
    """A lease with data in its memory, its owner's session, and the audience of tokens for another tenant."""

    daemon: Daemon
    lease: GpuLease
    session: GpuSession
    handle: int
    audience: bytes

    def token(self, permissions: Permission = Permission.MEM_READ, ttl_s: float = 60) -> bytes:
        return self.lease.issue(permissions, self.audience, ttl_s).token

    def short_guest(self, set_up: Callable[[GpuSession], T]) -> tuple[GpuSession, T]:
        """Return a guest's session with a token that soon expires, and the result of `set_up` with it.

        On a busy host the token may expire before that. Then a token with a longer life is tried.
        """
        for ttl_s in SHORT_LEASES_S:
            try:
                guest = GpuSession.attach(self.lease.issue(SESSION_PERMISSIONS, ttl_secs=ttl_s), self.daemon.address)
            except Denied:
                continue
            try:
                return guest, set_up(guest)
            except Denied:
                guest.close()
        raise AssertionError(f"{set_up} takes longer than {SHORT_LEASES_S[-1]:g} s")

    def guest(self) -> RawPeer:
        return RawPeer(self.daemon.tcp_address).hello()

    def attach(self, peer: RawPeer, token: bytes) -> object:
        peer.session_id = self.lease.lease_id
        return peer.ask(Opcode.ATTACH, Attach((Tlv(AttachOption.TOKEN, token),)), self.lease.lease_id)

    def refused(self, token: bytes) -> Failure:
        with self.guest() as peer:
            failure = self.attach(peer, token)
            assert isinstance(failure, Failure)
            assert peer.ask(Opcode.GET_INVENTORY, Empty()), "it is a control connection still"
            return failure

    def read(self, peer: RawPeer) -> object:
        return peer.ask(Opcode.MEM_READ, MemRead(self.handle, 0, len(TEXT)), self.lease.lease_id)


@contextmanager
def sharing(daemon: Daemon) -> Iterator[Shared]:
    wish = daemon.builder().exclusivity(GpuExclusivityClass.SHARED)
    with wish.acquire() as lease, GpuSession(lease) as session:
        buffer = session.mem_alloc(len(TEXT))
        session.mem_write(buffer, 0, TEXT)
        session.sync()  # So the end of the block does not wait for the write, however the lease ends.
        yield Shared(daemon, lease, session, buffer.handle, my_audience(daemon.tcp_address))
