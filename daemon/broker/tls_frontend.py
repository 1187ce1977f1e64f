"""Where remote tenants come in: the gate as the broker sees it, and whose connection each relay's socket is.

The broker holds the listening sockets, so that they outlive a gate that dies; it never reads from one.
"""

import asyncio
import contextlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpulease.daemon.broker.listeners import bound_at, cannot_listen
from gpulease.daemon.broker.peer import Peer
from gpulease.daemon.host.ipc import ChannelClosed
from gpulease.daemon.host.processes import started_ticks
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.rate_limit import RateLimitedLog
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.record.journal import Journal, KeptRelay
from gpulease.daemon.remote.identity import IdentityFiles, NoTenant, tenant_named
from gpulease.daemon.remote.relay import Arrival, is_pid
from gpulease.daemon.remote.settings import TlsSettings
from gpulease.daemon.workers.child_process import ChildKind, ChildProcess, Timeouts, reap_later
from gpulease.protocol.address import Address, TlsAddress
from gpulease.protocol.failures import Failure
from gpulease.protocol.opcodes import Status

GATE_READS_S: Final = 0.01
"""For a new gate to take some of what it is told, where there is no room for more."""

OVERWRITE_WHAT_IS_FREED: Final = "glibc.malloc.perturb=165:glibc.malloc.tcache_count=0"
"""For the C library of the gate and its relays: OpenSSL overwrites a private key that it frees, but not what it read it
from. The second makes the first true of small pieces too (glibc manual, "Memory Allocation Tunables")."""


@dataclass(frozen=True, slots=True)
class _Relay:
    """One relay: whose connection it is, and the serial number of the certificate, in hexadecimal."""

    tenant: str
    serial: str
    started_ticks: int


_UNKNOWN: Final = Peer("", is_operator=False, is_known=False, is_relayed=True)

MakeConnection = Callable[[Peer, Failure | None], asyncio.BaseProtocol]
"""A control connection of that peer; with a failure, one that says it and closes."""


