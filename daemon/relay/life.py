"""A relay from its birth in the gate to its end: give up all else, shake hands, say whose connection it is, relay."""

import contextlib
import gc
import select
import socket
import ssl
import time
from dataclasses import dataclass
from typing import Any, Final

from gpulease.daemon.channel import ChannelClosed, send_message
from gpulease.daemon.relay.confinement import confine
from gpulease.daemon.relay.identity import Identity
from gpulease.daemon.relay.naming import MAX_NAME_BYTES, MAX_NAMES, MAX_SERIAL_CHARS, are_bounded
from gpulease.daemon.relay.pump import BUFFER_BYTES, Pump

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
