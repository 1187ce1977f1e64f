"""The first bytes of a connection: whether they may begin a TLS handshake, and how many make up its first record.

A record is five bytes, type, version and length, and so many more (RFC 8446, 5.1); the first one of a client holds its
ClientHello, type 1 of the handshake messages (4), or the beginning of it.

What is logged of strangers: they can go on for ever, the log can't.

Who gives way when there are too many: whoever comes from where most come from. So a host crowds out itself alone.

Connections that have not said enough yet: no process is made for them, and they wait for a bounded time.

The gate: the process that accepts remote tenants' connections and forks a relay for each.
"""

import contextlib
import gc
import ipaddress
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol, TypeVar

from gpulease.daemon.host.fd_passing import refuse_descriptors
from gpulease.daemon.host.ipc import ChannelClosed, channel_pair, close_all, receive_message, send_message
from gpulease.daemon.host.processes import exit_text
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event, stop_logging
from gpulease.daemon.remote.identity import MAX_SERIAL_CHARS, BadIdentity, Identity, IdentityFiles, are_bounded
from gpulease.daemon.remote.relay import live, preload

LOOK_BYTES: Final = 6
"""What has to be there to tell."""

RECORD_HEADER_BYTES: Final = 5

MAX_RECORD_BYTES: Final = 1 << 14
"""Of a record that is not encrypted (RFC 8446, 5.1)."""

NOT_TLS_ALERT: Final = bytes((21, 3, 3, 0, 2, 2, 10))
"""A fatal alert, unexpected_message (RFC 8446, 6.2): what whoever does not speak TLS is told."""

_HANDSHAKE: Final = 22
_MAJOR_VERSION: Final = 3
_CLIENT_HELLO: Final = 1


def first_record_bytes(begin: bytes) -> int | None:
    """How long the first record is with its header, by at least LOOK_BYTES of it; None if that is no TLS."""
    kind, major, _, high, low, message = begin[:LOOK_BYTES]
    length = high << 8 | low
    if (kind, major, message) != (_HANDSHAKE, _MAJOR_VERSION, _CLIENT_HELLO) or not 4 <= length <= MAX_RECORD_BYTES:
        return None
    return RECORD_HEADER_BYTES + length


PAUSE_S: Final = 1.0
"""Between two lines."""

MAX_CHARS: Final = 200
"""Of what a line says of a peer."""


class RateLimitedLog:
    """One line a second at most, which counts those that were left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = clock()
        self._left_out = 0

    def add(self, peer: str, why: str) -> None:
        """A peer was turned away."""
        if self._clock() < self._next:
            self._left_out += 1
            return
        log_event(LogEvent.STRANGER_REFUSED, peer=peer, reason=why[:MAX_CHARS], suppressed=self._left_out or None)
        self._next = self._clock() + PAUSE_S
        self._left_out = 0


SITE_PREFIX_BITS: Final = 64
"""Of an IPv6 address, what one site has all addresses behind (RFC 4291, 2.5.4)."""


class FromSomewhere(Protocol):
    """One of a crowd."""

    @property
    def source(self) -> str:
        """See `source_of`."""


One = TypeVar("One", bound=FromSomewhere)


def source_of(host: str) -> str:
    """Where an address counts as coming from: an IPv4 address is a source, an IPv6 address's site is."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.version == 4:
        return str(address)
    return str(ipaddress.ip_network((int(address), SITE_PREFIX_BITS), strict=False))


def first_of_the_largest(crowd: Iterable[One], may_go: Callable[[One], bool] = lambda one: True) -> One | None:
    """Of those who may go, the first from the source of which there are most; None if nobody may."""
    everybody = list(crowd)
    counts = Counter(one.source for one in everybody)
    return max(filter(may_go, everybody), key=lambda one: counts[one.source], default=None)


def first_of_the_fewest(waiting: Iterable[One], inside: Iterable[FromSomewhere]) -> One:
    """Of those who wait, the first from the source of which fewest are inside."""
    counts = Counter(one.source for one in inside)
    return min(waiting, key=lambda one: counts[one.source])


MAX_STRANGERS: Final = 256
"""At a time. When there is one more, the oldest of where most come from is cut: see `crowd`."""

OPENING_S: Final = 5.0
"""From the connection to the whole of its first message."""

