"""Messages about relays, from the TLS acceptor or from whoever took it over."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulease.daemon.broker.service import loop_factory
from gpulease.daemon.broker.tls_frontend import TlsFrontend
from gpulease.daemon.host.ipc import close_all
from gpulease.daemon.record.journal import Journal, RelayRow
from gpulease.daemon.remote.tls_settings import TlsSettings
from helpers.process_messages import FROM_ACCEPTOR
from helpers.waiting import PATIENCE_S, wait_until

NOWHERE = Path("/nowhere")
ANN = "URI:gpulease:tenant:ann"


class Noted(Journal):
    """Notes which relays are remembered and forgotten."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.has_forgotten = asyncio.Event()

    def remember_relay(self, relay: RelayRow) -> None:
        self.told.append(f"+{relay.tenant} {relay.serial}")

    def forget_relay(self, pid: int) -> None:
        self.told.append("-")
        self.has_forgotten.set()


class Rig:
    """A frontend that gets messages as from its acceptor."""

    def __init__(self) -> None:
        self.journal = Noted()
        settings = TlsSettings(NOWHERE, NOWHERE, NOWHERE)
        self.frontend = TlsFrontend(settings, {}, lambda *_: asyncio.Protocol(), self.journal)
        self.peers: list[socket.socket] = []

    def receive(self, message: dict[str, Any], *, is_with_socket: bool = False) -> None:
        fds: list[int] = []
        if is_with_socket:
            ours, theirs = socket.socketpair()
            self.peers.append(theirs)
            fds = [ours.detach()]
        self.frontend._acceptor._take(message, fds)
        close_all(fds)

    def close(self) -> None:
        for peer in self.peers:
            peer.close()


@pytest.fixture
def relay() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process


def arrived(pid: int, **other: Any) -> dict[str, Any]:
    return {"op": "arrived", "pid": pid, "peer": "10.0.0.1", "names": [ANN], "serial": "1F"} | other


@pytest.mark.parametrize(
    "message",
    [
        {"op": "began", "pid": 0},
        {"op": "began", "pid": 1 << 40},
        {"op": "left", "pid": 1 << 63},
        {"op": "left", "pid": -1},
        arrived(1 << 40),
        arrived(-1),
        arrived(1, serial=b"1F"),
        arrived(1, serial="no number"),
        arrived(1, serial="F" * 41),
        arrived(1, serial=""),
        arrived(1, peer=7),
        arrived(1, peer="p" * 1000),
        arrived(1, names=[7]),
        arrived(1, names=ANN),
        arrived(1, names=[ANN] * 65),
        arrived(1, names=["n" * 513]),
    ],
    ids=str,
)
def test_a_message_that_no_acceptor_sends_is_ignored(message: dict[str, Any]) -> None:
    """A row that the journal can't write would block every later row."""

    async def run() -> None:
        rig = Rig()
        rig.receive(message, is_with_socket=True)
        rig.frontend._adopt_relays()
        await asyncio.sleep(0)
        assert not rig.frontend._tasks
        assert not rig.journal.told
        rig.close()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run())


def test_the_broker_handles_every_message_of_the_acceptor() -> None:
    async def run() -> None:
        rig = Rig()
        for message in FROM_ACCEPTOR.messages:
            rig.frontend._on_message(message, [])  # type: ignore[arg-type]
        assert not rig.frontend._tasks
        rig.close()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run())


def test_a_peer_whose_arrival_can_t_be_handled_is_disconnected(relay: subprocess.Popen[bytes]) -> None:
    """Otherwise the peer would wait for an answer to its HELLO from a daemon that has forgotten it."""

    async def run() -> None:
        rig = Rig()

        def fail(relay: RelayRow) -> None:
            raise ZeroDivisionError

        rig.journal.remember_relay = fail  # type: ignore[method-assign]
        rig.receive(arrived(relay.pid), is_with_socket=True)
        assert rig.peers[0].recv(1) == b""
        rig.receive({"op": "left", "pid": relay.pid})
        assert not rig.frontend._by_tenant
        rig.close()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run())


def test_one_process_is_one_relay(relay: subprocess.Popen[bytes]) -> None:
    async def run() -> None:
        rig = Rig()
        for _ in range(3):
            rig.receive(arrived(relay.pid), is_with_socket=True)
        rig.receive({"op": "left", "pid": relay.pid})
        assert rig.journal.told == ["+ann 1F", "-"]
        assert not rig.frontend._by_tenant
        await asyncio.gather(*rig.frontend._tasks)
        rig.close()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run())


def test_however_many_acceptors_die_a_relay_is_watched_once(relay: subprocess.Popen[bytes]) -> None:
    async def run() -> None:
        rig = Rig()
        rig.receive(arrived(relay.pid), is_with_socket=True)
        await asyncio.gather(*rig.frontend._tasks)
        rig.frontend._adopt_relays()
        files = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            rig.frontend._adopt_relays()
        assert len(os.listdir("/proc/self/fd")) == files
        relay.kill()
        async with asyncio.timeout(PATIENCE_S):
            await rig.journal.has_forgotten.wait()
        assert rig.journal.told == ["+ann 1F", "-"]
        rig.close()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(run())
    wait_until(lambda: relay.poll() is not None, "it is reaped")
