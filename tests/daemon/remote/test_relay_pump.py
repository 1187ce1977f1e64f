"""A pump between two pairs of sockets: what goes in comes out, whatever the pieces, and ends are passed on."""

import _ssl
import ctypes
import random
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease.daemon.remote import relay
from gpulease.daemon.remote.relay import BUFFER_BYTES, Pump
from helpers.tls_pair import shaken

WAIT_S = 120.0
RIG_S = 60.0
SSL_KEY_UPDATE_REQUESTED = 1


class Rig:
    """A pump in a thread, a tenant's socket and TLS, and the socket of whom it speaks to."""

    def __init__(self, folder: Path, ends_in_s: float) -> None:
        server, self.client = shaken(folder)
        self.net, theirs = socket.socketpair()
        self.inner, relays = socket.socketpair()
        for sock in (self.net, self.inner):
            sock.settimeout(WAIT_S)
        self._socks = (theirs, relays)
        for sock in self._socks:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        ends = time.monotonic() + ends_in_s
        self.pump = Pump(theirs, relays, server.tls, server.incoming, server.outgoing, ends)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        self.pump.run()
        for sock in self._socks:
            sock.close()

    def ask_for_new_keys(self, count: int) -> bytes:
        """What a tenant says that wants the other end to change its keys so often (RFC 8446, 4.6.3)."""
        library = ctypes.CDLL(_ssl.__file__)
        # What ssl.SSLObject does not offer: behind the object's head and its socket is OpenSSL's own.
        tls = ctypes.c_void_p.from_address(id(vars(self.client.tls)["_sslobj"]) + 3 * ctypes.sizeof(ctypes.c_void_p))
        said = bytearray()
        for _ in range(count):
            assert library.SSL_key_update(tls, SSL_KEY_UPDATE_REQUESTED) == 1
            assert library.SSL_do_handshake(tls) == 1
            said += self.client.outgoing.read()
        return bytes(said)

    def say(self, data: bytes) -> None:
        """As the tenant."""
        view = memoryview(data)
        while view:
            view = view[self.client.tls.write(view) :]
        self.net.sendall(self.client.outgoing.read())

    def hear(self, count: int) -> bytes:
        """So many bytes as the tenant, fewer if there are no more."""
        heard = bytearray()
        while len(heard) < count:
            try:
                piece = self.client.tls.read(count - len(heard))
                if not piece:
                    break  # close_notify
                heard += piece
            except ssl.SSLZeroReturnError:
                break  # the same, where this end has said it too
            except ssl.SSLWantReadError:
                arrived = self.net.recv(1 << 16)
                if not arrived:
                    break
                self.client.incoming.write(arrived)
        return bytes(heard)

    def is_over(self, within_s: float = WAIT_S) -> bool:
        """Whether the relay's work is done."""
        self.thread.join(within_s)
        return not self.thread.is_alive()


@pytest.fixture
def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(tmp_path / "pki", getattr(request, "param", RIG_S))
    yield rig
    rig.net.close()
    rig.inner.close()
    assert rig.is_over()


def send_slowly(sock: socket.socket, data: bytes) -> None:
    """Raises TimeoutError if nothing is taken for the socket's time limit, however long all of it takes."""
    view = memoryview(data)
    while view:
        view = view[sock.send(view) :]


def exactly(sock: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count and (piece := sock.recv(count - len(found))):
        found += piece
    return bytes(found)


def test_bytes_of_any_size_come_whole_and_in_order_both_ways_at_once(rig: Rig) -> None:
    chance = random.Random(3)
    pieces = [chance.randbytes(chance.choice((1, 100, 16_384, 16_385, 300_000, 1_000_000))) for _ in range(12)]
    total = b"".join(pieces)

    def send() -> None:
        for piece in pieces:
            rig.say(piece)

    def send_back() -> None:
        rig.inner.sendall(total)

    heard: list[bytes] = []
    threads = [
        threading.Thread(target=work) for work in (send_back, lambda: heard.append(exactly(rig.inner, len(total))))
    ]
    for thread in threads:
        thread.start()
    # The tenant's TLS is used by one thread: it says all, then hears all; the relay holds back meanwhile.
    send()
    assert rig.hear(len(total)) == total
    for thread in threads:
        thread.join()
    assert heard == [total]


def test_a_tenants_end_is_passed_on_and_answers_still_come(rig: Rig) -> None:
    rig.say(b"last words")
    rig.net.shutdown(socket.SHUT_WR)
    assert exactly(rig.inner, 100) == b"last words"
    rig.inner.sendall(b"an answer")
    rig.inner.close()
    assert rig.hear(100) == b"an answer"
    assert rig.is_over()


def test_the_other_ends_last_words_arrive_though_the_tenant_goes_on(rig: Rig) -> None:
    rig.inner.sendall(b"goodbye")
    rig.inner.close()
    for _ in range(20):
        rig.say(bytes(10_000))
    assert rig.hear(100) == b"goodbye"
    rig.net.close()
    assert rig.is_over()


def test_a_tenant_that_does_not_read_its_last_words_is_not_waited_for(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "LINGER_S", 0.2)
    rig.inner.settimeout(0.2)
    with pytest.raises(TimeoutError):
        rig.inner.sendall(bytes(8 << 20))
    rig.inner.close()
    assert rig.is_over(RIG_S / 2), "long before the connection's own end"


def test_what_comes_behind_the_tenants_end_is_not_looked_at(rig: Rig) -> None:
    rig.say(b"all")
    with pytest.raises(ssl.SSLWantReadError):
        rig.client.tls.unwrap()
    rig.net.sendall(rig.client.outgoing.read() + bytes(50_000))
    assert exactly(rig.inner, 100) == b"all"
    rig.inner.close()
    assert rig.hear(1) == b""
    rig.net.close()
    assert rig.is_over()


def test_bytes_that_are_not_the_tenants_end_it(rig: Rig) -> None:
    rig.net.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))
    assert rig.is_over()
    assert rig.net.recv(1)[0] in (0x15, 0x17)  # an alert
    assert rig.inner.recv(1) == b""


@pytest.mark.parametrize("rig", [0.3], indirect=True)
def test_it_ends_when_the_certificate_does(rig: Rig) -> None:
    assert rig.is_over()
    assert rig.hear(1) == b""
    assert rig.inner.recv(1) == b""


@pytest.mark.exhaustive
def test_a_tenant_that_has_tls_answer_and_reads_nothing_is_not_listened_to(rig: Rig) -> None:
    flood = rig.ask_for_new_keys(50_000)
    assert len(flood) > 4 * BUFFER_BYTES
    rig.net.settimeout(1.0)
    with pytest.raises(TimeoutError):
        send_slowly(rig.net, flood)
    # What it had decrypted of one buffer comes on top.
    assert rig.pump._outgoing.pending <= 3 * BUFFER_BYTES
