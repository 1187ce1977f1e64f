"""A directory's connections: HELLO, PING, PLACE, FLEET_LIST and METRICS over Unix sockets, loopback TCP and TLS.

Limits apply to each peer's time and memory, and to the connections from one source. A source is an IP address or a
local user. A connection counts from its accept on, so that unfinished handshakes count too. Sources are served in turn,
however many connections each has.
"""

import asyncio
import ipaddress
import os
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from types import MappingProxyType
from typing import Any, Final

from gpulease.daemon.fleet.directory.directory_metrics import DirectoryMetrics
from gpulease.daemon.fleet.directory.fleet_watch import FleetWatch
from gpulease.daemon.host.cancellation import cancel_all
from gpulease.daemon.host.fair_queue import FairQueue
from gpulease.daemon.host.periodic_task import PeriodicTask
from gpulease.daemon.host.socket_activation import CannotListen
from gpulease.daemon.host.unix_place import BACKLOG, CHECK_INTERVAL_S, UnixPlace
from gpulease.daemon.host.version import AGENT
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.place_log import log_place_change, log_restoring_fault
from gpulease.daemon.log.rate_limit import RateLimitedLog
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.record.metrics.families import CONTENT_TYPE
from gpulease.daemon.remote.node_identity import BadIdentity, IdentityFiles, NoTenant, server_context, tenant_named
from gpulease.daemon.remote.tls_settings import OVER_TCP
from gpulease.protocol.address import Address, TcpAddress, TlsAddress, UnixAddress
from gpulease.protocol.connection import Connection, EndOfStream, Event, Rejected, Request, Role, StreamBroken
from gpulease.protocol.errors import LocalProtocolError
from gpulease.protocol.failures import Failure
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.limits import MAX_CONTROL_PAYLOAD_BYTES
from gpulease.protocol.messages import Body, HelloReply, Metrics
from gpulease.protocol.opcodes import Opcode, Status
from gpulease.protocol.peer_credentials import UCRED_BYTES, parse_ucred

MAX_CONNECTIONS: Final = 2048
"""Maximum number of open connections. Each has a descriptor and, with TLS, about 100 KiB. Tenants disconnect after one
reply."""

MAX_PER_SOURCE: Final = 256
"""Maximum number of open connections from one IP address or one local user."""

HANDSHAKE_TIMEOUT_S: Final = 5.0
"""Maximum seconds from a connection's accept to the end of the TLS handshake, which takes one round trip."""

HELLO_TIMEOUT_S: Final = 5.0
"""Maximum seconds from the end of the handshake to HELLO."""

STALL_TIMEOUT_S: Final = 5.0
"""Maximum seconds from the first byte of a frame to its last, and for a peer to read a whole answer."""

IDLE_TIMEOUT_S: Final = 30.0
"""Maximum seconds without a request. A tenant sends one request and disconnects."""

REQUESTS_PER_TURN: Final = 4
"""Maximum number of requests from one connection in one turn. The turn also ends when its time is used up."""

WRITE_BUFFER_BYTES: Final = 256 << 10
"""Number of unread answer bytes above which the directory stops reading from the peer. Longer answers are written in
parts of this size."""

READ_BUFFER_BYTES: Final = 4 << 10
"""Size of a connection's read buffer in bytes. Nearly every request is smaller."""

NO_DESCRIPTORS_PAUSE_S: Final = 0.1
"""Seconds before the next accept after the host ran out of descriptors."""

NO_TENANTS: Final[Mapping[str, str]] = MappingProxyType({})


class CannotServe(Exception):
    """A directory can't listen on an address. The text contains the reason and advice."""


@dataclass(frozen=True, slots=True)
class DirectoryPeer:
    """The peer of a connection. An operator sees all names, and any other peer the names of `tenant`."""

    tenant: str
    is_operator: bool = False


