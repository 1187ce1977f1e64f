"""A relay: one process, one remote tenant's TLS connection, from the fork to the end of the connection.

The acceptor forks relays before their connections come, because a fork and the confinement take longer than a
handshake. A relay gives up everything but two sockets, waits for its connection, does the handshake, and reports its
peer's certificate to the acceptor. Then it copies bytes between TLS and the inner socket. The broker has the inner
socket's far end, and after ATTACH a worker has it.
"""

import contextlib
import gc
import os
import platform
import resource
import select
import socket
import ssl
import time
from typing import Any, Final, cast

from gpulease.daemon.contract.message_fields import MalformedMessage, expect_message
from gpulease.daemon.host.heap_wipe import stop_wiping
from gpulease.daemon.host.ipc import ChannelClosed, close_all, receive_message, send_message
from gpulease.daemon.host.processes import gain_no_privileges, has_cores_to_poll, never_dump, set_name
from gpulease.daemon.remote.node_identity import Identity
from gpulease.daemon.remote.remote_messages import (
    MAX_NAME_BYTES,
    MAX_NAMES,
    MAX_SERIAL_CHARS,
    TO_RELAY,
    PeerRefused,
    PeerVerified,
    are_bounded,
)
from gpulease.daemon.sandbox import landlock, syscall_filter
from gpulease.daemon.sandbox.measures import SandboxNeeds
from gpulease.protocol.fast_dataclass import dataclass

HANDSHAKE_S: Final = 5.0
"""Longest time, in seconds, from a whole ClientHello to the end of the handshake, which takes one round trip. Bounds a
peer that begins and does not continue."""

STOPPED_S: Final = 0.5
"""If a step of the handshake exceeds its time by more than this, in seconds, then this process was stopped (a frozen
container), or its host is overloaded. The time of the step then does not count against the peer."""

MAX_STOPS: Final = 3
"""Maximum number of steps of one handshake that do not count because this process was stopped, so that a peer can't
occupy a relay of an overloaded host.
"""

WAIT_S: Final = 1.0
"""Longest single wait for the peer, in seconds, so that a stop during it is noticed."""

ALERT_LINGER_S: Final = 1.0
"""Time, in seconds, for which the connection stays open after a failed handshake, so that the peer can read the
alert."""

KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    # Milliseconds that sent bytes may stay unacknowledged.
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 120_000),
)
"""With these options, the relay notices within two minutes that a tenant's host is gone (tcp(7))."""


class HandshakeFailed(Exception):
    """The handshake failed; the message contains the reason for the operator."""


@dataclass(slots=True)
class RelayedTls:
    """The tenant's socket, and the TLS connection with its two buffers (see ssl.MemoryBIO)."""

    net: socket.socket
    tls: ssl.SSLObject
    incoming: ssl.MemoryBIO
    outgoing: ssl.MemoryBIO


def preload() -> None:
    """Import the modules that a relay needs later, because Landlock will forbid access to their folders."""
    ssl.cert_time_to_seconds("Jan  1 00:00:00 2026 GMT")


def run_relay(inner: socket.socket, report: socket.socket, identity: Identity) -> int:
    """Wait for a connection and run its relay, in a newly forked process. Returns the exit status.

    Args:
        inner: The relay's end of the inner socket.
        report: The channel to the acceptor, for the connection, and then for the report about its peer.
        identity: The node's identity. The acceptor sends no connection once the identity's files have changed.
    """
    # Step 1: give up everything before any byte of a peer arrives.
    confine((inner.fileno(), report.fileno()))
    # Step 2: prepare the handshake, so that a connection that comes does not wait for it.
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = identity.wrap(incoming, outgoing)
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()  # the first step needs no bytes from the peer
    # Step 3: wait, perhaps for hours, until the acceptor passes a connection on.
    net = _wait_for_connection(report)
    if net is None:
        return 0
    # Step 4: do the handshake, and read the peer's certificate. A peer that fails is reported and gets an alert; its
    # bytes are never decrypted.
    stream = RelayedTls(net, tls, incoming, outgoing)
    try:
        _shake_hands(stream)
        verified, ends_in_s = _certificate_of(stream.tls)
    except HandshakeFailed as failure:
        with contextlib.suppress(ChannelClosed):
            send_message(report, PeerRefused(str(failure)).to_map())
        _send_alert(stream)
        return 0
    # Step 5: forget the key before the tenant's first byte is decrypted. A tenant that takes over the relay then finds
    # no secret of the node in it.
    identity.forget_key(stream.tls)
    gc.collect()
    # From here on the process has the bytes of only one tenant, so it need not overwrite the memory that it frees,
    # which would cost two overwrites for each batch.
    stop_wiping()
    try:
        # Step 6: report the peer. The acceptor passes the inner socket's far end on to the broker.
        send_message(report, verified.to_map())
    except ChannelClosed:
        return 0  # the acceptor is gone, so this connection is unknown to the broker
    report.close()
    # Step 7: copy bytes until the connection or its certificate ends.
    for level, option, value in KEEPALIVE:
        net.setsockopt(level, option, value)
    Pump(net, inner, stream.tls, incoming, outgoing, time.monotonic() + ends_in_s).run()
    return 0


