"""What a connection held is free when it is closed, not when Python's collector comes by: each reads into 64 KiB."""

import asyncio
import gc
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpulease.client.asking import ask
from gpulease.daemon.audit.recorder import Recorder
from gpulease.daemon.broker.control import ControlConnection
from gpulease.daemon.broker.runtime import Runtime
from gpulease.daemon.broker.tokens import TokenOffice
from gpulease.daemon.cards.embedded import EmbeddedCards
from gpulease.daemon.core import CoreLimits, LeaseTable
from gpulease.daemon.core_bench import SimulatedWorkers
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Empty
from helpers.waiting import wait_until

CONNECTIONS = 5


@contextmanager
def no_collector() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_closed_connections_are_gone() -> None:
    made: list[weakref.ref[ControlConnection]] = []

    async def serve(path: Path) -> int:
        table = LeaseTable([], CoreLimits())
        tokens = TokenOffice(table, frozenset(), None, None, {})
        runtime = Runtime(table, EmbeddedCards([]), SimulatedWorkers(), tokens, Recorder(), 1)

        def make() -> ControlConnection:
            connection = ControlConnection(runtime, "cpu", lambda _: None, lambda _: None, {})
            made.append(weakref.ref(connection))
            return connection

        server = await asyncio.get_running_loop().create_unix_server(make, str(path))
        async with server:
            for _ in range(CONNECTIONS):
                await asyncio.to_thread(ask, Opcode.LEASE_LIST_ACTIVE, Empty(), f"unix:{path}")
            await asyncio.to_thread(wait_until, lambda: not any(one() for one in made), "they are gone")
        await runtime.stop()
        return len(made)

    with tempfile.TemporaryDirectory(prefix="gpul-", dir="/tmp") as folder, no_collector():
        assert asyncio.run(serve(Path(folder) / "s")) == CONNECTIONS
