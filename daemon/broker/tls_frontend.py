"""How remote tenants reach the broker: the TLS acceptor process, its listening sockets, and its relays.

The acceptor completes TLS handshakes and starts one relay process for each remote connection. It then sends the broker
the relay's socket and the names in the peer's certificate. The broker holds the listening sockets, so that they outlive
an acceptor that dies, but never reads from them.
"""

import asyncio
import contextlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, assert_never

from gpulease.daemon.broker.listeners import bound_at, cannot_listen
from gpulease.daemon.broker.peer import Peer
from gpulease.daemon.contract.messages import Ready
from gpulease.daemon.host.ipc import ChannelClosed
from gpulease.daemon.host.processes import started_ticks
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.rate_limit import RateLimitedLog
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.record.journal import Journal, RelayRow
from gpulease.daemon.remote.node_identity import IdentityFiles, NoTenant, tenant_named
from gpulease.daemon.remote.remote_messages import (
    FROM_ACCEPTOR,
    FromAcceptor,
    LeftOverRelay,
    Listen,
    RelayArrived,
    RelayBegan,
    RelayLeft,
)
from gpulease.daemon.remote.tls_settings import TlsSettings
from gpulease.daemon.workers.helper_process import ChildKind, ChildProcess, reap_later
from gpulease.protocol.address import Address, TlsAddress
from gpulease.protocol.counts import counted
from gpulease.protocol.failures import Failure
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.opcodes import Status

SEND_RETRY_S: Final = 0.01
"""Pause before a message is sent again to a new acceptor with a full channel."""

WIPING_TUNABLES: Final = "glibc.malloc.perturb=165:glibc.malloc.tcache_count=0"
"""Makes the C library of the acceptor and its relays overwrite memory when it is freed. OpenSSL overwrites a private
key that it frees, but not the buffer from which it read the key. Without the second setting the first has no effect
on small blocks (glibc manual, "Memory Allocation Tunables")."""


@dataclass(frozen=True, slots=True)
class _Relay:
    """A relay: its peer's tenant, and the serial number of the peer's certificate in hexadecimal."""

    tenant: str
    serial: str
    started_ticks: int


_UNKNOWN: Final = Peer("", is_operator=False, is_known=False, is_relayed=True)

MakeConnection = Callable[[Peer, Failure | None], asyncio.BaseProtocol]
"""Makes a control connection of that peer. With a failure, the connection reports it and closes."""


