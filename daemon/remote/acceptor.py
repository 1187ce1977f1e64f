"""The process that accepts remote tenants' connections, gives each to a relay, and reports it to the broker."""

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from typing import Any, Final, NoReturn, assert_never

from gpulease.daemon.contract.message_fields import MalformedMessage, Message, expect_message
from gpulease.daemon.contract.messages import LivenessPing, Pong
from gpulease.daemon.host.ipc import ChannelClosed, channel_pair, close_all, receive_message, send_message
from gpulease.daemon.host.processes import exit_text, reaped_children
from gpulease.daemon.host.unsolicited_fds import refuse_descriptors
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.rate_limit import RateLimitedLog
from gpulease.daemon.log.writer import log_event, stop_logging
from gpulease.daemon.remote.node_identity import BadIdentity, Identity, IdentityFiles
from gpulease.daemon.remote.pending_connections import (
    PendingConnection,
    PendingConnections,
    oldest_of_largest_source,
    oldest_of_smallest_source,
)
from gpulease.daemon.remote.relay import preload, run_relay
from gpulease.daemon.remote.remote_messages import (
    FROM_RELAY,
    TO_ACCEPTOR,
    FromRelay,
    LeftOverRelay,
    Listen,
    PeerRefused,
    PeerVerified,
    RelayArrived,
    RelayBegan,
    RelayLeft,
    TakeConnection,
    ToAcceptor,
)
from gpulease.protocol.counts import counted
from gpulease.protocol.fast_dataclass import dataclass

MAX_HANDSHAKES: Final = 32
"""Limit on the relays whose peer is not verified yet, so that peers that do not finish their handshakes can't take all
relays. An honest peer is unknown for one round trip."""

MIN_HANDSHAKE_S: Final = 0.5
"""Minimum time of each handshake, in seconds. Afterwards it may be ended if other connections wait."""

HANDSHAKE_CHECK_S: Final = 0.25
"""Seconds between two checks for handshakes to end, while other connections wait."""

INNER_BUFFER_BYTES: Final = 512 << 10
"""Limit on the bytes under way between a relay and the worker, in each direction. A peer that does not read can't hold
more of the host's memory. The kernel adds as many bytes for its own bookkeeping, and allows at most net.core.wmem_max
(socket(7)). If only one batch of the relay fitted, relay and worker would wait for each other in turn."""

SPARE_RELAYS: Final = 4
"""Number of relays that are kept ready for connections. A lease and its session take two connections; the other
relays are for tenants that connect at the same time. A connection that finds no ready relay waits for a fork. Each
relay takes 3 MiB of private memory."""

REVOKED_CHECK_S: Final = 1.0
"""Seconds between two searches for open connections with a revoked certificate."""

NO_DESCRIPTORS_PAUSE_S: Final = 0.1
"""Seconds until the next accept, after this process had no descriptor left for a connection."""

MAX_REFUSED_RELAYS: Final = 16
"""Limit on the relays of one certificate's names beyond the tenant's own limit. The broker refuses the connections of
these relays, each of which lives until its peer has read the refusal. The limit keeps a tenant from taking everybody's
relays with connections that are refused again and again."""

EXIT_BUG: Final = 70
"""EX_SOFTWARE of sysexits(3)."""


@dataclass(frozen=True, slots=True, eq=False)
class SpareRelay:
    """A relay that waits for its connection. It ends if its report channel is closed.

    Attributes:
        pid: The relay's process.
        report_channel: Carries the connection to the relay, and then the relay's report to this process.
        inner: The far end of the relay's inner socket.
    """

    pid: int
    report_channel: socket.socket
    inner: socket.socket

    def close(self) -> None:
        self.report_channel.close()
        self.inner.close()


@dataclass(slots=True)
class Handshake:
    """A relay with a peer that is still unknown.

    Attributes:
        pid: The relay's process.
        peer: The peer's address, for the log.
        source: The source to which the connection counts, by `source_of`.
        report_channel: Carries the relay's report of its peer's certificate.
        inner: The far end of the relay's inner socket; the broker gets it with the report.
        since_s: The time of the connection, by time.monotonic().
        has_failed: Whether the handshake failed, so that the relay lives only until the peer has read the alert.
    """

    pid: int
    peer: str
    source: str
    report_channel: socket.socket
    inner: socket.socket
    since_s: float
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class CertificateHolder:
    """The holder of a certificate.

    Attributes:
        names: The certificate's names, in the order of its extension.
        serial: The certificate's serial number; -1 if the certificate is unknown, because no CA issues a negative one
            (RFC 5280, 4.1.2.2).
    """

    names: tuple[str, ...] = ()
    serial: int = -1