def _wait_for_connection(report: socket.socket) -> socket.socket | None:
    """Wait for the acceptor to send a connection; None if the acceptor is gone or no longer needs this relay."""
    try:
        received, fds = receive_message(report)
    except ChannelClosed:
        return None
    try:
        expect_message(TO_RELAY, received)
    except MalformedMessage:
        close_all(fds)
        return None
    if len(fds) != 1:
        close_all(fds)
        return None
    set_name(RELAY_NAME)
    net = socket.socket(fileno=fds[0])
    net.setblocking(False)
    net.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    return net


class HandshakeTime:
    """The time that the peer has for its part of the handshake: HANDSHAKE_S, not counting the time of stops.

    All waits share it, so a peer that sends byte after byte does not extend it.
    """

    def __init__(self, seconds: float) -> None:
        self.left_s = seconds
        self._counted_until_s = time.monotonic()
        self._stops = 0

    def count(self, at_most_s: float = 0.0) -> bool:
        """Count the time since the last call, which should be at most `at_most_s`. Returns whether any time is left."""
        now_s = time.monotonic()
        took_s, self._counted_until_s = now_s - self._counted_until_s, now_s
        if took_s > at_most_s + STOPPED_S and self._stops < MAX_STOPS:
            self._stops += 1
        else:
            self.left_s -= took_s
        return self.left_s > 0

    def wait(self, poll: select.poll) -> bool:
        """Wait for the events that `poll` watches. Returns False if none comes in time."""
        while self.count():
            wait_s = min(self.left_s, WAIT_S)
            is_ready = bool(poll.poll(wait_s * 1000))
            self.count(wait_s)
            if is_ready:
                return True
        return False


def _shake_hands(stream: RelayedTls) -> None:
    time_left = HandshakeTime(HANDSHAKE_S)
    poll = select.poll()
    poll.register(stream.net, select.POLLIN)
    room = memoryview(bytearray(BUFFER_BYTES))
    # Each round passes the received bytes to OpenSSL, sends its answer, and waits for more.
    while True:
        try:
            stream.tls.do_handshake()
        except ssl.SSLWantReadError:
            is_done = False
        except (ssl.SSLError, ssl.CertificateError) as error:
            raise HandshakeFailed(_reason(error)) from None
        else:
            is_done = True
        # Send even when the handshake is done, because the last messages are still in the buffer.
        _send_all(stream, time_left)
        if is_done:
            return
        try:
            count = stream.net.recv_into(room)
        except BlockingIOError:
            if not time_left.wait(poll):
                raise HandshakeFailed(f"the handshake was not finished within {HANDSHAKE_S:g} s") from None
            continue
        except OSError as error:
            raise HandshakeFailed(f"the connection broke: {error.strerror}") from None
        if not count:
            raise HandshakeFailed("the peer closed the connection during the handshake")
        if not time_left.count():
            raise HandshakeFailed(f"the handshake was not finished within {HANDSHAKE_S:g} s")
        stream.incoming.write(room[:count])


def _send_all(stream: RelayedTls, time_left: HandshakeTime) -> None:
    unsent = memoryview(stream.outgoing.read())
    poll = select.poll()
    poll.register(stream.net, select.POLLOUT)
    while unsent:
        try:
            unsent = unsent[stream.net.send(unsent) :]
        except BlockingIOError:
            if not time_left.wait(poll):
                raise HandshakeFailed("the peer does not read what is sent to it") from None
        except OSError as error:
            raise HandshakeFailed(f"the connection broke: {error.strerror}") from None


