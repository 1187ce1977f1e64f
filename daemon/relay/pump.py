"""What a relay does once its handshake is done: bytes from TLS to a socket and back.

Each direction holds so many bytes and reads no more until they are gone, so a peer that does not read stops the other
from sending, as on one socket. The end of one direction is passed on and leaves the other alone. Waiting is poll(2):
a relay between two silent ends costs nothing.
"""

import contextlib
import os
import select
import socket
import ssl
import time
from typing import Final, cast

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
