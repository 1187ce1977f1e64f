"""Connections that have not begun a TLS handshake yet, and the rule that evicts one when there are too many.

A pending connection costs a descriptor and no process. It has a bounded time to send one whole TLS record that begins
with a ClientHello. Only then does the acceptor fork a relay for it.

A record is five bytes (type, version, length) and its content (RFC 8446, 5.1). A client's first record holds its
ClientHello, handshake message type 1 (section 4), or the beginning of it.

Eviction closes the oldest connection of the source with the most connections. So a host that floods the node evicts
only its own connections.
"""

import ipaddress
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, Protocol, TypeVar

from gpulease.protocol.fast_dataclass import dataclass

MAX_PENDING: Final = 256
"""Maximum number of pending connections. Another connection evicts one of them."""

HELLO_TIMEOUT_S: Final = 5.0
"""Longest time, in seconds, from the connection to the end of its first record."""

ACCEPTS_AT_A_TIME: Final = 64
"""Number of connections accepted in a row before the acceptor serves its other descriptors."""

PEEK_BYTES: Final = 6
"""The bytes that show whether a connection begins a handshake: a record's header and the message type."""

RECORD_HEADER_BYTES: Final = 5

MAX_RECORD_BYTES: Final = 1 << 14
"""The largest content of a record that is not encrypted (RFC 8446, 5.1)."""

NOT_TLS_ALERT: Final = bytes((21, 3, 3, 0, 2, 2, 10))
"""A fatal alert, unexpected_message (RFC 8446, 6.2), for a peer that does not speak TLS."""

SITE_PREFIX_BITS: Final = 64
"""Length of the IPv6 prefix that one site has for itself (RFC 4291, 2.5.4)."""

_HANDSHAKE: Final = 22
_MAJOR_VERSION: Final = 3
_CLIENT_HELLO: Final = 1


@dataclass(slots=True, eq=False)
class PendingConnection:
    """A connection before its handshake.

    Attributes:
        sock: The connected socket, nonblocking.
        peer: The peer's address, for the log.
        source: The source to which the connection counts, by `source_of`.
        since_s: The time of its arrival, by time.monotonic().
    """

    sock: socket.socket
    peer: str
    source: str
    since_s: float


OnHello = Callable[[PendingConnection], None]
OnRefused = Callable[[PendingConnection, str], None]