ACCEPTS_AT_A_TIME: Final = 64
"""Before the gate looks at all else."""

OnSpoken = Callable[["PendingConnection"], None]
OnGone = Callable[["PendingConnection", str], None]


@dataclass(slots=True, eq=False)
class PendingConnection:
    """One connection.

    Attributes:
        peer: Its address, for the log.
        source: Where it counts as coming from.
        since: When it came, as time.monotonic() has it.
    """

    sock: socket.socket
    peer: str
    source: str
    since: float


class PendingConnections:
    """Accepts, waits, and passes on those that have sent what begins a handshake, whole.

    Args:
        epoll: Tells `look` of a socket's bytes, by its descriptor.
        on_spoken: Gets a stranger, its socket, and what it sent still in the kernel.
        on_gone: Is told of one that was cut, and why.
    """

    def __init__(self, epoll: "select.epoll", on_spoken: OnSpoken, on_gone: OnGone) -> None:
        self._epoll = epoll
        self._on_spoken = on_spoken
        self._on_gone = on_gone
        # In the order they came.
        self._waiting: dict[int, PendingConnection] = {}

    def __contains__(self, fd: int) -> bool:
        return fd in self._waiting

    @property
    def next_end_s(self) -> float | None:
        """Seconds until the oldest has waited for too long; None if nobody waits."""
        oldest = next(iter(self._waiting.values()), None)
        return None if oldest is None else max(0.0, oldest.since + OPENING_S - time.monotonic())

    def accept(self, listener: socket.socket) -> None:
        """Take those who have connected. Raises OSError if this process, or the host, has no descriptor left."""
        for _ in range(ACCEPTS_AT_A_TIME):
            try:
                sock, address = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            self._welcome(sock, f"{address[0]} port {address[1]}", source_of(address[0]))

    def look(self, fd: int) -> None:
        """Something came from one of them."""
        stranger = self._waiting[fd]
        try:
            begin = stranger.sock.recv(LOOK_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError as error:
            self._cut(stranger, f"the connection broke: {error.strerror}")
            return
        if len(begin) < LOOK_BYTES:
            # Woken before there was as much as was waited for: no more will come.
            self._cut(stranger, "it closed the connection before it said anything")
            return
        needed = first_record_bytes(begin)
        if needed is None:
            self._turn_away(stranger)
        elif len(stranger.sock.recv(needed, socket.MSG_PEEK)) >= needed:
            self._let_go(stranger)
            self._on_spoken(stranger)
        elif stranger.sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) != needed:
            stranger.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, needed)
        else:
            self._cut(stranger, "it closed the connection inside its first message")

    def expire(self) -> None:
        """Cut those that have waited for too long."""
        while self._waiting and self.next_end_s == 0:
            self._cut(next(iter(self._waiting.values())), f"no handshake began within {OPENING_S:g} s")

    def make_room(self, why: str) -> None:
        """Cut one, if there is one."""
        one = first_of_the_largest(self._waiting.values())
        if one is not None:
            self._cut(one, why)

    def _welcome(self, sock: socket.socket, peer: str, source: str) -> None:
        try:
            sock.setblocking(False)
            # The kernel wakes the gate once there is enough to tell (socket(7)), not for each byte of a slow peer.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, LOOK_BYTES)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._epoll.register(sock, select.EPOLLIN)
        except OSError:
            sock.close()
            return
        self._waiting[sock.fileno()] = PendingConnection(sock, peer, source, time.monotonic())
        if len(self._waiting) > MAX_STRANGERS:
            self.make_room(f"more than {MAX_STRANGERS} wait")

    def _turn_away(self, stranger: PendingConnection) -> None:
        try:
            stranger.sock.send(NOT_TLS_ALERT)
            stranger.sock.shutdown(socket.SHUT_WR)
            # Unread bytes would turn the close into a reset, which takes the alert back.
            stranger.sock.recv(1 << 16)
        except OSError:
            pass  # it does without
        self._cut(stranger, "it does not speak TLS")

    def _cut(self, stranger: PendingConnection, why: str) -> None:
        self._let_go(stranger)
        stranger.sock.close()
        self._on_gone(stranger, why)

    def _let_go(self, stranger: PendingConnection) -> None:
        del self._waiting[stranger.sock.fileno()]
        self._epoll.unregister(stranger.sock)


