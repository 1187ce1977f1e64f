"""TLS 1.3 (RFC 8446) on a client's nonblocking socket: a stream with a socket's methods, and the channels over it.

A channel works as usual, with a `TlsStream` in place of its socket. The channels here handle two differences: the
stream can hold received bytes that the kernel does not report, and accepted bytes that wait for room. The channels
accept the end of a connection without TLS's close_notify: frames carry their length, so a truncation is detected.
`error_for` turns a TLS error into one of the library's errors, which states which side is at fault and what to do.
"""

import errno
import os
import select
import socket
import ssl
import threading
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, cast

from gpulease.client.errors import Denied, Disconnected, GpuLeaseError, InvalidRequest, Untrusted
from gpulease.client.transport.channel import Channel
from gpulease.client.transport.coalescing_socket import CoalescingSocket
from gpulease.client.transport.credentials import SecuredAddress, TlsFiles
from gpulease.client.transport.spin_policy import SpinPolicy
from gpulease.protocol.address import Address
from gpulease.protocol.foreign_text import encodable

RECORD_BYTES: Final = 16 << 10
"""Maximum number of bytes of data in a record (RFC 8446, section 5.1)."""

BATCH_BYTES: Final = 256 << 10
"""Number of bytes that are received or encrypted together: a system call per record would cost more than the record."""

MAX_CONTEXTS: Final = 8
"""Maximum number of TLS contexts in the cache: reading the files again costs more than the rest of a handshake."""

_NOTHING: Final = memoryview(b"")


class TlsEnded(OSError):
    """TLS failed.

    Attributes:
        error: The error to raise to the caller.
    """

    def __init__(self, error: GpuLeaseError) -> None:
        super().__init__(errno.EPROTO, error.message)
        self.error = error


def context_of(files: TlsFiles) -> ssl.SSLContext:
    """Return the TLS context for the files' current contents. Raises InvalidRequest if they can't be used."""
    # The files' inode, size and time are part of the cache's key, so that a renewed certificate is read again.
    try:
        stamps = tuple((status.st_ino, status.st_size, status.st_mtime_ns) for status in map(os.stat, _paths(files)))
    except OSError as error:
        raise _unusable(f"the file {error.filename}", error) from None
    return _context_of(files, stamps)


def _paths(files: TlsFiles) -> tuple[str, ...]:
    return (str(files.certificate), str(files.key), str(files.ca))