def _send_alert(stream: RelayedTls) -> None:
    """Send the alert, if any, and wait for the peer to close, because unread bytes at a close would discard it."""
    time_left = HandshakeTime(ALERT_LINGER_S)
    with contextlib.suppress(OSError, HandshakeFailed):
        # First send the alert and end our direction, then read until the peer also closes.
        _send_all(stream, time_left)
        stream.net.shutdown(socket.SHUT_WR)
        poll = select.poll()
        poll.register(stream.net, select.POLLIN)
        while time_left.wait(poll) and stream.net.recv(BUFFER_BYTES):
            pass


def _certificate_of(tls: ssl.SSLObject) -> tuple[PeerVerified, float]:
    """Return the report on the peer's verified certificate, and the seconds until it expires."""
    certificate = tls.getpeercert()
    if not certificate:
        raise HandshakeFailed("the peer sent no certificate")
    # Use only the names that can identify a tenant; ignore the subject (see node_identity).
    names = [f"{kind}:{value}" for kind, value in _pairs(certificate.get("subjectAltName", ()))]
    if not are_bounded(names):
        raise HandshakeFailed(
            f"the certificate has more than {MAX_NAMES} names, or a name of more than {MAX_NAME_BYTES} bytes"
        )
    serial = str(certificate["serialNumber"])[:MAX_SERIAL_CHARS]
    ends_in_s = ssl.cert_time_to_seconds(str(certificate["notAfter"])) - time.time()
    return PeerVerified(tuple(names), serial), ends_in_s


def _pairs(names: Any) -> list[tuple[str, str]]:
    return [(str(kind), str(value)) for kind, value in names if kind in ("URI", "DNS")]


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    return str(error)


BUFFER_BYTES: Final = 256 << 10
"""Maximum number of bytes that are held in each direction, and that one recv returns. With room for fewer than 16
records, waking up would cost more than copying."""

RECORD_BYTES: Final = 16 << 10
"""Maximum number of bytes in a record (RFC 8446, 5.1)."""

LINGER_S: Final = 5.0
"""Time, in seconds, for which the connection stays open at the end, so that the tenant can read the final reply."""

SPIN_NS: Final = 50_000
"""The time for which a relay on a host with enough cores polls for the next bytes before it sleeps. A reply that comes
in time saves two processes a wake-up."""

_HANG_UP: Final = select.POLLHUP | select.POLLERR
_MAX_POLL_S: Final = 3600.0
_NOTHING: Final = memoryview(b"")


class Broken(Exception):
    """The connection was reset, or its peer broke the rules of TLS."""