MAX_HANDSHAKES: Final = 32
"""Processes at a time whose peer is not known yet. An honest one is that for a round trip."""

MIN_HANDSHAKE_S: Final = 0.5
"""What each of them gets at least; then, if others wait, one is ended: see `crowd`."""

LOOK_S: Final = 0.25
"""Between two looks at who has had enough time, while others wait."""

REVOKED_LOOK_S: Final = 1.0
"""Between two looks at whether the certificates of open connections were revoked."""

NO_DESCRIPTORS_PAUSE_S: Final = 0.1
"""After the host had no descriptor for a connection, until the next one is tried."""

TO_BE_TOLD: Final = 16
"""Connections of one holder beyond those it may have, whose relays live until it was told so. Stops it from taking
everybody's relays by opening what is refused again and again."""

EXIT_BUG: Final = 70
"""EX_SOFTWARE of sysexits(3)."""


@dataclass(slots=True)
class Handshake:
    """A relay whose peer is not known yet.

    Attributes:
        report: Where it says whose connection it is.
        inner: The end of its other socket that the broker gets then.
        has_failed: Whether there will be no connection, and the relay only waits for the peer to read why.
    """

    pid: int
    peer: str
    source: str
    report: socket.socket
    inner: socket.socket
    since: float
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class Holder:
    """Who showed a certificate: its names, and its serial number; no CA gives one below zero (RFC 5280, 4.1.2.2)."""

    names: tuple[str, ...] = ()
    serial: int = -1


UNKNOWN: Final = Holder()


