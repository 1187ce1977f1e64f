"""What the gate tells the broker of a relay whose peer is known.

What a relay gives up before it reads a byte of a stranger's: everything but its own connection.

What a relay does once its handshake is done: bytes from TLS to a socket and back.

Each direction holds so many bytes and reads no more until they are gone, so a peer that does not read stops the other
from sending, as on one socket. The end of one direction is passed on and leaves the other alone. Waiting is poll(2):
a relay between two silent ends costs nothing.

A relay from its birth in the gate to its end: give up all else, shake hands, say whose connection it is, relay.
"""

import contextlib
import gc
import os
import platform
import re
import resource
import select
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self, cast

from gpulease.daemon.host.ipc import ChannelClosed, send_message
from gpulease.daemon.host.processes import gain_no_privileges, never_dump, set_name
from gpulease.daemon.remote.identity import MAX_NAME_BYTES, MAX_NAMES, MAX_SERIAL_CHARS, Identity, are_bounded
from gpulease.daemon.sandbox import landlock, syscall_filter
from gpulease.daemon.sandbox.measures import Needs

MAX_PID: Final = 1 << 22
"""The largest number a process can have (proc_sys_kernel(5), pid_max). A larger one would be none for pidfd_open(2)."""

MAX_PEER_CHARS: Final = 128
"""Of an address and a port."""

_SERIAL: Final = re.compile(f"-?[0-9A-F]{{1,{MAX_SERIAL_CHARS}}}")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A relay, where its peer is, the names in its certificate, and that one's serial number, in hexadecimal."""

    pid: int
    peer: str
    names: tuple[str, ...]
    serial: str

    @classmethod
    def from_message(cls, message: Mapping[Any, Any]) -> Self | None:
        """None for what no gate says: it would be kept, and told to the next gate and to the next daemon."""
        match message:
            case {"pid": pid, "peer": str(peer), "names": list(names), "serial": str(serial)} if (
                is_pid(pid)
                and len(peer) <= MAX_PEER_CHARS
                and all(isinstance(name, str) for name in names)
                and are_bounded(names)
                and _SERIAL.fullmatch(serial)
            ):
                return cls(pid, peer, tuple(names), serial)
        return None


def is_pid(number: object) -> bool:
    """Whether it can be a process's."""
    return type(number) is int and 0 < number <= MAX_PID


NOBODY: Final = 65534
"""The user and group of that name on Linux hosts: what a relay is where the daemon is root."""

RELAY_NAME: Final = "gpul-relay"
"""For ps(1)."""

MAX_DATA_BYTES: Final = 256 << 20
"""Of a relay's own memory. An honest one uses a few MiB; stops a handshake that makes OpenSSL grow without end."""

_LIMITS: Final = (
    (resource.RLIMIT_CORE, 0),  # no memory of it, with its connection's keys, on a disk
    (resource.RLIMIT_NPROC, 0),  # no process and no thread, where it is not root
    (resource.RLIMIT_DATA, MAX_DATA_BYTES),
)


def keep_only(descriptors: tuple[int, ...]) -> None:
    """Close every descriptor but these and the standard three: the others are other people's connections."""
    begin = 3
    for fd in sorted(descriptors):
        os.closerange(begin, fd)
        begin = fd + 1
    os.closerange(begin, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def confine(descriptors: tuple[int, ...]) -> None:
    """Keep these and nothing else, for good. Raises OSError if it can't be done: then nothing is to be relayed."""
    keep_only(descriptors)
    set_name(RELAY_NAME)
    gain_no_privileges()
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    # After the change of user, which sets it anew.
    never_dump()
    for limit, most in _LIMITS:
        resource.setrlimit(limit, (most, most))
    # No more descriptors than there are.
    most_fds = max(descriptors) + 2  # one for Landlock's own, which is closed again
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_fds, most_fds))
    _shut_in()


