"""The acceptor's messages: every one is handled, and what no honest process sends is refused."""

import os
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulease.daemon.contract.message_fields import MalformedMessage, Message, expect_message
from gpulease.daemon.host.ipc import channel_pair, close_all, receive_message, send_message
from gpulease.daemon.remote.acceptor import UNKNOWN, Handshake, TlsAcceptor
from gpulease.daemon.remote.node_identity import IdentityFiles
from gpulease.daemon.remote.remote_messages import (
    FROM_RELAY,
    MAX_NAME_BYTES,
    MAX_NAMES,
    MAX_SERIAL_CHARS,
    LeftOverRelay,
    Listen,
    PeerVerified,
)
from helpers.process_messages import FROM_RELAY as FROM_RELAY_MESSAGES
from helpers.process_messages import TO_ACCEPTOR
from helpers.remote import Pki

NAME = "URI:gpulease:tenant:ann"
SAID: dict[str, Any] = {"op": "verified", "names": [NAME], "serial": "1F"}


class Rig:
    """An acceptor that does not run, and the broker's end of its channel."""

    def __init__(self, folder: Path) -> None:
        pki = Pki.make(folder)
        files = IdentityFiles(
            pki.server.certificate, pki.server.key, pki.authority.certificate_path, pki.authority.crl_path
        )
        self.broker, self._channel = channel_pair()
        self.acceptor = TlsAcceptor(self._channel, files, 4, 4)
        self._relays: list[socket.socket] = []

    def report(self, received: dict[str, Any]) -> None:
        """Have a relay send a report."""
        report, relay_end = channel_pair()
        inner, relay_inner = socket.socketpair()
        self._relays += (relay_end, relay_inner)
        handshake = Handshake(os.getpid(), "10.0.0.1", "10.0.0.1", report, inner, time.monotonic())
        self.acceptor._handshakes[report.fileno()] = handshake
        self.acceptor._relays[handshake.pid] = UNKNOWN
        self.acceptor._epoll.register(report, select.EPOLLIN)
        send_message(relay_end, received)
        self.acceptor._on_report(handshake)

    def close(self) -> None:
        acceptor = self.acceptor
        for handshake in list(acceptor._handshakes.values()):
            acceptor._forget(handshake)
        for listener in acceptor._listeners.values():
            listener.close()
        close_all(list(acceptor._orphans))
        for end in (*self._relays, self.broker, self._channel, acceptor._wakeup, acceptor._wakeup_end):
            end.close()
        acceptor._epoll.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "pki")
    yield rig
    rig.close()


def descriptor_for(message: Message) -> list[int]:
    match message:
        case Listen():
            return [socket.socket().detach()]
        case LeftOverRelay():
            return [os.pidfd_open(os.getpid())]
    return []


def test_every_message_of_the_broker_is_handled(rig: Rig) -> None:
    for message in TO_ACCEPTOR.messages:
        rig.acceptor._on_broker_message(message.to_map(), descriptor_for(message))
    assert receive_message(rig.broker)[0] == {"op": "pong"}
    assert (len(rig.acceptor._listeners), list(rig.acceptor._orphans.values())) == (1, [0x1F])


def test_a_message_that_no_broker_sends_is_ignored_and_its_descriptors_are_closed(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for received in ({"op": "tomorrow's"}, {"op": "left_over", "serial": "no number"}, {"op": "listen"}):
        fds = [os.pidfd_open(os.getpid()) for _ in range(2)]
        rig.acceptor._on_broker_message(received, fds)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not rig.acceptor._listeners
    assert not rig.acceptor._orphans
    assert caplog.text.count("internal error of the daemon") == 2


def test_every_report_of_a_relay_is_handled(rig: Rig) -> None:
    for message in FROM_RELAY_MESSAGES.messages:
        rig.report(message.to_map())
    arrived, fds = receive_message(rig.broker)
    close_all(fds)
    assert (arrived["op"], arrived["names"], arrived["serial"], len(fds)) == ("arrived", [NAME], "1F", 1)
    assert [handshake.has_failed for handshake in rig.acceptor._handshakes.values()] == [True]


def test_a_relay_s_report_is_parsed() -> None:
    assert expect_message(FROM_RELAY, SAID) == PeerVerified((NAME,), "1F")


@pytest.mark.parametrize(
    "said",
    [
        {"names": NAME},
        {"names": [7]},
        {"names": [[NAME]]},
        {"names": [NAME] * (MAX_NAMES + 1)},
        {"names": ["\U0001f40c" * (MAX_NAME_BYTES // 4 + 1)]},
        {"serial": 31},
        {"serial": "snail"},
        {"serial": "1" * (MAX_SERIAL_CHARS + 1)},
        {"serial": "0x1F"},
        {"serial": ""},
    ],
)
def test_a_report_that_no_relay_sends_is_malformed(said: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage):
        expect_message(FROM_RELAY, SAID | said)
