"""A stream's promises to the channels on it: what is taken over goes out once, and what is here is told of."""

import select
import socket
import ssl
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulease.client.errors import Disconnected
from gpulease.client.transport.credentials import SecuredAddress, TlsFiles
from gpulease.client.transport.tls import TlsChannel, TlsEnded, TlsStream
from helpers.tls_pair import End, contexts

ADDRESS = SecuredAddress("localhost", 1, TlsFiles("c", "k", "a"))


class Rig:
    """A stream whose far end is in the test's hands."""

    def __init__(self, folder: Path) -> None:
        server, client = contexts(folder)
        self.far = End(server, is_server=True)
        sock, self.net = socket.socketpair()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        self.net.settimeout(60)
        self.stream = TlsStream(sock, client, ADDRESS)
        self.channel = TlsChannel(self.stream, ADDRESS)
        while not self.stream.shake_hands():
            self.far.incoming.write(self.net.recv(1 << 16))
            self.far.shake()
            self.net.sendall(self.far.outgoing.read())
        self.far.incoming.write(self.net.recv(1 << 16))
        self.far.shake()

    def heard(self, count: int) -> bytes:
        """So many bytes at the far end."""
        found = b""
        while len(found) < count:
            try:
                found += self.far.tls.read(count - len(found))
            except ssl.SSLWantReadError:
                self.stream.flush()
                self.far.incoming.write(self.net.recv(1 << 16))
        return found

    def say(self, data: bytes) -> bytes:
        """What the far end puts on the wire for it."""
        view = memoryview(data)
        while view:
            view = view[self.far.tls.write(view) :]
        return self.far.outgoing.read()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "pki")
    yield rig
    rig.channel.close()
    rig.net.close()


def test_what_was_taken_over_waits_for_room_and_goes_out_once(rig: Rig) -> None:
    data = bytes(range(256)) * 4096
    taken = rig.stream.send(data)
    assert 0 < taken <= len(data)
    assert rig.stream.has_unsent
    assert rig.channel.has_unsent
    with pytest.raises(BlockingIOError):
        rig.stream.send(data[taken:])
    assert rig.heard(taken) == data[:taken]
    assert rig.channel.push(deque())
    assert not rig.channel.has_unsent
    rest = deque([memoryview(b"a"), memoryview(b"bc"), memoryview(bytes(20_000))])
    while rest:
        rig.channel.push(rest)
    assert rig.heard(20_003) == b"abc" + bytes(20_000)


def test_what_the_kernel_knows_nothing_of_is_told(rig: Rig) -> None:
    rig.net.sendall(rig.say(b"0123456789") + rig.say(b"abc"))
    select.select([rig.stream], [], [], 5)
    buffer = bytearray(4)
    assert rig.stream.recv_into(memoryview(buffer)) == 4
    assert not rig.channel.doze(for_room=False)
    rest = bytearray(100)
    assert rig.stream.recv_into(memoryview(rest)) == 9
    assert rest[:9] == b"456789abc"
    assert rig.channel.doze(for_room=False)
    with pytest.raises(BlockingIOError):
        rig.stream.recv_into(memoryview(rest))


@pytest.mark.parametrize("cut", [1, 4, 20])
def test_half_a_record_is_nothing_yet(rig: Rig, cut: int) -> None:
    record = rig.say(b"0123456789")
    rig.net.sendall(record[:cut])
    buffer = memoryview(bytearray(100))
    with pytest.raises(BlockingIOError):
        rig.stream.recv_into(buffer)
    rig.net.sendall(record[cut:])
    assert rig.stream.recv_into(buffer) == 10


def test_an_interrupt_inside_a_send_ends_the_connection_and_repeats_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Any, view: memoryview, at: int) -> int:
        self._tls.write(view)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TlsStream, "_encrypt", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rig.stream.send(b"once")
    with pytest.raises(OSError, match="interrupted in the middle of a record"):
        rig.stream.send(b"once")


def test_bytes_changed_on_the_way_are_an_error_for_good(rig: Rig) -> None:
    record = bytearray(rig.say(b"0123456789"))
    record[-1] ^= 1
    rig.net.sendall(record)
    buffer = memoryview(bytearray(100))
    for _ in range(2):
        with pytest.raises(TlsEnded) as ended:
            rig.stream.recv_into(buffer)
        assert isinstance(ended.value.error, Disconnected)
    rig.channel.pump()
    assert rig.channel.link.end is not None
    assert rig.channel.link.is_end_explained


def test_the_end_is_an_end(rig: Rig) -> None:
    with pytest.raises(ssl.SSLWantReadError):
        rig.far.tls.unwrap()
    rig.net.sendall(rig.say(b"") + rig.far.outgoing.read())
    rig.net.shutdown(socket.SHUT_WR)
    assert rig.stream.recv_into(memoryview(bytearray(10))) == 0
    assert rig.stream.recv_into(memoryview(bytearray(10))) == 0