def _shut_in() -> None:
    """No file, no address, nobody's signal, and no system call but a worker's: as far as this host has it.

    Workers are the same user where the daemon is root, and the daemon's files are where it is not.
    """
    try:
        version = landlock.abi()
    except OSError:
        version = 0  # this kernel has no Landlock, which the workers' sandbox tells the operator of
    if version >= landlock.FILES_SINCE:
        reach = landlock.Reach(
            files=True,
            devices=version >= landlock.DEVICES_SINCE,
            network=version >= landlock.NETWORK_SINCE,
            scope=version >= landlock.SCOPE_SINCE,
        )
        landlock.restrict(reach, Needs())
    if platform.machine() == syscall_filter.MACHINE:
        syscall_filter.install(writes_files=False)


BUFFER_BYTES: Final = 256 << 10
"""Held in each direction, and taken from a socket at a time. Room for 16 records: with fewer, waking costs more."""

RECORD_BYTES: Final = 16 << 10
"""Most that a record holds (RFC 8446, 5.1)."""

LINGER_S: Final = 5.0
"""For a tenant to read what it was told last, once there is nobody left to tell it more."""

SPIN_NS: Final = 50_000
"""How long the next bytes are looked for before this process sleeps, where there are cores for it: an answer that comes
within it saves two processes a wake-up."""

MIN_CORES_TO_SPIN: Final = 4
"""On fewer, who spins takes the core from who is waited for."""

_HANG_UP: Final = select.POLLHUP | select.POLLERR
_MAX_POLL_S: Final = 3600.0
_NOTHING: Final = memoryview(b"")


class Broken(Exception):
    """The connection can't be gone on with: reset, or what came is not what TLS allows."""


