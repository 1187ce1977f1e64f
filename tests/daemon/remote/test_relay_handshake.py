"""The time limit of a relay's handshake: who is blamed if the relay's process was stopped."""

import select
import socket
import ssl
import time
from typing import cast

import pytest

from gpulease.daemon.remote import relay


class Stalling:
    """A TLS connection that needs one more flight of the peer, and a poll during which that comes after `late_s`."""

    def __init__(self, late_s: float) -> None:
        self.now_s, self._late_s = 100.0, late_s
        self.net, self._peer = socket.socketpair()
        self.net.setblocking(False)
        self._handshakes = 0

    def do_handshake(self) -> None:
        self._handshakes += 1
        # Before its bytes have come, and before they are read.
        if self._handshakes <= 2:
            raise ssl.SSLWantReadError

    def register(self, *_: object) -> None: ...

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        self._peer.send(b"the rest")
        self.now_s += self._late_s
        return [(self.net.fileno(), select.POLLIN)]

    def close(self) -> None:
        self.net.close()
        self._peer.close()


@pytest.mark.parametrize("late_s", [1.0, 60.0])
def test_a_handshake_is_not_blamed_for_the_time_in_which_its_relay_was_stopped(
    late_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalling = Stalling(late_s)
    monkeypatch.setattr(select, "poll", lambda: stalling)
    monkeypatch.setattr(time, "monotonic", lambda: stalling.now_s)
    tls = cast("ssl.SSLObject", stalling)
    relay._shake_hands(relay.RelayedTls(stalling.net, tls, ssl.MemoryBIO(), ssl.MemoryBIO()))
    monkeypatch.undo()
    stalling.close()


def test_a_peer_that_is_late_by_itself_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    stalling = Stalling(relay.HANDSHAKE_S + relay.STOPPED_S / 2)
    monkeypatch.setattr(select, "poll", lambda: stalling)
    monkeypatch.setattr(time, "monotonic", lambda: stalling.now_s)
    tls = cast("ssl.SSLObject", stalling)
    with pytest.raises(relay.HandshakeFailed):
        relay._shake_hands(relay.RelayedTls(stalling.net, tls, ssl.MemoryBIO(), ssl.MemoryBIO()))
    monkeypatch.undo()
    stalling.close()