class DirectoryServer:
    """Accepts connections and serves them from a fleet's view.

    Args:
        fleet: The view to serve.
        files: This directory's certificate and key, and the CAs of tenants; None without TLS.
        operators: Tenants with operator rights on TLS connections.
        tenants: Tenants by names of certificates, as in the nodes' table `[tenant_of_certificate]`; empty without that
            table.

    Attributes:
        metrics: The directory's metrics.
    """

    def __init__(
        self,
        fleet: FleetWatch,
        files: IdentityFiles | None,
        operators: frozenset[str] = frozenset(),
        tenants: Mapping[str, str] = NO_TENANTS,
    ) -> None:
        """Read the directory's identity from `files`. Raises BadIdentity."""
        self._fleet = fleet
        self._files = files
        self._operators = operators
        self._tenants = tenants
        self._context = None if files is None else server_context(files)
        self._stamps = None if files is None else files.stamps()
        self._sources: Counter[Hashable] = Counter()
        self.metrics = DirectoryMetrics(fleet, lambda: self.connections)
        self._turns = FairQueue()
        self._refusals = RateLimitedLog(LogEvent.STRANGER_REFUSED)
        self._openings: set[asyncio.Task[None]] = set()
        self._accepting: dict[socket.socket, asyncio.Task[None]] = {}
        self._places: list[tuple[UnixPlace, socket.socket]] = []
        self._restoring = PeriodicTask(self._restore, CHECK_INTERVAL_S, log_restoring_fault)
        self._connections: set[DirectoryConnection] = set()

    @property
    def connections(self) -> int:
        """The number of open connections, those in a handshake included."""
        return self._sources.total()

    def listen(self, address: Address) -> Address:
        """Listen on an address. Returns it, with the kernel's choice of port for port 0. Raises CannotServe."""
        # Step 1: report every problem with the address before serving any connection.
        if isinstance(address, TlsAddress) and self._files is None:
            raise CannotServe(f"{address}: TLS needs --certificate, --key and --client-ca")
        try:
            sock, bound = (self._bind_unix(address), address) if isinstance(address, UnixAddress) else bound_at(address)
        except CannotListen as error:
            raise CannotServe(str(error)) from None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise CannotServe(f"can't listen on {address}: {reason}") from None
        # Step 2: accept from now on. The log line has the port that the kernel chose.
        self._serve(sock, bound)
        log_event(LogEvent.DIRECTORY_LISTENS, address=str(bound), version=AGENT)
        return bound

    async def close(self) -> None:
        await self._restoring.stop()
        # Stop accepting first, so that no connection opens while the others are closed.
        await cancel_all([*self._accepting.values(), *self._openings])
        for listener in self._accepting:
            listener.close()
        for place, _ in self._places:
            place.release()
        # Abort connections, so that a peer that reads slowly does not delay the stop.
        for connection in list(self._connections):
            connection.abort()

    def _bind_unix(self, address: UnixAddress) -> socket.socket:
        """Listen on a Unix socket from now on. Raises CannotListen or OSError."""
        # Any user with access to the folder may send requests. No reply contains a secret of a tenant.
        place = UnixPlace(address, 0o666, log_place_change)
        try:
            sock = place.bind()
        except BaseException:
            place.release()
            raise
        self._places.append((place, sock))
        self._restoring.start()
        return sock

    async def _restore(self) -> None:
        for number, (place, listener) in enumerate(self._places):
            # `restore` returns a socket only if the socket's file was removed, for example by a cleaner of /tmp.
            sock = place.restore()
            if sock is not None:
                self._serve(sock, place.address)
                self._places[number] = (place, sock)
                # Clients can't reach a socket without a file, so accept on the new one. Accepted connections continue.
                accepting = self._accepting.pop(listener)
                accepting.cancel()
                await asyncio.gather(accepting, return_exceptions=True)
                listener.close()

    def _serve(self, listener: socket.socket, address: Address) -> None:
        self._accepting[listener] = asyncio.get_running_loop().create_task(self._accept(listener, address))

    async def _accept(self, listener: socket.socket, address: Address) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            # The host has no descriptor left. The connection waits in the kernel. An accept would fail again at once.
            except OSError:
                await asyncio.sleep(NO_DESCRIPTORS_PAUSE_S)
                continue
            source = _source(sock)
            # Check the limits before any other work on the connection.
            if source is None or self.connections >= MAX_CONNECTIONS or self._sources[source] >= MAX_PER_SOURCE:
                self._refusals.add(str(source), "the directory has too many connections")
                sock.close()
                continue
            self._sources[source] += 1
            # Each handshake runs in a separate task, so that a stalled one delays no other.
            task = loop.create_task(self._open(sock, source, address))
            self._openings.add(task)
            task.add_done_callback(self._openings.discard)

    async def _open(self, sock: socket.socket, source: Hashable, address: Address) -> None:
        """Do the handshake and begin to serve. The connection counts toward its source's limit until it is closed."""
        released = False

        def release() -> None:
            nonlocal released
            if not released:
                released = True
                self._sources[source] -= 1
                if not self._sources[source]:
                    del self._sources[source]

        def connection() -> DirectoryConnection:
            turns = self._turns, source
            return DirectoryConnection(self._fleet, self.metrics, self._peer_of, turns, self._connections, release)

        is_tls = isinstance(address, TlsAddress)
        # From here on `release` is called exactly once: by the connection when it is closed, or by this function if no
        # connection is made.
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                connection,
                sock,
                ssl=self._current_context() if is_tls else None,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S if is_tls else None,
            )
        except (OSError, BadIdentity) as error:
            # ssl.SSLError is an OSError.
            self._refusals.add(str(source), str(error))
            sock.close()
            release()
        except BaseException:
            sock.close()
            release()
            raise

    def _current_context(self) -> ssl.SSLContext | None:
        """Return a TLS context with the files' current contents, which operators may renew while the directory runs."""
        if self._files is not None and (stamps := self._files.stamps()) != self._stamps:
            # If the new files are bad, log it once and use the old certificate, because a renewal may be half done.
            try:
                self._context, self._stamps = server_context(self._files), stamps
            except BadIdentity as error:
                log_event(LogEvent.SETTINGS_KEPT, reason=str(error))
                self._stamps = stamps
        return self._context

    def _peer_of(self, transport: asyncio.BaseTransport) -> DirectoryPeer:
        """Return the peer of a connection. Raises NoTenant."""
        certificate = transport.get_extra_info("peercert")
        sock = transport.get_extra_info("socket")
        # TLS: the certificate decides the tenant, as on a node.
        if certificate is not None:
            names = [f"{kind}:{value}" for kind, value in certificate.get("subjectAltName", ())]
            tenant = tenant_named(names, self._tenants)
            return DirectoryPeer(tenant, tenant in self._operators)
        # Unix socket: the kernel reports the user. Root and the directory's own user are operators.
        if sock.family == socket.AF_UNIX:
            uid = _uid(sock)
            return DirectoryPeer(f"uid:{uid}", uid in (0, os.geteuid()))
        # Plain TCP on loopback does not identify the user, so all such peers are one tenant.
        return DirectoryPeer(OVER_TCP)