class Pump:
    """One connection.

    Args:
        net: The tenant's socket, nonblocking.
        inner: The socket of whom it speaks to, nonblocking.
        tls: The connection's state, its handshake done.
        incoming: Where `tls` reads; what the handshake left in it counts.
        outgoing: Where it writes.
        ends: When the connection is cut, as time.monotonic() has it.
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
        # The tenant sends no more; the other side was told; the other side sends no more; the tenant was told.
        self._net_ended = self._inner_told = self._inner_ended = self._net_told = False
        self._poll = select.poll()
        self._masks = dict.fromkeys((net.fileno(), inner.fileno()), -1)
        self._spin_ns = SPIN_NS if len(os.sched_getaffinity(0)) >= MIN_CORES_TO_SPIN else 0

    def run(self) -> None:
        """Until both directions have ended, or there is nobody left to tell, or the time is over."""
        try:
            # Who closes on what it has not read takes back what it said last: so all is read until the tenant is done.
            while not (self._net_ended and self._inner_told and self._net_told):
                if (left_s := self._ends - time.monotonic()) <= 0:
                    break
                if not (self._up() | self._down()):
                    self._wait(min(left_s, _MAX_POLL_S))
            self._say_close()
        except Broken:
            return

    # --- from the tenant ---

    def _up(self) -> bool:
        """Move what there is; False if nothing."""
        if not self._undelivered and not self._net_ended:
            self._receive()
        if self._undelivered:
            return self._deliver()
        if self._net_ended and not self._inner_told:
            self._inner_told = True
            with contextlib.suppress(OSError):
                self._inner.shutdown(socket.SHUT_WR)
            return True
        return False

    @property
    def _is_deaf(self) -> bool:
        """Whether the tenant must read before it is heard: TLS itself answers some of what it says (KeyUpdate)."""
        return self._outgoing.pending > BUFFER_BYTES

    def _receive(self) -> None:
        if self._is_deaf:
            return
        count = self._decrypt()
        if not count and not self._net_ended:
            try:
                arrived = self._net.recv_into(self._raw)
            except BlockingIOError:
                return
            except OSError as error:
                raise Broken(error.strerror) from None
            # An end without TLS's own (close_notify) is one all the same: whole frames before it are whole.
            self._net_ended = not arrived
            self._incoming.write(self._raw[:arrived])
            count = self._decrypt()
        self._undelivered = _NOTHING if self._inner_told else self._plain[:count]

    def _decrypt(self) -> int:
        count = 0
        try:
            while count + RECORD_BYTES <= BUFFER_BYTES and (self._incoming.pending or self._tls.pending()):
                # With a buffer it gives the count, whatever its stub says.
                got = cast(int, self._tls.read(RECORD_BYTES, self._plain[count:]))
                if not got:
                    # close_notify; what is behind it is not looked at.
                    self._net_ended = True
                    break
                count += got
        except ssl.SSLWantReadError:
            pass
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            self._net_ended = True
        except ssl.SSLError as error:
            self._send_quickly()
            raise Broken(error.reason) from None
        return count

    def _deliver(self) -> bool:
        try:
            sent = self._inner.send(self._undelivered)
        except BlockingIOError:
            return False
        except OSError:
            # It is gone, and may have said why before: that is still to be read.
            self._inner_told = True
            self._undelivered = _NOTHING
            return True
        self._undelivered = self._undelivered[sent:]
        return True

    # --- to the tenant ---

    def _down(self) -> bool:
        if not self._unsent and not self._outgoing.pending and not self._inner_ended:
            self._take()
        if self._unsent or self._outgoing.pending:
            return self._send()
        if self._inner_ended and not self._net_told:
            self._say_close()
            self._ends = min(self._ends, time.monotonic() + LINGER_S)
            return True
        return False

    def _take(self) -> None:
        try:
            count = self._inner.recv_into(self._raw)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self._inner_ended = True
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

    def _say_close(self) -> None:
        """Say that there is no more to come; what the socket does not take now is lost."""
        if self._net_told:
            return
        self._net_told = True
        with contextlib.suppress(ssl.SSLError, OSError):
            self._tls.unwrap()
        self._send_quickly()
        with contextlib.suppress(OSError):
            self._net.shutdown(socket.SHUT_WR)

    def _send_quickly(self) -> None:
        with contextlib.suppress(OSError):
            self._net.send(self._unsent.tobytes() + self._outgoing.read())

    # --- waiting ---

    def _wait(self, timeout_s: float) -> None:
        self._watch(
            self._net,
            select.POLLIN * (not self._net_ended and not self._undelivered and not self._is_deaf)
            | select.POLLOUT * bool(self._unsent or self._outgoing.pending),
        )
        self._watch(
            self._inner,
            select.POLLIN * (not self._inner_ended and not self._unsent) | select.POLLOUT * bool(self._undelivered),
        )
        until = time.monotonic_ns() + self._spin_ns
        found = self._poll.poll(0)
        while not found and time.monotonic_ns() < until:
            found = self._poll.poll(0)
        for fd, events in found or self._poll.poll(timeout_s * 1000):
            if events & _HANG_UP and not events & (select.POLLIN | select.POLLOUT):
                self._hung_up(fd)

    def _watch(self, sock: socket.socket, mask: int) -> None:
        fd = sock.fileno()
        if fd in self._masks and self._masks[fd] != mask:
            self._masks[fd] = mask
            self._poll.register(fd, mask)

    def _hung_up(self, fd: int) -> None:
        """An end is gone that nothing is read from now."""
        if fd == self._net.fileno():
            raise Broken("the tenant is gone")
        # Else poll(2) would tell of it again and again.
        self._poll.unregister(fd)
        del self._masks[fd]
        self._inner_told = True
        self._undelivered = _NOTHING
        self._ends = min(self._ends, time.monotonic() + LINGER_S)


HANDSHAKE_S: Final = 5.0
"""From a whole ClientHello to the end of the handshake, one round trip. Stops who begins and does not go on."""

LAST_WORD_S: Final = 1.0
"""For a peer to read why it was turned away."""

KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    # Milliseconds that what was sent may stay unacknowledged.
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 120_000),
)
"""A tenant whose host is gone without a word is noticed within two minutes (tcp(7))."""


class TurnedAway(Exception):
    """No handshake; the message says why, for the operator."""


@dataclass(slots=True)
class Stream:
    """The tenant's socket and the TLS on it."""

    net: socket.socket
    tls: ssl.SSLObject
    incoming: ssl.MemoryBIO
    outgoing: ssl.MemoryBIO


def preload() -> None:
    """Have all imported that a relay needs: it may be let into no folder that modules are in."""
    ssl.cert_time_to_seconds("Jan  1 00:00:00 2026 GMT")