class TlsFrontend:
    """The TLS acceptor, its listening sockets, and the live relays.

    Args:
        tenants: The tenant of each name that a certificate may have.

    Attributes:
        bound: The descriptors of the sockets made here, each with its address as the settings have it.
    """

    def __init__(
        self,
        settings: TlsSettings,
        tenants: Mapping[str, str],
        make_connection: MakeConnection,
        journal: Journal,
    ) -> None:
        self._settings = settings
        self._journal = journal
        self._kept_relays = journal.relays
        self._tenants = tenants
        self._make_connection = make_connection
        self._listeners: list[socket.socket] = []
        self.bound: list[tuple[Address, int]] = []
        acceptor = _acceptor_kind(settings)
        self._acceptor = ChildProcess(acceptor, self._begin, self._on_message, self._adopt_relays)
        # Relays by their process id.
        self._relays: dict[int, _Relay] = {}
        self._by_tenant: Counter[str] = Counter()
        # Relays with a peer that is not known yet.
        self._unidentified: set[int] = set()
        # Relays that are reaped here, not by an acceptor.
        self._adopted: set[int] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._refusal_log = RateLimitedLog(LogEvent.STRANGER_REFUSED)

    async def start(self) -> None:
        """Start the acceptor and wait until it has read its files. Raises CannotListen."""
        # Do this first, so that the relays of an earlier daemon count against their tenants' limits from the first
        # connection on.
        self._take_over_relays()
        await self._acceptor.start()

    async def listen(self, address: TlsAddress, sockets: Sequence[socket.socket] = ()) -> TlsAddress:
        """Listen on one more address. Returns it with the port that the kernel chose. Raises CannotListen.

        Args:
            address: Port 0 means any free port.
            sockets: Sockets that listen there already.
        """
        for listener in sockets:
            self._listeners.append(listener)
            self._send_listener(listener)
        if sockets:
            return TlsAddress(address.host, int(sockets[0].getsockname()[1]))
        loop = asyncio.get_running_loop()
        port = address.port
        try:
            infos = await loop.getaddrinfo(address.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            # All addresses of a name get the same port, even if the kernel chooses it.
            for family, sockaddr in sorted({(entry[0], entry[4]) for entry in infos}):
                listener = bound_at(family, (sockaddr[0], port, *sockaddr[2:]))
                port = int(listener.getsockname()[1])
                self._listeners.append(listener)
                self.bound.append((address, listener.fileno()))
                self._send_listener(listener)
        except OSError as error:
            raise cannot_listen(f"listen on {address}", error, "gpulease-tls.socket") from None
        return TlsAddress(address.host, port)

    def set_tenants(self, tenants: Mapping[str, str]) -> None:
        """Use another mapping of names to tenants for new connections."""
        self._tenants = tenants

    async def stop(self) -> None:
        """Stop the acceptor. Relays live for as long as their connections."""
        for task in list(self._tasks):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._acceptor.stop()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    async def _begin(self) -> None:
        """Give a new acceptor the listening sockets and its predecessor's relays."""
        await self._acceptor.expect(Ready)
        for listener in self._listeners:
            self._send_listener(listener)
        for pid in list(self._relays):
            await self._send_relay(pid)

    def _send_listener(self, listener: socket.socket) -> None:
        # If the acceptor is gone, the next one gets every listener.
        with contextlib.suppress(ChannelClosed):
            self._acceptor.send(Listen(), (listener.fileno(),))

    async def _send_relay(self, pid: int) -> None:
        """Make a new acceptor responsible for an earlier one's relay.

        The acceptor ends the relay once the certificate is revoked.
        """
        while (relay := self._relays.get(pid)) is not None and self._acceptor.is_running:
            try:
                pidfd = os.pidfd_open(pid)
            except OSError as error:
                log_event(LogEvent.RELAY_NOT_WATCHED, relay_pid=pid, reason=error.strerror)
                return
            try:
                # If the relay has been reaped, its process id may belong to another process by now.
                if started_ticks(pid) == relay.started_ticks:
                    self._acceptor.send(LeftOverRelay(relay.serial), (pidfd,))
                return
            except BlockingIOError:
                await asyncio.sleep(SEND_RETRY_S)
            finally:
                os.close(pidfd)

    def _take_over_relays(self) -> None:
        """Count the relays of an earlier daemon for their tenants, and end each when its certificate ends."""
        relays, self._kept_relays = self._kept_relays, ()
        for inherited in relays:
            # Compare the start time as well, because the process id could belong to another process by now.
            if inherited.started_ticks == started_ticks(inherited.pid):
                self._add(inherited.pid, _Relay(inherited.tenant, inherited.serial, inherited.started_ticks))
                self._adopt(inherited.pid)
            else:
                self._journal.forget_relay(inherited.pid)

    def _add(self, pid: int, relay: _Relay) -> None:
        self._unidentified.discard(pid)
        self._relays[pid] = relay
        self._by_tenant[relay.tenant] += 1

    def _adopt_relays(self) -> None:
        for pid in (*self._relays, *self._unidentified):
            self._adopt(pid)

    def _adopt(self, pid: int) -> None:
        # Watch each relay only once, even if several acceptors die during its life, because each watch takes a
        # descriptor.
        if pid not in self._adopted:
            self._adopted.add(pid)
            reap_later(pid, self._on_relay_left)

    # --- messages of the acceptor ---

    def _on_message(self, message: FromAcceptor, fds: list[int]) -> None:
        match message:
            case RelayBegan():
                if len(self._unidentified) < self._settings.max_connections:
                    self._unidentified.add(message.pid)
            case RelayArrived():
                # A missing descriptor means that this process had none left. Then the relay ends with its socket.
                if len(fds) == 1 and message.pid not in self._relays:
                    # The caller closes the descriptors that are left in the list, even if this is not a socket.
                    sock = socket.socket(fileno=fds[0])
                    fds.clear()
                    try:
                        self._on_relay_arrived(message, sock)
                    except BaseException:
                        # Close the socket, which ends the relay and its peer's connection: no other answer will come.
                        sock.close()
                        raise
            case RelayLeft():
                self._on_relay_left(message.pid)
            case _:
                assert_never(message)

    def _on_relay_arrived(self, arrival: RelayArrived, sock: socket.socket) -> None:
        # Connect even a peer without a valid name: it is sent the reason, and then the connection ends.
        peer, refusal = self._identify(arrival.names)
        relay = _Relay(peer.tenant, arrival.serial, started_ticks(arrival.pid))
        self._add(arrival.pid, relay)
        # Record the relay in the journal, so that the next daemon can count and end it as well.
        if refusal is None:
            self._journal.remember_relay(RelayRow(arrival.pid, relay.started_ticks, relay.tenant, relay.serial))
        log_event(
            LogEvent.RELAY_ARRIVED, relay_pid=arrival.pid, tenant=peer.tenant, peer=arrival.peer, serial=arrival.serial
        )
        if refusal is not None:
            self._refusal_log.add(f"{peer.tenant or 'unknown'} from {arrival.peer}", refusal.message)
        sock.setblocking(False)
        task = asyncio.get_running_loop().create_task(self._connect(sock, peer, refusal))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _identify(self, names: Sequence[str]) -> tuple[Peer, Failure | None]:
        try:
            tenant = tenant_named(names, self._tenants)
        except NoTenant as error:
            hint = "Ask the operator of the node for a certificate in your name."
            return _UNKNOWN, Failure(Status.DENIED, str(error), hint=hint)
        is_operator = tenant in self._settings.operators
        most = self._settings.max_connections_per_tenant
        peer = Peer(tenant, is_operator=is_operator, is_known=True, is_relayed=True)
        # Count by tenant and not by address: all of a tenant's hosts share its limit.
        if self._by_tenant[tenant] >= most:
            reason = f"tenant {tenant} has {counted(most, 'TLS connection')} open, the maximum for one tenant"
            return peer, Failure(
                Status.BUSY, reason, hint="Close connections that you do not need, or try again later."
            )
        return peer, None

    async def _connect(self, sock: socket.socket, peer: Peer, refusal: Failure | None) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: self._make_connection(peer, refusal), sock)
        except BaseException:
            sock.close()
            raise

    def _on_relay_left(self, pid: int) -> None:
        self._unidentified.discard(pid)
        self._adopted.discard(pid)
        # The acceptor or a pidfd reports this, perhaps both; only the first report counts.
        relay = self._relays.pop(pid, None)
        if relay is None:
            return
        self._journal.forget_relay(pid)
        tenant = relay.tenant
        self._by_tenant[tenant] -= 1
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]


def _acceptor_kind(settings: TlsSettings) -> ChildKind:
    most = (settings.max_connections, settings.max_connections_per_tenant)
    return ChildKind(
        name="the gate for remote tenants",
        module="gpulease.daemon.remote",
        sends=FROM_ACCEPTOR,
        broken="no remote tenant could connect",
        died=LogEvent.GATE_DIED,
        hung=LogEvent.GATE_HUNG,
        not_started=LogEvent.GATE_NOT_STARTED,
        back=LogEvent.GATE_BACK,
        arguments=[*map(str, most), *IdentityFiles.of(settings).to_arguments()],
        environment={"GLIBC_TUNABLES": WIPING_TUNABLES},
        passes_descriptors=True,
    )