class DirectoryConnection(asyncio.Protocol):
    """A connection to a directory.

    Args:
        fleet: The view to serve.
        metrics: The metrics that operators may read.
        peer_of: Returns the peer of a transport; raises NoTenant.
        turns: The queue of turns of all connections, and this connection's source in it.
        connections: All open connections, including this one.
        on_lost: Called once, when the connection is closed.
    """

    def __init__(
        self,
        fleet: FleetWatch,
        metrics: DirectoryMetrics,
        peer_of: Callable[[asyncio.BaseTransport], DirectoryPeer],
        turns: tuple[FairQueue, Hashable],
        connections: "set[DirectoryConnection]",
        on_lost: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._peer_of = peer_of
        self._turns, self._source = turns
        self._connections = connections
        self._on_lost = on_lost
        self._connection = Connection(
            Role.SERVER, max_payload_bytes=MAX_CONTROL_PAYLOAD_BYTES, buffer_bytes=READ_BUFFER_BYTES
        )
        self._transport: asyncio.Transport | None = None
        self._peer = DirectoryPeer("")
        self._deadline: asyncio.TimerHandle | None = None
        self._is_mid_frame = False
        self._is_queued = False
        self._has_greeted = False
        self._unsent = memoryview(b"")
        self._is_peer_slow = False
        self._is_answer_late = False

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Identify the peer, and wait for its HELLO."""
        self._transport = transport  # type: ignore[assignment]  # a stream's server makes no other
        self._connections.add(self)
        assert self._transport is not None
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        # Start the timer first. It also applies to a peer that is rejected below and does not read the reason.
        self._await(HELLO_TIMEOUT_S, f"no HELLO arrived within {HELLO_TIMEOUT_S:g} s")
        try:
            self._peer = self._peer_of(transport)
        except NoTenant as error:
            self._close_with(Failure(Status.DENIED, str(error), hint="Ask the fleet's operator for a certificate."))

    def data_received(self, data: bytes) -> None:
        self._connection.receive_data(data)
        self._enqueue()

    def eof_received(self) -> bool:
        """Close the connection, also if the peer still waits for an answer."""
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """Stop the timers, and free the connection's place."""
        self._transport = None
        self._unsent = memoryview(b"")
        self._connections.discard(self)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._on_lost()

    def pause_writing(self) -> None:
        """Stop reading from a peer that does not read. If it does not read the answer in time, close the connection."""
        self._is_peer_slow = True
        if self._transport is not None and not self._is_answer_late:
            self._is_answer_late = True
            self._transport.pause_reading()
            self._start(STALL_TIMEOUT_S, self.abort)

    def resume_writing(self) -> None:
        self._is_peer_slow = False
        # Write the next part of the answer, after which the transport may pause again at once.
        self._write_on()
        if self._is_peer_slow:
            return
        # The whole answer is written. Serve the requests that have already arrived.
        self._is_answer_late = False
        if self._transport is not None and not self._transport.is_closing():
            self._await_request()
            self._transport.resume_reading()
            self._enqueue()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # --- requests ---

    def _enqueue(self) -> None:
        if self._is_queued:
            return
        self._is_queued = True
        # If no other source waits, the queue calls `_serve_turn` at once.
        self._turns.enqueue(self._source, self._serve_turn)
        if self._is_queued and self._transport is not None:
            # The connection waits for its turn. Until then the peer's bytes stay in the kernel.
            self._transport.pause_reading()

    def _serve_turn(self) -> None:
        self._is_queued = False
        for _ in range(REQUESTS_PER_TURN):
            # Stop if the peer is gone, or if it must first read an answer.
            if self._transport is None or self._transport.is_closing() or self._is_peer_slow:
                return
            event = self._connection.next_event()
            if event is None:
                # All complete requests are served. An incomplete frame has a deadline.
                self._transport.resume_reading()
                self._await_more()
                return
            self._on_event(event)
            if self._turns.is_quantum_over:
                break
        # More requests may have arrived. Other sources are served before them.
        self._enqueue()

    def _on_event(self, event: Event) -> None:
        match event:
            case Request():
                self._answer(event, self._result(event))
                self._is_mid_frame = False
                self._await_request()
            # A malformed request with a readable id gets a failure, and the connection stays open.
            case Rejected() if not event.is_quiet and self._transport is not None:
                self._transport.write(self._connection.send_failure(event, event.failure))
            # The rest of the stream can't be read.
            case StreamBroken():
                self._close_with(event.failure)
            case EndOfStream():
                self.abort()
            case _:
                pass

    def _result(self, request: Request) -> Body | bytes | Failure:
        """Return the answer, which is a failure if a bug raises an exception."""
        try:
            return self._served(request)
        except Exception:
            return _faulty(request)

    def _served(self, request: Request) -> Body | bytes | Failure:
        """Return the reply's body, or shared bytes if many peers get the same reply."""
        body: Any = request.body
        match request.op:
            case Opcode.HELLO:
                self._has_greeted = True
                return HelloReply(0, AGENT, MAX_CONTROL_PAYLOAD_BYTES, ())
            case Opcode.PING:
                return body  # type: ignore[no-any-return]
            # The view is in memory, so no request waits for etcd.
            case Opcode.PLACE:
                return self._fleet.place(body, self._peer.tenant, is_operator=self._peer.is_operator)
            case Opcode.FLEET_LIST:
                return self._fleet.listing(self._peer.tenant, is_operator=self._peer.is_operator)
            case Opcode.METRICS if self._peer.is_operator:
                return Metrics(CONTENT_TYPE, self._metrics.text().decode())
            case Opcode.METRICS:
                return Failure(
                    Status.DENIED,
                    "METRICS is only for operators",
                    hint="Ask the fleet's operator to add you with --operator.",
                )
            case _:
                return Failure(
                    Status.UNSUPPORTED,
                    f"{request.op.name}: this is a fleet's directory, not a node",
                    hint="Write this address as fleet:ADDRESS, or use the address of a node (lease.address).",
                )

    def _answer(self, request: Request, result: Body | bytes | Failure) -> None:
        if self._transport is None:
            return
        if isinstance(result, bytes):
            # Peers share the listing's bytes. Write a header for this peer, and the body in parts as the peer reads it.
            self._transport.write(self._connection.send_reply_header(request, len(result)))
            self._unsent = memoryview(result)
            self._write_on()
            return
        try:
            if isinstance(result, Failure):
                frame = self._connection.send_failure(request, result)
            else:
                frame = self._connection.send_reply(request, result)
        except LocalProtocolError:
            frame = self._connection.send_failure(request, _faulty(request))
        self._transport.write(frame)

    def _write_on(self) -> None:
        """Write the rest of the answer until the transport pauses."""
        while self._unsent and not self._is_peer_slow and self._transport is not None:
            part, self._unsent = self._unsent[:WRITE_BUFFER_BYTES], self._unsent[WRITE_BUFFER_BYTES:]
            self._transport.write(part)

    def _await_request(self) -> None:
        self._await(IDLE_TIMEOUT_S, f"no request arrived within {IDLE_TIMEOUT_S:g} s")

    def _await_more(self) -> None:
        """Start the deadline of a frame that has begun. Further bytes do not extend it."""
        is_mid_frame = self._connection.reader.is_mid_frame
        if is_mid_frame and not self._is_mid_frame and self._has_greeted:
            self._await(STALL_TIMEOUT_S, f"the rest of a frame did not arrive within {STALL_TIMEOUT_S:g} s")
        self._is_mid_frame = is_mid_frame

    def _await(self, seconds: float, reason: str) -> None:
        if self._is_peer_slow:
            # The timer for the peer to read its answer is running.
            return
        self._start(seconds, self._close_with, Failure(Status.INVALID_REQUEST, reason))

    def _start(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = asyncio.get_running_loop().call_later(seconds, action, *arguments)

    def _close_with(self, failure: Failure) -> None:
        if self._transport is not None and not self._transport.is_closing():
            # Send the reason and close. The timer aborts the connection of a peer that does not read it.
            self._transport.write(self._connection.send_goodbye(failure))
            self._transport.close()
            self._start(STALL_TIMEOUT_S, self.abort)


def _faulty(request: Request) -> Failure:
    """Log the exception that is being handled, and return the failure for the peer."""
    log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing=f"answering {request.op.name}")
    return Failure(
        Status.INTERNAL, "the directory failed while handling this request", hint="Report it to the operator."
    )


def _source(sock: socket.socket) -> Hashable:
    """Return a connection's source, an IP address or a local user; None if the peer is already gone."""
    try:
        return _uid(sock) if sock.family == socket.AF_UNIX else sock.getpeername()[0]
    except OSError:
        return None


def _uid(sock: socket.socket) -> int:
    uid = parse_ucred(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED_BYTES)).uid
    return int(uid)


def bound_at(address: TcpAddress | TlsAddress) -> tuple[socket.socket, Address]:
    """Return a listening socket and its address. Raises OSError, or ValueError for a forbidden address."""
    addresses = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, sockaddr = addresses[0]
    if isinstance(address, TcpAddress) and not ipaddress.ip_address(sockaddr[0]).is_loopback:
        raise ValueError("an address of plain TCP must be on loopback: write tls:HOST:PORT")
    sock = socket.create_server((str(sockaddr[0]), int(sockaddr[1])), family=family, backlog=BACKLOG)
    sock.setblocking(False)
    return sock, type(address)(address.host, sock.getsockname()[1])