@lru_cache(maxsize=MAX_CONTEXTS)
def _context_of(files: TlsFiles, stamps: tuple[tuple[int, int, int], ...]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Allow only TLS 1.3, as the daemon requires.
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(files.ca)
    except OSError as error:
        raise _unusable(f"the CA's certificate {files.ca}", error) from None
    try:
        # Pass an empty password, because a prompt would block a program that runs unattended.
        context.load_cert_chain(str(files.certificate), files.key, "")
    except OSError as error:
        raise _unusable(f"the certificate {files.certificate} with the key {files.key}", error) from None
    return context


def _unusable(subject: str, error: OSError) -> InvalidRequest:
    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    # A path may contain any bytes, even bytes that can't be encoded in a message.
    return InvalidRequest(
        f"{encodable(subject)} can't be used: {reason or error}", "Check GPULEASE_TLS_CERTIFICATE, _KEY and _CA"
    )


class TlsStream:
    """A connected socket and the TLS on it.

    One thread may send while another receives. Only one thread at a time uses OpenSSL's state.

    Attributes:
        has_buffered: True if bytes can be received although the kernel has none.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, address: SecuredAddress) -> None:
        self._sock = sock
        # OpenSSL works on two buffers in memory; this class moves bytes between them and the socket.
        self._address = address
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=address.host)
        self._lock = threading.RLock()
        self._raw = memoryview(bytearray(BATCH_BYTES))
        # Encrypted bytes that the socket has not accepted; and whether a send was interrupted inside a record.
        self._unsent = _NOTHING
        self._is_torn = False
        self._ended: TlsEnded | None = None
        self.has_buffered = False

    # --- a socket's methods ---

    def fileno(self) -> int:
        """Return the socket's descriptor. poll(2) does not report bytes that are buffered here (`has_buffered`)."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close the socket without a close_notify: frames carry their length."""
        self._sock.close()

    def shutdown(self, how: int) -> None:
        """Shut down the socket, like socket.shutdown."""
        self._sock.shutdown(how)

    def send(self, data: Any) -> int:
        """Accept bytes, and return how many. Some may wait in this stream for room (`has_unsent`).

        Raises BlockingIOError or another OSError. An interrupt makes the connection unusable: records are numbered, so
        none can be sent twice or skipped.
        """
        self._begin_sending()
        taken = 0
        self._lock.acquire()
        try:
            # First send the bytes that an earlier call has left, because records must reach the node in order.
            if not self._flush():
                raise BlockingIOError(errno.EAGAIN, "no room")
            view = memoryview(data)
            # Encrypt only as much as the socket accepts. The other bytes stay with the caller.
            while taken < len(view) and not self._unsent:
                taken = self._encrypt(view, taken)
                self._flush()
        except ssl.SSLError as error:
            raise self._end(error) from None
        except OSError:
            # Either nothing was accepted, or the peer has closed the connection and no byte can reach it.
            self._is_torn = False
            raise
        finally:
            self._lock.release()
        # Reset this last: after an interrupt before this point, it is unknown how much was accepted.
        self._is_torn = False
        return taken

    def sendmsg(self, parts: Sequence[memoryview]) -> int:
        """Accept several buffers, as `send` does. Returns how many bytes were accepted."""
        # Small buffers share one record, because encrypting and sending has a fixed cost per record.
        if len(parts) == 1 or sum(map(len, parts)) <= RECORD_BYTES:
            return self.send(b"".join(parts) if len(parts) > 1 else parts[0])
        taken = 0
        # Buffers too large for one record go one by one, until the socket accepts no more.
        for part in parts:
            try:
                count = self.send(part)
            except BlockingIOError:
                if not taken:
                    raise
                break
            taken += count
            if count < len(part):
                break
        return taken

    def recv_into(self, buffer: memoryview) -> int:
        """Receive, and return how many bytes; 0 at the end. Raises BlockingIOError, TlsEnded or OSError."""
        with self._lock:
            # First decrypt bytes that were received earlier, and only then receive.
            count = self._decrypt_into(buffer)
            # TLS may consume a whole receive without yielding data, for example for a session ticket.
            while not count:
                if self._ended is not None:
                    raise self._ended
                arrived = self._sock.recv_into(self._raw)
                if not arrived:
                    return 0
                self._incoming.write(self._raw[:arrived])
                count = self._decrypt_into(buffer)
            # TLS itself has something to send, such as the reply to a key update.
            if self._outgoing.pending and not self._is_torn:
                self._flush()
            return max(0, count)

    # --- beyond a socket's methods ---

    @property
    def has_unsent(self) -> bool:
        """True while accepted bytes wait for room in the socket."""
        return bool(self._unsent) or self._outgoing.pending > 0

    def flush(self) -> bool:
        """Send the bytes that wait for room. Returns True if none are left. Raises OSError."""
        self._begin_sending()
        with self._lock:
            is_done = self._flush()
        self._is_torn = False
        return is_done

    def shake_hands(self) -> bool:
        """Continue the handshake. Returns False if it must wait. Raises TlsEnded."""
        while True:
            try:
                # Step 1: OpenSSL processes the bytes that have arrived, and produces the bytes to send.
                self._tls.do_handshake()
                is_done = True
            except ssl.SSLWantReadError:
                is_done = False
            except (ssl.SSLError, ssl.CertificateError) as error:
                # Send the alert first, so that the node's log has the reason, too.
                self._flush_alert()
                raise self._end(error) from None
            # Step 2: send those bytes, then receive the node's next flight.
            try:
                # The handshake is complete only when the last flight was sent, because the node waits for it.
                if self._flush() and is_done:
                    return True
                arrived = 0 if is_done else self._sock.recv_into(self._raw)
            except BlockingIOError:
                return False
            except OSError as error:
                raise self._end(error) from None
            if is_done:
                return False
            if not arrived:
                raise self._end(ssl.SSLEOFError("closed"))
            self._incoming.write(self._raw[:arrived])

    def disown(self) -> None:
        """Leave unsent bytes to the parent process, after a fork."""
        self._lock = threading.RLock()
        self._unsent, self._is_torn = _NOTHING, True

    # --- under the lock ---

    def _begin_sending(self) -> None:
        # During a send, the stream counts as torn until it is known how many bytes were accepted.
        if self._is_torn:
            raise OSError(errno.ECONNABORTED, "a send was interrupted in the middle of a record")
        self._is_torn = True

    def _encrypt(self, view: memoryview, at: int) -> int:
        # Encrypt one batch, which limits the memory and is sent with one system call. Its records have the largest
        # size, because each record has a fixed cost.
        end = min(len(view), at + BATCH_BYTES)
        while at < end:
            at += self._tls.write(view[at : min(end, at + RECORD_BYTES)])
        self._unsent = memoryview(self._outgoing.read())
        return at

    def _flush(self) -> bool:
        # First send the encrypted bytes that were read from TLS earlier, then the bytes that it has produced since.
        while self._unsent or self._outgoing.pending:
            if not self._unsent:
                self._unsent = memoryview(self._outgoing.read())
            try:
                self._unsent = self._unsent[self._sock.send(self._unsent) :]
            except BlockingIOError:
                return False
        return True

    def _flush_alert(self) -> None:
        """Send the alert about the error, if the socket has room for it."""
        try:
            # The handshake failed anyway; an alert that can't be sent changes nothing.
            self._flush()
        except OSError:
            self._unsent = _NOTHING

    def _decrypt_into(self, buffer: memoryview) -> int:
        """Decrypt into a buffer, and return how many bytes; -1 at the end of the stream."""
        count, room = 0, len(buffer)
        self.has_buffered = False
        try:
            # Several records may have arrived together: decrypt until the buffer is full or none is left.
            while count < room and (self._incoming.pending or self._tls.pending()):
                # With a buffer, read() returns the count; its type stub says otherwise.
                got = cast(int, self._tls.read(room - count, buffer[count:]))
                if not got:
                    return count or -1  # close_notify
                count += got
        except ssl.SSLWantReadError:
            return count
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return count or -1
        except ssl.SSLError as error:
            self._ended = self._end(error)
            self.has_buffered = True  # the error, which the next receive raises
            return count
        self.has_buffered = self._incoming.pending > 0 or self._tls.pending() > 0
        return count

    def _end(self, error: Exception) -> TlsEnded:
        return TlsEnded(error_for(error, self._address))


class TlsChannel(Channel):
    """A control connection's channel over TLS. A session continues with a `TlsCoalescingSocket`."""

    def __init__(self, stream: TlsStream, address: Address) -> None:
        super().__init__(cast(socket.socket, stream), address)
        self.stream = stream

    @property
    def has_unsent(self) -> bool:  # type: ignore[override]  # read-only, as in CoalescingSocket
        """True while accepted bytes wait in the stream for room."""
        return self.stream.has_unsent

    def push(self, parts: deque[memoryview]) -> bool:
        """Send `parts`; if it is empty, the bytes that wait in the stream."""
        return super().push(parts) if parts else flush_for(self, self.stream)

    def doze(self, *, for_room: bool) -> bool:
        """Prepare to sleep on the socket. Returns False if the stream has bytes that poll(2) would not report."""
        return can_doze(self.stream, for_room=for_room)

    def _receive_into(self, buffer: memoryview, counts: list[int]) -> None:
        counts.append(receive_explained(self, self.stream, buffer))


def flush_for(channel: Channel, stream: TlsStream) -> bool:
    """Send the bytes that wait in the stream, as `Channel.push` does for the channel's bytes."""
    try:
        return stream.flush()
    except OSError as error:
        channel.drain(error)
        return False


def can_doze(stream: TlsStream, *, for_room: bool) -> bool:
    """Return whether poll(2) will report the awaited bytes, or the room to send."""
    if not stream.has_buffered:
        return True
    if not for_room:
        return False
    # The caller waits for room, even if bytes have come, so it may sleep unless there is room now.
    room = select.poll()
    room.register(stream, select.POLLOUT)
    return not room.poll(0)


def receive_explained(channel: Channel, stream: TlsStream, buffer: memoryview) -> int:
    """Receive. If TLS failed, store the reason in the channel's link."""
    try:
        return stream.recv_into(buffer)
    except TlsEnded as ended:
        channel.link.break_off(ended.error.failure, is_explained=True)
        raise


class TlsCoalescingSocket(CoalescingSocket):
    """A session's channel over TLS. Bytes that left the outbox may wait in the stream; they count as unsent."""

    def __init__(self, channel: Channel, spin: SpinPolicy) -> None:
        """Take over the channel that attached. Raises TypeError unless it is a TlsChannel."""
        if not isinstance(channel, TlsChannel):
            raise TypeError(f"{channel!r} does not belong to a TLS connection")
        self.stream = channel.stream
        super().__init__(channel, spin)

    @property
    def has_unsent(self) -> bool:  # type: ignore[override]  # read-only, as in CoalescingSocket
        """True while the outbox or the stream has bytes to send."""
        return bool(self._outbox.data) or self.stream.has_unsent

    def push(self, parts: deque[memoryview]) -> bool:
        """Send the outbox and `parts`; if both are empty, the bytes that wait in the stream."""
        with self._lock:
            if parts or self._outbox.data:
                return super().push(parts)
            return flush_for(self, self.stream)

    def doze(self, *, for_room: bool) -> bool:
        """Prepare to sleep on the socket. Returns False if the stream has bytes that poll(2) would not report."""
        return can_doze(self.stream, for_room=for_room)

    def after_fork(self) -> None:
        """In the child: leave the outbox, the lock and the stream to the parent."""
        super().after_fork()
        self.stream.disown()

    def _receive_into(self, buffer: memoryview, counts: list[int]) -> None:
        counts.append(receive_explained(self, self.stream, buffer))

    def _put_first(self, frame: bytes | memoryview) -> None:
        super()._put_first(frame)
        self._schedule_rest()

    def _schedule_rest(self) -> None:
        if self.stream.has_unsent:
            self._notice()
        else:
            super()._schedule_rest()

    def _flush(self) -> bool:
        return super()._flush() and (not self.stream.has_unsent or self.stream.flush())


# --- errors ---

_NEW_ONE: Final = "Ask the operator of the node for a new certificate"

_REFUSED: Final = {
    "CERTIFICATE_EXPIRED": ("has expired, or the node's revocation list has", _NEW_ONE),
    "CERTIFICATE_REVOKED": ("was revoked", _NEW_ONE),
    "UNKNOWN_CA": ("comes from a CA that the node does not trust", "Ask the operator which CA the node trusts"),
    "CERTIFICATE_REQUIRED": ("is missing", "Set GPULEASE_TLS_CERTIFICATE and GPULEASE_TLS_KEY"),
    "BAD_CERTIFICATE": ("is not accepted by the node", _NEW_ONE),
    "UNSUPPORTED_CERTIFICATE": ("is not a certificate for tenants", _NEW_ONE),
    "CERTIFICATE_UNKNOWN": ("is not accepted by the node", _NEW_ONE),
}
"""Alerts about this end's certificate (RFC 8446, section 6.2), as OpenSSL names them after `ALERT_`."""

_HOST_MISMATCH: Final = (62, 64)
"""X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH (x509_vfy.h)."""

_EXPIRED: Final = (9, 10)
"""X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""

_NOT_TLS: Final = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")


def error_for(error: Exception, address: SecuredAddress) -> GpuLeaseError:
    """Return the library's error for an error of TLS, or of the socket under it."""
    # Check for the node's certificate, then a closed handshake, then alerts about this tenant's certificate, then the
    # rest.
    if isinstance(error, ssl.SSLCertVerificationError):
        return _untrusted(error, address)
    if isinstance(error, ssl.SSLEOFError):
        reason_text = f"{address} closed the connection during the handshake"
        return Disconnected(reason_text, "The node has no room for more connections, or is overloaded: see its log")
    if not isinstance(error, ssl.SSLError):
        return Disconnected(f"the connection to {address} broke: {getattr(error, 'strerror', None) or error}")
    reason = error.reason or ""
    alert = reason.partition("ALERT_")[2]
    if alert in _REFUSED:
        reason_text, hint = _REFUSED[alert]
        return Denied(f"{address} refused this tenant: the certificate {address.files.certificate} {reason_text}", hint)
    if alert == "PROTOCOL_VERSION":
        return Disconnected(f"{address} does not speak TLS 1.3", "Is it gpuleased?")
    if reason in _NOT_TLS:
        hint = "For a daemon's plain TCP port on this host, write tcp:HOST:PORT"
        return Disconnected(f"{address} does not speak TLS", hint)
    return Disconnected(f"TLS with {address} failed: {reason.lower().replace('_', ' ') or error}")


def _untrusted(error: ssl.SSLCertVerificationError, address: SecuredAddress) -> Untrusted:
    # The usual causes are a wrong name, a wrong time and a wrong CA.
    if error.verify_code in _HOST_MISMATCH:
        reason = f"its certificate is not for the name {address.host!r}"
        hint = "Use a name that the node's certificate contains"
    elif error.verify_code in _EXPIRED:
        reason = f"its certificate is not valid now ({error.verify_message})"
        hint = "Check this host's clock; if it is right, the node's operator must renew the certificate"
    else:
        reason = f"its certificate can't be verified with {address.files.ca} ({error.verify_message})"
        hint = "GPULEASE_TLS_CA must contain the certificate of the node's CA"
    return Untrusted(f"{address} could not prove its identity: {reason}", hint)