class Pump:
    """Copies bytes between a TLS connection and a plain socket.

    Each direction holds at most BUFFER_BYTES and then reads no more, so a peer that does not read stops the other end
    from sending, as on one socket. The end of one direction is passed on; the other direction continues. The pump waits
    in poll(2), so a relay between two silent ends costs nothing.

    Args:
        net: The tenant's socket, nonblocking.
        inner: The socket of the broker or the worker, nonblocking.
        tls: The connection's state, after its handshake.
        incoming: The buffer that `tls` reads; it may hold bytes that arrived during the handshake.
        outgoing: The buffer that `tls` writes.
        ends: The time at which the connection is closed, by time.monotonic().
    """

    def __init__(
        self,
        net: socket.socket,
        inner: socket.socket,
        tls: ssl.SSLObject,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        ends: float,
    ) -> None:
        self._net, self._inner = net, inner
        self._tls, self._incoming, self._outgoing = tls, incoming, outgoing
        self._ends = ends
        self._raw = memoryview(bytearray(BUFFER_BYTES))
        self._plain = memoryview(bytearray(BUFFER_BYTES))
        self._undelivered = _NOTHING
        self._unsent = _NOTHING
        # With `*_ended`, that side sends no more. With `*_closed`, the relay has ended its own stream to that side.
        self._net_ended = self._inner_closed = self._inner_ended = self._net_closed = False
        self._poll = select.poll()
        self._masks = dict.fromkeys((net.fileno(), inner.fileno()), -1)
        self._spin_ns = SPIN_NS if has_cores_to_poll() else 0

    def run(self) -> None:
        """Copy until both directions have ended, one end has disconnected, or the connection's time has expired."""
        try:
            # A close with unread bytes discards the last bytes sent, so read until the tenant ends its direction.
            while not (self._net_ended and self._inner_closed and self._net_closed):
                if (left_s := self._ends - time.monotonic()) <= 0:
                    break
                if not (self._pump_up() | self._pump_down()):
                    self._wait(min(left_s, _MAX_POLL_S))
            # The time is over, or both directions have ended. Send the peer close_notify.
            self._close_net()
        except Broken:
            return

    # --- from the tenant ---

    def _pump_up(self) -> bool:
        """Move bytes from the tenant inwards; False if there were none to move."""
        # Accept more only when everything before it is delivered: this bounds the bytes that the relay holds.
        if not self._undelivered and not self._net_ended:
            self._receive()
        if self._undelivered:
            return self._deliver()
        # Everything is delivered and no more will come, so also end the inner stream.
        if self._net_ended and not self._inner_closed:
            self._inner_closed = True
            with contextlib.suppress(OSError):
                self._inner.shutdown(socket.SHUT_WR)
            return True
        return False

    @property
    def _is_reading_paused(self) -> bool:
        """Whether the tenant must first read pending messages, because TLS answers some of its messages (KeyUpdate)."""
        return self._outgoing.pending > BUFFER_BYTES

    def _receive(self) -> None:
        if self._is_reading_paused:
            return
        # First take the bytes that the last read left in the buffers, then those that have arrived.
        count = self._decrypt()
        if not count and not self._net_ended:
            try:
                arrived = self._net.recv_into(self._raw)
            except BlockingIOError:
                return
            except OSError as error:
                raise Broken(error.strerror) from None
            # The end of the socket counts even without close_notify, because the frames before it are whole.
            self._net_ended = not arrived
            self._incoming.write(self._raw[:arrived])
            count = self._decrypt()
        self._undelivered = _NOTHING if self._inner_closed else self._plain[:count]

    def _decrypt(self) -> int:
        count = 0
        try:
            # Take one record at a time, while the buffer has room for a whole record.
            while count + RECORD_BYTES <= BUFFER_BYTES and (self._incoming.pending or self._tls.pending()):
                # With a buffer, read() returns a count; its type stub says otherwise.
                got = cast(int, self._tls.read(RECORD_BYTES, self._plain[count:]))
                if not got:
                    # This is close_notify. Bytes after it are ignored.
                    self._net_ended = True
                    break
                count += got
        except ssl.SSLWantReadError:
            pass
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            self._net_ended = True
        except ssl.SSLError as error:
            # OpenSSL has made an alert with the reason; send it before the connection breaks.
            self._send_once()
            raise Broken(error.reason) from None
        return count

    def _deliver(self) -> bool:
        try:
            sent = self._inner.send(self._undelivered)
        except BlockingIOError:
            return False
        except OSError:
            # The inner end is gone. It may have sent a reason before, which is still to be read.
            self._inner_closed = True
            self._undelivered = _NOTHING
            return True
        self._undelivered = self._undelivered[sent:]
        return True

    # --- to the tenant ---

    def _pump_down(self) -> bool:
        # As in the other direction, take more only when everything before it is sent.
        if not self._unsent and not self._outgoing.pending and not self._inner_ended:
            self._read_inner()
        if self._unsent or self._outgoing.pending:
            return self._send()
        # The broker or the worker has ended, and all its bytes are sent. The tenant gets LINGER_S to end its direction.
        if self._inner_ended and not self._net_closed:
            self._close_net()
            self._ends = min(self._ends, time.monotonic() + LINGER_S)
            return True
        return False

    def _read_inner(self) -> None:
        try:
            count = self._inner.recv_into(self._raw)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self._inner_ended = True
        # Encrypt all the bytes, one record at a time.
        at = 0
        try:
            while at < count:
                at += self._tls.write(self._raw[at : min(count, at + RECORD_BYTES)])
        except ssl.SSLError as error:
            raise Broken(error.reason) from None

    def _send(self) -> bool:
        if not self._unsent:
            self._unsent = memoryview(self._outgoing.read())
        try:
            sent = self._net.send(self._unsent)
        except BlockingIOError:
            return False
        except OSError as error:
            raise Broken(error.strerror) from None
        self._unsent = self._unsent[sent:]
        return True

    def _close_net(self) -> None:
        """Send close_notify and end this direction. Bytes that the socket does not accept at once are lost."""
        if self._net_closed:
            return
        self._net_closed = True
        with contextlib.suppress(ssl.SSLError, OSError):
            self._tls.unwrap()
        self._send_once()
        with contextlib.suppress(OSError):
            self._net.shutdown(socket.SHUT_WR)

    def _send_once(self) -> None:
        with contextlib.suppress(OSError):
            self._net.send(self._unsent.tobytes() + self._outgoing.read())

    # --- waiting ---

    def _wait(self, timeout_s: float) -> None:
        # Watch each socket only for bytes that can be moved now. A socket that is ready but not served would make
        # poll(2) return at once, again and again.
        self._watch(
            self._net,
            select.POLLIN * (not self._net_ended and not self._undelivered and not self._is_reading_paused)
            | select.POLLOUT * bool(self._unsent or self._outgoing.pending),
        )
        self._watch(
            self._inner,
            select.POLLIN * (not self._inner_ended and not self._unsent) | select.POLLOUT * bool(self._undelivered),
        )
        # Spin first, because a tenant that waits for an answer sends its next frame within microseconds of the answer.
        deadline_ns = time.monotonic_ns() + self._spin_ns
        ready = self._poll.poll(0)
        while not ready and time.monotonic_ns() < deadline_ns:
            ready = self._poll.poll(0)
        for fd, events in ready or self._poll.poll(timeout_s * 1000):
            if events & _HANG_UP and not events & (select.POLLIN | select.POLLOUT):
                self._hung_up(fd)

    def _watch(self, sock: socket.socket, mask: int) -> None:
        fd = sock.fileno()
        if fd in self._masks and self._masks[fd] != mask:
            self._masks[fd] = mask
            self._poll.register(fd, mask)

    def _hung_up(self, fd: int) -> None:
        """Handle the end of a peer from which nothing is being read."""
        if fd == self._net.fileno():
            raise Broken("the tenant is gone")
        # poll(2) would report the hang-up again and again.
        self._poll.unregister(fd)
        del self._masks[fd]
        self._inner_closed = True
        self._undelivered = _NOTHING
        self._ends = min(self._ends, time.monotonic() + LINGER_S)