UNKNOWN: Final = CertificateHolder()


def get_ready() -> None:
    """Do the work, mainly imports, that every relay would otherwise repeat. Call this before the first fork.

    Every relay inherits the objects that exist now. A frozen heap keeps the garbage collector from writing to, and so
    copying, their pages.
    """
    preload()
    gc.collect()
    gc.freeze()


class TlsAcceptor:
    """Accepts connections, forks relays, reports them to the broker, and reaps them.

    Args:
        channel: The channel to the broker.
        files: The node's certificate, its key, and the CAs it trusts.
        max_relays: Limit on the relays that exist at a time.
        max_relays_per_tenant: Limit on the relays that peers with the same names in their certificates may have at a
            time. MAX_REFUSED_RELAYS more are kept for the time that it takes to refuse them.
    """

    def __init__(
        self, channel: socket.socket, files: IdentityFiles, max_relays: int, max_relays_per_tenant: int
    ) -> None:
        """Read the node's identity from `files`. Raises BadIdentity."""
        self._channel = channel
        self._files = files
        self._identity: Identity | None = Identity(files)
        self._identity_problem = ""
        self._max_relays = max_relays
        self._max_relays_per_names = max_relays_per_tenant + MAX_REFUSED_RELAYS
        self._epoll = select.epoll()
        self._refusals = RateLimitedLog(LogEvent.STRANGER_REFUSED)
        self._pending = PendingConnections(self._epoll, self._on_hello, self._on_refused)
        self._listeners: dict[int, socket.socket] = {}
        # Connections with a whole ClientHello, which wait for a relay.
        self._ready: deque[PendingConnection] = deque()
        # Keyed by the descriptor of the report channel; the oldest is first.
        self._handshakes: dict[int, Handshake] = {}
        # Relays without a connection, oldest first.
        self._spare_relays: deque[SpareRelay] = deque()
        self._wants_spare_relays = True
        # Keyed by process id; UNKNOWN until the relay reports a certificate.
        self._relays: dict[int, CertificateHolder] = {}
        # The relays that an earlier acceptor left: the serial numbers of their certificates, keyed by pidfd.
        self._orphans: dict[int, int] = {}
        self._next_revoked_check = 0.0
        # 0 while accepting is not paused.
        self._accept_paused_until_s = 0.0
        # Python's C-level handler writes SIGCHLD here, which wakes epoll_wait(2).
        self._wakeup, self._wakeup_end = socket.socketpair()
        for end in (self._wakeup, self._wakeup_end):
            end.setblocking(False)

    def run(self) -> None:
        """Serve until the broker is gone, then raise ChannelClosed."""
        # A relay that ends must wake the loop: SIGCHLD writes a byte to the socket that epoll watches.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_end.fileno(), warn_on_full_buffer=False)
        self._epoll.register(self._channel, select.EPOLLIN)
        self._epoll.register(self._wakeup, select.EPOLLIN)
        while True:
            # In each turn, handle first everything that is ready, then everything that is due, and last the spare
            # relays.
            for fd, _ in self._epoll.poll(self._timeout_s()):
                self._on_event(fd)
            self._pending.expire()
            self._begin_handshakes()
            self._resume_accepting()
            self._end_revoked()
            self._keep_spares()

    def _on_event(self, fd: int) -> None:
        if fd in self._pending:
            self._pending.on_readable(fd)
        elif fd in self._listeners:
            self._accept(self._listeners[fd])
        elif fd in self._handshakes:
            self._on_report(self._handshakes[fd])
        elif fd == self._wakeup.fileno():
            # Empty the pipe, and then reap all relays that have ended: several signals may share one byte.
            with contextlib.suppress(BlockingIOError):
                while self._wakeup.recv(4096):
                    pass
            self._reap()
        elif fd == self._channel.fileno():
            self._on_broker_message(*receive_message(self._channel))
        elif fd in self._orphans:
            del self._orphans[fd]
            # A relay that was just forked may still have a copy, so unregister the descriptor: its number may be used
            # again.
            self._epoll.unregister(fd)
            os.close(fd)

    def _timeout_s(self) -> float | None:
        # Wake up for whatever is due first. If nothing is due, wait for a descriptor.
        timeouts = [self._pending.next_timeout_s]
        if self._ready:
            timeouts.append(HANDSHAKE_CHECK_S)
        if self._accept_paused_until_s:
            timeouts.append(NO_DESCRIPTORS_PAUSE_S)
        if self._relays or self._orphans:
            timeouts.append(REVOKED_CHECK_S)
        return min((timeout for timeout in timeouts if timeout is not None), default=None)

    # --- connections ---

    def _on_broker_message(self, received: dict[str, Any], fds: list[int]) -> None:
        try:
            message: ToAcceptor = expect_message(TO_ACCEPTOR, received)
        except MalformedMessage as error:
            # The broker has another version, or a bug. Ignore the message and continue.
            log_event(LogEvent.DAEMON_FAULT, doing=f"reading a message of the broker: {error}")
            close_all(fds)
            return
        # If the message has a descriptor, keep and watch it.
        match message:
            case LivenessPing():
                close_all(fds)
                self._send(Pong())
                return
            case Listen() | LeftOverRelay() if len(fds) != 1:
                # This process had no descriptor left for the message's descriptors.
                close_all(fds)
                return
            case Listen():
                listener = socket.socket(fileno=fds[0])
                listener.setblocking(False)
                self._listeners[listener.fileno()] = listener
            case LeftOverRelay():
                self._orphans[fds[0]] = int(message.serial, 16)
            case _:
                assert_never(message)
        self._epoll.register(fds[0], select.EPOLLIN)

    def _send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Send the broker a message. Raises ChannelClosed."""
        send_message(self._channel, message.to_map(), fds)

    def _accept(self, listener: socket.socket) -> None:
        try:
            self._pending.accept(listener)
        except OSError as error:
            # No descriptor is left. Evict one connection to make room, and accept no more for a moment; otherwise epoll
            # would report the same connection again at once.
            self._refusals.add("a peer", f"no connection can be accepted: {error.strerror}")
            self._pending.evict_one("no file descriptors are left")
            self._watch_listeners(events=0)
            self._accept_paused_until_s = time.monotonic() + NO_DESCRIPTORS_PAUSE_S

    def _resume_accepting(self) -> None:
        if self._accept_paused_until_s and time.monotonic() >= self._accept_paused_until_s:
            self._accept_paused_until_s = 0.0
            self._watch_listeners(events=select.EPOLLIN)

    def _watch_listeners(self, events: int) -> None:
        for listener in self._listeners.values():
            self._epoll.modify(listener, events)

    def _on_refused(self, connection: PendingConnection, reason: str) -> None:
        self._refusals.add(connection.peer, reason)

    def _on_hello(self, connection: PendingConnection) -> None:
        if len(self._relays) >= self._max_relays:
            connection.sock.close()
            self._on_refused(
                connection,
                f"{counted(len(self._relays), 'connection is', 'connections are')} open, the maximum of this daemon",
            )
            return
        # The connection waits for a relay. If too many wait, the host with the most connections loses its oldest.
        self._ready.append(connection)
        if len(self._ready) > MAX_HANDSHAKES:
            victim = oldest_of_largest_source(self._ready) or connection
            self._ready.remove(victim)
            victim.sock.close()
            self._on_refused(victim, f"more than {MAX_HANDSHAKES} connections wait for their handshake")

    # --- the node's certificate, and revoked ones ---

    def _reload_identity(self) -> None:
        """Read the files again if they have changed. Without usable files, no peer is admitted."""
        if self._identity is not None and self._identity.is_current():
            return
        # Relays that wait have the old key and the old list of revoked certificates.
        self._drop_spares()
        try:
            self._identity = Identity(self._files)
            log_event(LogEvent.GATE_IDENTITY)
            self._identity_problem = ""
        except BadIdentity as error:
            self._identity = None
            # Log each reason only once, because this runs every second while connections are open.
            if str(error) != self._identity_problem:
                self._identity_problem = str(error)
                log_event(LogEvent.GATE_CLOSED, reason=str(error))

    def _end_revoked(self) -> None:
        """Kill the relays of certificates that were revoked after the connection began."""
        now = time.monotonic()
        if not (self._relays or self._orphans) or now < self._next_revoked_check:
            return
        self._next_revoked_check = now + REVOKED_CHECK_S
        self._reload_identity()
        revoked = frozenset() if self._identity is None else self._identity.revoked
        # This acceptor's own relays are not reaped yet, so their process ids are still theirs.
        for pid, holder in self._relays.items():
            if holder.serial in revoked:
                log_event(LogEvent.RELAY_REVOKED, relay_pid=pid, serial=f"{holder.serial:X}")
                os.kill(pid, signal.SIGKILL)
        # The broker may have reaped an earlier acceptor's relay, and its process id may be in use again: use the pidfd.
        for pidfd, serial in self._orphans.items():
            if serial in revoked:
                log_event(LogEvent.RELAY_REVOKED, serial=f"{serial:X}")
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    # --- handshakes ---

    def _begin_handshakes(self) -> None:
        if not self._ready:
            return
        # A renewed or revoked certificate must already count for the next connection.
        self._reload_identity()
        self._end_slow_handshakes()
        # Serve the source that has the fewest handshakes in progress, so that one host with many connections does not
        # hold up the others.
        while self._ready and len(self._handshakes) < MAX_HANDSHAKES:
            connection = oldest_of_smallest_source(self._ready, self._handshakes.values())
            self._ready.remove(connection)
            with connection.sock:
                self._hand_over(connection)

    def _end_slow_handshakes(self) -> None:
        """End as many handshakes as connections wait: first failed ones, then those that have had their time."""
        before = time.monotonic() - MIN_HANDSHAKE_S
        for _ in range(len(self._handshakes) + len(self._ready) - MAX_HANDSHAKES):
            handshakes = self._handshakes.values()
            victim = oldest_of_largest_source(handshakes, lambda handshake: handshake.has_failed)
            victim = victim or oldest_of_largest_source(handshakes, lambda handshake: handshake.since_s <= before)
            if victim is None:
                return
            self._abort(victim, f"its handshake is not finished, and {len(self._ready)} other connections wait")

    def _hand_over(self, connection: PendingConnection) -> None:
        """Give a connection to a relay that waits for one, or else to a new relay."""
        if self._identity is None:
            self._on_refused(connection, "this node has no usable certificate")
            return
        # Prefer a relay that waits: its fork and its confinement are done.
        while self._spare_relays:
            spare = self._spare_relays.popleft()
            if _send_connection(spare, connection):
                break
            spare.close()  # it was killed
        else:
            try:
                spare = self._fork_relay(self._identity)
            except OSError as error:
                self._on_refused(connection, f"no process can be started: {error.strerror}")
                return
            if not _send_connection(spare, connection):
                spare.close()
                self._on_refused(connection, "its relay exited immediately")
                return
        # From here on the relay has the connection, and this process closes its copy.
        self._wants_spare_relays = True
        self._relays[spare.pid] = UNKNOWN
        self._epoll.register(spare.report_channel, select.EPOLLIN)
        self._handshakes[spare.report_channel.fileno()] = Handshake(
            spare.pid, connection.peer, connection.source, spare.report_channel, spare.inner, time.monotonic()
        )

    def _fork_relay(self, identity: Identity) -> SpareRelay:
        """Fork a relay, which waits for its connection. Raises OSError if the host has no process or descriptor."""
        # Make two pairs of sockets: `inner` carries the tenant's frames, `report` the connection and the report about
        # it. Any failure closes all four sockets.
        with contextlib.ExitStack() as undo:
            inner, relays_inner = (undo.enter_context(end) for end in socket.socketpair())
            report, relays_report = (undo.enter_context(end) for end in channel_pair())
            # Give both ends buffers of the same size; otherwise one direction of a session would be slower.
            for end in (inner, relays_inner):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, INNER_BUFFER_BYTES)
            # The relay must not pass descriptors to the broker or to this process.
            refuse_descriptors(inner)
            refuse_descriptors(report)
            pid = os.fork()
            if pid == 0:
                self._become_relay(relays_inner, relays_report, identity)
            # In the acceptor: keep our ends, and close the relay's.
            undo.pop_all()
        relays_inner.close()
        relays_report.close()
        # The broker reaps the relay if this process dies first.
        self._send(RelayBegan(pid))
        return SpareRelay(pid, report, inner)

    def _keep_spares(self) -> None:
        """Fork relays for the next connections, unless a present connection would have to wait for it."""
        if not self._wants_spare_relays or self._ready or self._identity is None:
            return
        # If a spare relay fails at once, do not fork another one before a connection needs it.
        self._wants_spare_relays = False
        with contextlib.suppress(OSError):  # the next connection gets the same error, and logs it
            while len(self._spare_relays) < min(SPARE_RELAYS, self._max_relays):
                self._spare_relays.append(self._fork_relay(self._identity))

    def _forget_spare(self, pid: int) -> None:
        for spare in [spare for spare in self._spare_relays if spare.pid == pid]:
            self._spare_relays.remove(spare)
            spare.close()

    def _drop_spares(self) -> None:
        """End the relays that wait for a connection: they have an identity from files that have changed."""
        while self._spare_relays:
            self._spare_relays.pop().close()
        self._wants_spare_relays = True

    def _become_relay(self, inner: socket.socket, report: socket.socket, identity: Identity) -> NoReturn:
        status = EXIT_BUG
        try:
            # This is the relay: give up the rights that only the acceptor may have, then never return.
            stop_logging()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            inner.setblocking(False)
            self._identity = None
            status = run_relay(inner, report, identity)
        except BaseException:
            # This is a bug in the relay. No code of the acceptor may continue in this process.
            traceback.print_exc(file=sys.stderr)
        finally:
            with contextlib.suppress(OSError):
                sys.stderr.flush()
            os._exit(status)

    def _on_report(self, handshake: Handshake) -> None:
        try:
            received, fds = receive_message(handshake.report_channel)
        except ChannelClosed:
            self._forget(handshake)
            return
        # A report has no descriptors. Close those that a hijacked relay may have sent.
        close_all(fds)
        try:
            message: FromRelay = expect_message(FROM_RELAY, received)
        except MalformedMessage:
            # A hijacked relay may send anything.
            self._abort(handshake, "its relay sent an invalid message")
            return
        match message:
            case PeerVerified():
                self._on_verified(handshake, message)
            case PeerRefused() if handshake.has_failed:
                self._forget(handshake)
            case PeerRefused():
                self._refusals.add(handshake.peer, message.reason)
                handshake.has_failed = True
            case _:
                assert_never(message)

    def _on_verified(self, handshake: Handshake, verified: PeerVerified) -> None:
        holder = CertificateHolder(verified.names, int(verified.serial, 16))
        # The limit applies to the certificate's names, because only the broker can determine the tenant. Without it,
        # connections that the broker refuses could take all relays.
        if sum(other.names == holder.names for other in self._relays.values()) >= self._max_relays_per_names:
            self._abort(handshake, f"the holder of {', '.join(holder.names)} has too many connections")
            return
        # The relay belongs to this holder from here on; later reports from it are not read.
        self._relays[handshake.pid] = holder
        arrival = RelayArrived(handshake.pid, handshake.peer, holder.names, f"{holder.serial:X}")
        self._send(arrival, (handshake.inner.fileno(),))
        self._forget(handshake)

    def _abort(self, handshake: Handshake, reason: str) -> None:
        if not handshake.has_failed:
            self._refusals.add(handshake.peer, reason)
        # Do not kill a relay that has already ended, because its process id may belong to another process.
        if handshake.pid in self._relays:
            os.kill(handshake.pid, signal.SIGKILL)
        self._forget(handshake)

    def _forget(self, handshake: Handshake) -> None:
        del self._handshakes[handshake.report_channel.fileno()]
        self._epoll.unregister(handshake.report_channel)
        handshake.report_channel.close()
        handshake.inner.close()

    def _reap(self) -> None:
        for pid, status in reaped_children():
            self._relays.pop(pid, None)
            self._forget_spare(pid)
            if status:
                log_event(LogEvent.RELAY_ENDED, relay_pid=pid, reason=exit_text(status))
            self._send(RelayLeft(pid))


def _send_connection(spare: SpareRelay, connection: PendingConnection) -> bool:
    try:
        send_message(spare.report_channel, TakeConnection().to_map(), (connection.sock.fileno(),))
    except ChannelClosed:
        return False
    return True