class TlsFrontend:
    """The gate, its listening sockets, and the relays that live.

    Attributes:
        bound: The descriptors of the sockets that were made here, each with its address as it was asked for.
    """

    def __init__(
        self,
        settings: TlsSettings,
        tenants: Mapping[str, str],
        make_connection: MakeConnection,
        journal: Journal,
        patience: Timeouts | None = None,
    ) -> None:
        self._settings = settings
        self._journal = journal
        self._left_by_earlier = journal.relays
        self._tenants = tenants
        self._make_connection = make_connection
        self._listeners: list[socket.socket] = []
        self.bound: list[tuple[Address, int]] = []
        self._gate = ChildProcess(_gate_of(settings), self._begin, self._take, self._adopt_relays, patience)
        # By process id.
        self._relays: dict[int, _Relay] = {}
        self._by_tenant: Counter[str] = Counter()
        # Those whose peer is not known yet.
        self._unknown: set[int] = set()
        # Those that are reaped here, not by a gate.
        self._adopted: set[int] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._complaints = RateLimitedLog(LogEvent.STRANGER_REFUSED)

    async def start(self) -> None:
        """Start the gate and wait until it has read its files. Raises CannotListen."""
        self._take_over()
        await self._gate.start()

    async def listen(self, address: TlsAddress, given: Sequence[socket.socket] = ()) -> TlsAddress:
        """Listen on one more address; returns it with the port the kernel chose. Raises CannotListen.

        `given`: sockets that listen there already.
        """
        for listener in given:
            self._listeners.append(listener)
            self._pass_on(listener)
        if given:
            return TlsAddress(address.host, int(given[0].getsockname()[1]))
        loop = asyncio.get_running_loop()
        port = address.port
        try:
            found = await loop.getaddrinfo(address.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, where in sorted({(entry[0], entry[4]) for entry in found}):
                # All of a name's addresses have one port, also where the kernel chooses it.
                listener = bound_at(family, (where[0], port, *where[2:]))
                port = int(listener.getsockname()[1])
                self._listeners.append(listener)
                self.bound.append((address, listener.fileno()))
                self._pass_on(listener)
        except OSError as error:
            raise cannot_listen(f"listen on {address}", error, "gpulease-tls.socket") from None
        return TlsAddress(address.host, port)

    def rename(self, tenants: Mapping[str, str]) -> None:
        """Who connects from now on is named by these."""
        self._tenants = tenants

    async def stop(self) -> None:
        """Let nobody in any more. Relays live for as long as their connections."""
        for task in list(self._tasks):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._gate.stop()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    async def _begin(self) -> None:
        """Give a new gate what the one before had."""
        await self._gate.expect("ready")
        for listener in self._listeners:
            self._pass_on(listener)
        for pid in list(self._relays):
            await self._leave_to_gate(pid)

    def _pass_on(self, listener: socket.socket) -> None:
        # The gate that follows one that is gone is given them all.
        with contextlib.suppress(ChannelClosed):
            self._gate.send({"op": "listen"}, (listener.fileno(),))

    async def _leave_to_gate(self, pid: int) -> None:
        """Have a new gate end an earlier one's relay, too, once its certificate is revoked."""
        while (relay := self._relays.get(pid)) is not None and self._gate.is_running:
            try:
                pidfd = os.pidfd_open(pid)
            except OSError as error:
                log_event(LogEvent.RELAY_NOT_WATCHED, relay_pid=pid, reason=error.strerror)
                return
            try:
                # If somebody has waited for it already, the number may be anybody's.
                if started_ticks(pid) == relay.started_ticks:
                    self._gate.send({"op": "left_over", "serial": relay.serial}, (pidfd,))
                return
            except BlockingIOError:
                await asyncio.sleep(GATE_READS_S)
            finally:
                os.close(pidfd)

    def _take_over(self) -> None:
        """Relays that an earlier daemon left count as their tenants', and end with their certificates as others do."""
        left, self._left_by_earlier = self._left_by_earlier, ()
        for kept in left:
            if kept.started_ticks == started_ticks(kept.pid):
                self._enter(kept.pid, _Relay(kept.tenant, kept.serial, kept.started_ticks))
                self._adopt(kept.pid)
            else:
                self._journal.forget_relay(kept.pid)

    def _enter(self, pid: int, relay: _Relay) -> None:
        self._unknown.discard(pid)
        self._relays[pid] = relay
        self._by_tenant[relay.tenant] += 1

    def _adopt_relays(self) -> None:
        for pid in (*self._relays, *self._unknown):
            self._adopt(pid)

    def _adopt(self, pid: int) -> None:
        # Once, however many gates die while it lives: each time would take a descriptor.
        if pid not in self._adopted:
            self._adopted.add(pid)
            reap_later(pid, self._left)

    # --- what the gate says ---

    def _take(self, message: dict[str, Any], fds: list[int]) -> None:
        match message:
            case {"op": "began", "pid": pid} if is_pid(pid) and len(self._unknown) < self._settings.max_connections:
                self._unknown.add(pid)
            case {"op": "arrived"} if len(fds) == 1:
                arrival = Arrival.from_message(message)
                if arrival is not None and arrival.pid not in self._relays:
                    self._arrived(arrival, socket.socket(fileno=fds.pop()))
            case {"op": "left", "pid": pid} if is_pid(pid):
                self._left(pid)

    def _arrived(self, one: Arrival, sock: socket.socket) -> None:
        peer, refusal = self._look_at(one.names)
        relay = _Relay(peer.tenant, one.serial, started_ticks(one.pid))
        self._enter(one.pid, relay)
        if refusal is None:
            self._journal.remember_relay(KeptRelay(one.pid, relay.started_ticks, relay.tenant, relay.serial))
        log_event(LogEvent.RELAY_ARRIVED, relay_pid=one.pid, tenant=peer.tenant, peer=one.peer, serial=one.serial)
        if refusal is not None:
            self._complaints.add(f"{peer.tenant or 'nobody'} from {one.peer}", refusal.message)
        sock.setblocking(False)
        task = asyncio.get_running_loop().create_task(self._connect(sock, peer, refusal))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _look_at(self, names: Sequence[str]) -> tuple[Peer, Failure | None]:
        try:
            tenant = tenant_named(names, self._tenants)
        except NoTenant as error:
            hint = "Ask the operator of the node for a certificate in your name."
            return _UNKNOWN, Failure(Status.DENIED, str(error), hint=hint)
        is_operator = tenant in self._settings.operators
        most = self._settings.max_connections_per_tenant
        peer = Peer(tenant, is_operator=is_operator, is_known=True, is_relayed=True)
        if self._by_tenant[tenant] >= most:
            why = f"tenant {tenant} has {most} connections by TLS, the most one may have"
            return peer, Failure(Status.BUSY, why, hint="Close connections that are not needed, or try again later.")
        return peer, None

    async def _connect(self, sock: socket.socket, peer: Peer, refusal: Failure | None) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(lambda: self._make_connection(peer, refusal), sock)
        except BaseException:
            sock.close()
            raise

    def _left(self, pid: int) -> None:
        self._unknown.discard(pid)
        self._adopted.discard(pid)
        relay = self._relays.pop(pid, None)
        if relay is None:
            return
        self._journal.forget_relay(pid)
        tenant = relay.tenant
        self._by_tenant[tenant] -= 1
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]


def _gate_of(settings: TlsSettings) -> ChildKind:
    most = (settings.max_connections, settings.max_connections_per_tenant)
    return ChildKind(
        name="the gate for remote tenants",
        module="gpulease.daemon.remote",
        broken="no remote tenant could connect",
        died=LogEvent.GATE_DIED,
        hung=LogEvent.GATE_HUNG,
        not_started=LogEvent.GATE_NOT_STARTED,
        back=LogEvent.GATE_BACK,
        arguments=[*map(str, most), *IdentityFiles.of(settings).to_arguments()],
        environment={"GLIBC_TUNABLES": OVERWRITE_WHAT_IS_FREED},
        passes_descriptors=True,
    )