NOBODY: Final = 65534
"""The user and group "nobody" on Linux hosts, as which a relay runs if the daemon is root."""

RELAY_NAME: Final = "gpul-relay"
"""The process name that ps(1) shows."""

SPARE_NAME: Final = "gpul-spare"
"""The name of a relay that has no connection yet."""

MAX_DATA_BYTES: Final = 256 << 20
"""Limit on a relay's private memory, so that no handshake makes OpenSSL grow without end. An honest relay uses a few
MiB."""

_LIMITS: Final = (
    (resource.RLIMIT_CORE, 0),  # a core file would put the connection's keys on a disk
    (resource.RLIMIT_NPROC, 0),  # no process and no thread, where it is not root
    (resource.RLIMIT_DATA, MAX_DATA_BYTES),
)


def keep_only(descriptors: tuple[int, ...]) -> None:
    """Close every descriptor but these and the three standard ones. The others belong to other tenants' connections."""
    begin = 3
    for fd in sorted(descriptors):
        os.closerange(begin, fd)
        begin = fd + 1
    os.closerange(begin, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def confine(descriptors: tuple[int, ...]) -> None:
    """Permanently give up everything but these descriptors, and those that arrive on them.

    Raises OSError; the relay must then exit.
    """
    keep_only(descriptors)
    set_name(SPARE_NAME)
    gain_no_privileges()
    # Drop the groups first, because a process that is not root can't.
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    # setresuid(2) makes the process dumpable again, so this comes after it.
    never_dump()
    for limit, most in _LIMITS:
        resource.setrlimit(limit, (most, most))
    # Allow two more descriptors: the connection's, and Landlock's own, which is closed again.
    most_fds = max(descriptors) + 2
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_fds, most_fds))
    _restrict()


def _restrict() -> None:
    """Forbid files, addresses, signals to others, and system calls that no worker needs, as far as this host can.

    If the daemon is root, relays and workers share a user. If not, relays run as the daemon's user.
    """
    try:
        # Landlock needs Linux 5.13; each of its later versions restricts more.
        version = landlock.abi()
    except OSError:
        version = 0  # this kernel has no Landlock; the workers' sandbox reports that to the operator
    if version >= landlock.FILES_SINCE:
        reach = landlock.Reach(
            files=True,
            devices=version >= landlock.DEVICES_SINCE,
            network=version >= landlock.NETWORK_SINCE,
            scope=version >= landlock.SCOPE_SINCE,
        )
        landlock.restrict(reach, SandboxNeeds())
    # The system call filter is last, because it forbids the calls that the lines before it make.
    if platform.machine() == syscall_filter.MACHINE:
        syscall_filter.install(writes_files=False)