def live(net: socket.socket, inner: socket.socket, report: socket.socket, identity: Identity) -> int:
    """Be the relay of one connection, in a process just forked; returns its exit status."""
    confine((net.fileno(), inner.fileno(), report.fileno()))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    stream = Stream(net, identity.wrap(incoming, outgoing), incoming, outgoing)
    try:
        _shake_hands(stream)
        told = _certificate_of(stream.tls)
    except TurnedAway as turned_away:
        with contextlib.suppress(ChannelClosed):
            send_message(report, {"op": "failed", "reason": str(turned_away)})
        _say_last(stream)
        return 0
    identity.forget_key(stream.tls)
    gc.collect()
    try:
        send_message(report, told)
    except ChannelClosed:
        return 0  # the gate is gone, so nobody knows of this connection
    report.close()
    for level, option, value in KEEPALIVE:
        net.setsockopt(level, option, value)
    ends = time.monotonic() + told["ends_in_s"]
    Pump(net, inner, stream.tls, incoming, outgoing, ends).run()
    return 0


def _shake_hands(stream: Stream) -> None:
    until = time.monotonic() + HANDSHAKE_S
    poll = select.poll()
    poll.register(stream.net, select.POLLIN)
    room = memoryview(bytearray(BUFFER_BYTES))
    while True:
        try:
            stream.tls.do_handshake()
        except ssl.SSLWantReadError:
            is_done = False
        except (ssl.SSLError, ssl.CertificateError) as error:
            raise TurnedAway(_words_of(error)) from None
        else:
            is_done = True
        _send_all(stream, until)
        if is_done:
            return
        try:
            count = stream.net.recv_into(room)
        except BlockingIOError:
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                raise TurnedAway(f"the handshake was not done within {HANDSHAKE_S:g} s") from None
            continue
        except OSError as error:
            raise TurnedAway(f"the connection broke: {error.strerror}") from None
        if not count:
            raise TurnedAway("the peer closed the connection in the handshake")
        if time.monotonic() > until:
            raise TurnedAway(f"the handshake was not done within {HANDSHAKE_S:g} s")
        stream.incoming.write(room[:count])


def _send_all(stream: Stream, until: float) -> None:
    unsent = memoryview(stream.outgoing.read())
    poll = select.poll()
    poll.register(stream.net, select.POLLOUT)
    while unsent:
        try:
            unsent = unsent[stream.net.send(unsent) :]
        except BlockingIOError:
            if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                raise TurnedAway("the peer does not read what it is told") from None
        except OSError as error:
            raise TurnedAway(f"the connection broke: {error.strerror}") from None


def _say_last(stream: Stream) -> None:
    """Send the alert, if there is one, and wait for the peer to go: closing on what it sent would take it back."""
    until = time.monotonic() + LAST_WORD_S
    with contextlib.suppress(OSError, TurnedAway):
        _send_all(stream, until)
        stream.net.shutdown(socket.SHUT_WR)
        poll = select.poll()
        poll.register(stream.net, select.POLLIN)
        while poll.poll(max(0.0, until - time.monotonic()) * 1000) and stream.net.recv(BUFFER_BYTES):
            if time.monotonic() > until:
                return


def _certificate_of(tls: ssl.SSLObject) -> dict[str, Any]:
    """What the gate is told of the peer's certificate, which was verified."""
    certificate = tls.getpeercert()
    if not certificate:
        raise TurnedAway("there is no certificate")
    names = [f"{kind}:{value}" for kind, value in _pairs(certificate.get("subjectAltName", ()))]
    if not are_bounded(names):
        raise TurnedAway(f"the certificate has more than {MAX_NAMES} names, or one of over {MAX_NAME_BYTES} bytes")
    return {
        "op": "verified",
        "names": names,
        "serial": str(certificate["serialNumber"])[:MAX_SERIAL_CHARS],
        "ends_in_s": ssl.cert_time_to_seconds(str(certificate["notAfter"])) - time.time(),
    }


def _pairs(names: Any) -> list[tuple[str, str]]:
    return [(str(kind), str(value)) for kind, value in names if kind in ("URI", "DNS")]


def _words_of(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate does not hold: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.lower().replace("_", " ")
    return str(error)