class TlsAcceptor:
    """Accepts, forks, tells the broker, reaps."""

    def __init__(
        self, channel: socket.socket, files: IdentityFiles, max_relays: int, max_relays_per_tenant: int
    ) -> None:
        """Raises BadIdentity."""
        self._channel = channel
        self._files = files
        self._identity: Identity | None = Identity(files)
        self._complaint_about_files = ""
        self._max_relays = max_relays
        self._max_by_names = max_relays_per_tenant + TO_BE_TOLD
        self._epoll = select.epoll()
        self._complaints = RateLimitedLog()
        self._strangers = PendingConnections(self._epoll, self._on_spoken, self._on_gone)
        self._listeners: dict[int, socket.socket] = {}
        self._spoken: deque[PendingConnection] = deque()
        # In the order they began; by their report's descriptor.
        self._handshakes: dict[int, Handshake] = {}
        # By process id; of whom the peer is not known yet: UNKNOWN.
        self._relays: dict[int, Holder] = {}
        # Certificates by the pidfds of relays that an earlier gate left.
        self._orphans: dict[int, int] = {}
        self._next_look = 0.0
        self._accepts_from = 0.0
        # SIGCHLD must wake epoll_wait(2): its arrival is written here by the C-level handler.
        self._wakeup, self._wakeup_end = socket.socketpair()
        for end in (self._wakeup, self._wakeup_end):
            end.setblocking(False)

    def run(self) -> None:
        """Serve until the broker is gone. Raises ChannelClosed then."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_end.fileno(), warn_on_full_buffer=False)
        self._epoll.register(self._channel, select.EPOLLIN)
        self._epoll.register(self._wakeup, select.EPOLLIN)
        while True:
            for fd, _ in self._epoll.poll(self._timeout_s()):
                self._on_event(fd)
            self._strangers.expire()
            self._begin_handshakes()
            self._accept_again()
            self._look_for_revoked()

    def _on_event(self, fd: int) -> None:
        if fd in self._strangers:
            self._strangers.look(fd)
        elif fd in self._listeners:
            self._accept(self._listeners[fd])
        elif fd in self._handshakes:
            self._on_report(self._handshakes[fd])
        elif fd == self._wakeup.fileno():
            with contextlib.suppress(BlockingIOError):
                while self._wakeup.recv(4096):
                    pass
            self._reap()
        elif fd == self._channel.fileno():
            self._on_broker(*receive_message(self._channel))
        elif fd in self._orphans:
            del self._orphans[fd]
            os.close(fd)

    def _timeout_s(self) -> float | None:
        looks = [self._strangers.next_end_s]
        if self._spoken:
            looks.append(LOOK_S)
        if self._accepts_from:
            looks.append(NO_DESCRIPTORS_PAUSE_S)
        if self._relays or self._orphans:
            looks.append(REVOKED_LOOK_S)
        return min((look for look in looks if look is not None), default=None)

    # --- who comes ---

    def _on_broker(self, message: dict[str, Any], fds: list[int]) -> None:
        match message:
            case {"op": "listen"} if len(fds) == 1:
                listener = socket.socket(fileno=fds[0])
                listener.setblocking(False)
                self._listeners[listener.fileno()] = listener
            case {"op": "left_over", "serial": str(serial)} if len(fds) == 1:
                self._orphans[fds[0]] = int(serial, 16)
            case {"op": "ping"}:
                send_message(self._channel, {"op": "pong"})
                return
            case _:
                close_all(fds)
                return
        self._epoll.register(fds[0], select.EPOLLIN)

    def _accept(self, listener: socket.socket) -> None:
        try:
            self._strangers.accept(listener)
        except OSError as error:
            self._complaints.add("a peer", f"no connection can be taken: {error.strerror}")
            self._strangers.make_room("there are no descriptors left")
            self._listen(events=0)
            self._accepts_from = time.monotonic() + NO_DESCRIPTORS_PAUSE_S

    def _accept_again(self) -> None:
        if self._accepts_from and time.monotonic() >= self._accepts_from:
            self._accepts_from = 0.0
            self._listen(events=select.EPOLLIN)

    def _listen(self, events: int) -> None:
        for listener in self._listeners.values():
            self._epoll.modify(listener, events)

    def _on_gone(self, stranger: PendingConnection, why: str) -> None:
        self._complaints.add(stranger.peer, why)

    def _on_spoken(self, stranger: PendingConnection) -> None:
        if len(self._relays) >= self._max_relays:
            stranger.sock.close()
            self._on_gone(stranger, f"{len(self._relays)} connections are open, the most this daemon takes")
            return
        self._spoken.append(stranger)
        if len(self._spoken) > MAX_HANDSHAKES:
            one = first_of_the_largest(self._spoken) or stranger
            self._spoken.remove(one)
            one.sock.close()
            self._on_gone(one, f"more than {MAX_HANDSHAKES} wait for their handshake")

    def _begin_handshakes(self) -> None:
        if not self._spoken:
            return
        self._read_identity()
        self._make_room()
        while self._spoken and len(self._handshakes) < MAX_HANDSHAKES:
            stranger = first_of_the_fewest(self._spoken, self._handshakes.values())
            self._spoken.remove(stranger)
            with stranger.sock:
                self._fork(stranger)

    def _make_room(self) -> None:
        """End handshakes, as many as others wait: those that have failed, then those that have had their time."""
        before = time.monotonic() - MIN_HANDSHAKE_S
        for _ in range(len(self._handshakes) + len(self._spoken) - MAX_HANDSHAKES):
            handshakes = self._handshakes.values()
            one = first_of_the_largest(handshakes, lambda one: one.has_failed)
            one = one or first_of_the_largest(handshakes, lambda one: one.since <= before)
            if one is None:
                return
            self._give_up(one, f"its handshake goes on, and {len(self._spoken)} others wait")

    def _read_identity(self) -> None:
        """Read the files again if they have changed. Nobody is let in by what they were, nor without them."""
        if self._identity is not None and self._identity.is_current():
            return
        try:
            self._identity = Identity(self._files)
            log_event(LogEvent.GATE_IDENTITY)
            self._complaint_about_files = ""
        except BadIdentity as error:
            self._identity = None
            if str(error) != self._complaint_about_files:
                self._complaint_about_files = str(error)
                log_event(LogEvent.GATE_CLOSED, reason=str(error))

    def _look_for_revoked(self) -> None:
        """End connections whose certificates were revoked after they were made."""
        now = time.monotonic()
        if not (self._relays or self._orphans) or now < self._next_look:
            return
        self._next_look = now + REVOKED_LOOK_S
        self._read_identity()
        revoked = frozenset() if self._identity is None else self._identity.revoked
        for pid, holder in self._relays.items():
            if holder.serial in revoked:
                log_event(LogEvent.RELAY_REVOKED, relay_pid=pid, serial=f"{holder.serial:X}")
                os.kill(pid, signal.SIGKILL)
        for pidfd, serial in self._orphans.items():
            if serial in revoked:
                log_event(LogEvent.RELAY_REVOKED, serial=f"{serial:X}")
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    # --- relays ---

    def _fork(self, stranger: PendingConnection) -> None:
        if self._identity is None:
            self._on_gone(stranger, "this node has no certificate that can be used")
            return
        with contextlib.ExitStack() as undo:
            try:
                inner, relays_inner = (undo.enter_context(end) for end in socket.socketpair())
                report, relays_report = (undo.enter_context(end) for end in channel_pair())
                refuse_descriptors(inner)
                refuse_descriptors(report)
                pid = os.fork()
            except OSError as error:
                self._on_gone(stranger, f"no process can be started: {error.strerror}")
                return
            if pid == 0:
                self._become_relay(stranger.sock, relays_inner, relays_report, self._identity)
            self._relays[pid] = UNKNOWN
            undo.pop_all()
        relays_inner.close()
        relays_report.close()
        self._epoll.register(report, select.EPOLLIN)
        self._handshakes[report.fileno()] = Handshake(
            pid, stranger.peer, stranger.source, report, inner, time.monotonic()
        )
        # Whoever is to reap it should this process die.
        send_message(self._channel, {"op": "began", "pid": pid})

    def _become_relay(
        self, net: socket.socket, inner: socket.socket, report: socket.socket, identity: Identity
    ) -> NoReturn:
        status = EXIT_BUG
        try:
            stop_logging()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            net.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            inner.setblocking(False)
            self._identity = None
            status = live(net, inner, report, identity)
        except BaseException:
            # A bug of ours. Nothing of the gate's may go on in this process.
            traceback.print_exc(file=sys.stderr)
        finally:
            with contextlib.suppress(OSError):
                sys.stderr.flush()
            os._exit(status)

    def _on_report(self, handshake: Handshake) -> None:
        try:
            message, fds = receive_message(handshake.report)
        except ChannelClosed:
            self._forget(handshake)
            return
        close_all(fds)
        match message:
            case {"op": "verified"}:
                holder = _holder_of(message)
                if holder is None:
                    self._give_up(handshake, "its relay says what none says")
                    return
                if sum(other.names == holder.names for other in self._relays.values()) >= self._max_by_names:
                    self._give_up(handshake, f"{', '.join(holder.names)} has too many connections")
                    return
                self._relays[handshake.pid] = holder
                arrival = {"op": "arrived", "pid": handshake.pid, "peer": handshake.peer, "names": list(holder.names)}
                arrival["serial"] = f"{holder.serial:X}"
                send_message(self._channel, arrival, (handshake.inner.fileno(),))
            case {"op": "failed", "reason": str(reason)} if not handshake.has_failed:
                self._complaints.add(handshake.peer, reason)
                handshake.has_failed = True
                return
        self._forget(handshake)

    def _give_up(self, handshake: Handshake, why: str) -> None:
        if not handshake.has_failed:
            self._complaints.add(handshake.peer, why)
        if handshake.pid in self._relays:
            os.kill(handshake.pid, signal.SIGKILL)
        self._forget(handshake)

    def _forget(self, handshake: Handshake) -> None:
        del self._handshakes[handshake.report.fileno()]
        self._epoll.unregister(handshake.report)
        handshake.report.close()
        handshake.inner.close()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._relays.pop(pid, None)
            if status:
                log_event(LogEvent.RELAY_ENDED, relay_pid=pid, reason=exit_text(status))
            send_message(self._channel, {"op": "left", "pid": pid})


def _holder_of(message: dict[str, Any]) -> Holder | None:
    """Whom a relay speaks of; None if no relay of ours would say that: one that was taken over may say anything."""
    match message:
        case {"names": list(names), "serial": str(serial)} if len(serial) <= MAX_SERIAL_CHARS:
            if all(isinstance(name, str) for name in names) and are_bounded(names):
                with contextlib.suppress(ValueError):
                    return Holder(tuple(names), int(serial, 16))
    return None


def get_ready() -> None:
    """Have done before the first fork what would be done in each relay.

    What is alive now is alive in every relay: keep the collector from touching, and so copying, its pages.
    """
    preload()
    gc.collect()
    gc.freeze()