class PendingConnections:
    """Accepts connections and passes on each that has sent a whole ClientHello record.

    Args:
        epoll: Watches the sockets; its owner calls `on_readable` with a ready descriptor.
        on_hello: Called with a connection that began a handshake. It then owns the socket, and the bytes are still in
            the kernel.
        on_refused: Called with a connection that was closed, and the reason.
    """

    def __init__(self, epoll: "select.epoll", on_hello: OnHello, on_refused: OnRefused) -> None:
        self._epoll = epoll
        self._on_hello = on_hello
        self._on_refused = on_refused
        # By descriptor, oldest first.
        self._pending: dict[int, PendingConnection] = {}

    def __contains__(self, fd: int) -> bool:
        return fd in self._pending

    @property
    def next_timeout_s(self) -> float | None:
        """Seconds until the oldest connection times out; None without connections."""
        oldest = next(iter(self._pending.values()), None)
        return None if oldest is None else max(0.0, oldest.since_s + HELLO_TIMEOUT_S - time.monotonic())

    def accept(self, listener: socket.socket) -> None:
        """Accept connections. Raises OSError if this process, or the host, has no descriptor left."""
        for _ in range(ACCEPTS_AT_A_TIME):
            try:
                sock, address = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            self._add(sock, f"{address[0]} port {address[1]}", source_of(address[0]))

    def on_readable(self, fd: int) -> None:
        """Peek at the bytes that have arrived on one connection; the relay reads them later."""
        connection = self._pending[fd]
        try:
            # Step 1: check the first six bytes, which show the kind of message that the peer has begun to send.
            begin = connection.sock.recv(PEEK_BYTES, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError as error:
            self._refuse(connection, f"the connection broke: {error.strerror}")
            return
        if len(begin) < PEEK_BYTES:
            # The kernel reports fewer bytes than SO_RCVLOWAT only when no more will come.
            self._refuse(connection, "it closed the connection without sending a handshake")
            return
        # Step 2: a handshake contains its record's length. Wait in the kernel for the whole record, then pass the
        # connection on.
        needed = first_record_bytes(begin)
        if needed is None:
            self._refuse_plaintext(connection)
        elif len(connection.sock.recv(needed, socket.MSG_PEEK)) >= needed:
            self._remove(connection)
            self._on_hello(connection)
        elif connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) != needed:
            # The kernel wakes the acceptor again when the whole record has arrived.
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, needed)
        else:
            # This process was woken although fewer bytes have come than it waits for, so no more bytes will come.
            self._refuse(connection, "it closed the connection in the middle of its first message")

    def expire(self) -> None:
        """Close the connections that have timed out."""
        while self._pending and self.next_timeout_s == 0:
            self._refuse(next(iter(self._pending.values())), f"no handshake began within {HELLO_TIMEOUT_S:g} s")

    def evict_one(self, reason: str) -> None:
        victim = oldest_of_largest_source(self._pending.values())
        if victim is not None:
            self._refuse(victim, reason)

    def _add(self, sock: socket.socket, peer: str, source: str) -> None:
        try:
            sock.setblocking(False)
            # The kernel wakes the acceptor when it can decide (socket(7)), not for each byte of a slow peer.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, PEEK_BYTES)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._epoll.register(sock, select.EPOLLIN)
        except OSError:
            sock.close()
            return
        # The new connection is the last in order. If there are too many, the oldest of the largest source is closed,
        # perhaps this one.
        self._pending[sock.fileno()] = PendingConnection(sock, peer, source, time.monotonic())
        if len(self._pending) > MAX_PENDING:
            self.evict_one(f"more than {MAX_PENDING} connections have not begun their handshake")

    def _refuse_plaintext(self, connection: PendingConnection) -> None:
        try:
            connection.sock.send(NOT_TLS_ALERT)
            connection.sock.shutdown(socket.SHUT_WR)
            # Closing on unread bytes sends a reset, which discards the alert at the peer.
            connection.sock.recv(1 << 16)
        except OSError:
            pass  # the peer gets no alert
        self._refuse(connection, "it does not speak TLS")

    def _refuse(self, connection: PendingConnection, reason: str) -> None:
        self._remove(connection)
        connection.sock.close()
        self._on_refused(connection, reason)

    def _remove(self, connection: PendingConnection) -> None:
        del self._pending[connection.sock.fileno()]
        self._epoll.unregister(connection.sock)


def first_record_bytes(begin: bytes) -> int | None:
    """Return the length of the first record with its header, given its first PEEK_BYTES; None if it is not TLS."""
    kind, major, _, high, low, message = begin[:PEEK_BYTES]
    length = high << 8 | low
    # Four bytes are the header of a handshake message (RFC 8446, section 4), so no ClientHello is shorter.
    if (kind, major, message) != (_HANDSHAKE, _MAJOR_VERSION, _CLIENT_HELLO) or not 4 <= length <= MAX_RECORD_BYTES:
        return None
    return RECORD_HEADER_BYTES + length


# --- eviction ---


class HasSource(Protocol):
    """An item that counts to the source that it came from."""

    @property
    def source(self) -> str:
        """The address or site to which the item counts, by `source_of`."""


Item = TypeVar("Item", bound=HasSource)


def source_of(host: str) -> str:
    """Return the source to which an address counts: an IPv4 address itself, or an IPv6 address's site."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.version == 4:
        return str(address)
    return str(ipaddress.ip_network((int(address), SITE_PREFIX_BITS), strict=False))


def oldest_of_largest_source(items: Iterable[Item], may_go: Callable[[Item], bool] = lambda item: True) -> Item | None:
    """Return the first item that may be removed, from the source with the most items; None if there is none."""
    everything = list(items)
    counts = Counter(item.source for item in everything)
    return max(filter(may_go, everything), key=lambda item: counts[item.source], default=None)


def oldest_of_smallest_source(waiting: Iterable[Item], served: Iterable[HasSource]) -> Item:
    """Return the first waiting item of the source with the fewest items being served."""
    counts = Counter(item.source for item in served)
    return min(waiting, key=lambda item: counts[item.source])
