"""The time limit of a relay's handshake: who is blamed if the relay's process was stopped."""

import select
import socket
import ssl
import time
from collections.abc import Iterator
from typing import cast

import pytest

from gpulease.daemon.remote import relay


class Stalling:
    """A TLS connection that needs one more flight of the peer, which begins to wait for this process's own.

    Attributes:
        computes_s: How long the computation of this process's flight takes.
        answers_s: How long the peer then takes to answer.
        stopped_s: How long this process is stopped in its first wait.
    """

    def __init__(self, computes_s: float = 0.0, answers_s: float = 0.0, stopped_s: float = 0.0) -> None:
        self.now_s, self.computes_s, self.answers_s, self.stopped_s = 100.0, computes_s, answers_s, stopped_s
        self.net, self._peer = socket.socketpair()
        self.net.setblocking(False)
        self.is_answered = False

    def do_handshake(self) -> None:
        if not self.is_answered:
            self.now_s += self.computes_s
            raise ssl.SSLWantReadError

    def register(self, *_: object) -> None: ...

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        self.now_s += self.stopped_s
        self.stopped_s = 0.0
        waited_s = min(timeout_ms / 1000, self.answers_s)
        self.now_s += waited_s
        self.answers_s -= waited_s
        if self.answers_s > 0:
            return []
        self._peer.send(b"the rest")
        self.is_answered = True
        return [(self.net.fileno(), select.POLLIN)]

    def close(self) -> None:
        self.net.close()
        self._peer.close()


@pytest.fixture
def shake(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    made: list[Stalling] = []

    def shaking(stalling: Stalling) -> None:
        made.append(stalling)
        with monkeypatch.context() as patched:
            patched.setattr(select, "poll", lambda: stalling)
            patched.setattr(time, "monotonic", lambda: stalling.now_s)
            tls = cast("ssl.SSLObject", stalling)
            relay._shake_hands(relay.RelayedTls(stalling.net, tls, ssl.MemoryBIO(), ssl.MemoryBIO()))

    yield shaking
    for stalling in made:
        stalling.close()


SLOW_S = relay.HANDSHAKE_S - 0.1


@pytest.mark.parametrize("stopped_s", [relay.WAIT_S + relay.STOPPED_S + 0.1, 60.0])
@pytest.mark.parametrize("where", ["computes_s", "stopped_s"])
def test_a_peer_has_its_whole_time_however_long_the_relay_was_stopped(
    shake: object, where: str, stopped_s: float
) -> None:
    """In its own part of the handshake, before its answer was sent, or while it waited for the peer's."""
    assert callable(shake)
    # One step of waiting is lost with a stop that comes during it.
    shake(Stalling(answers_s=SLOW_S - relay.WAIT_S, **{where: stopped_s}))


def test_a_peer_that_is_late_by_itself_fails(shake: object) -> None:
    assert callable(shake)
    shake(Stalling(answers_s=SLOW_S))
    with pytest.raises(relay.HandshakeFailed, match="not finished within"):
        shake(Stalling(answers_s=relay.HANDSHAKE_S + 0.1))


def test_only_some_stops_are_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    left = relay.HandshakeTime(5.0)
    for _ in range(relay.MAX_STOPS):
        now_s += 60
        assert left.count()
    now_s += 60
    assert not left.count()
