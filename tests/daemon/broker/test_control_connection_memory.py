"""A closed connection's memory is free at once, without Python's collector, and returned to the host."""

import asyncio
import gc
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from gpulease.client.sync.driver import ask
from gpulease.daemon.bench.lease_table import SimulatedWorkers
from gpulease.daemon.broker.control_connection import ControlConnection
from gpulease.daemon.broker.runtime import Runtime
from gpulease.daemon.broker.token_service import TokenService
from gpulease.daemon.gpus.emulated_cards import EmbeddedCards
from gpulease.daemon.leases.quotas import CoreLimits
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.record.audit.recorder import FactRecorder
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Empty
from helpers.daemon import Daemon
from helpers.raw_peer import RawPeer
from helpers.waiting import wait_until

CONNECTIONS = 5
CROWD = 500
LEFT_BYTES = 24 << 10
"""Of each connection of the first crowd: Python's own pools grow once."""

MORE_BYTES = 4 << 10
"""Of each of a later one."""


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
        tokens = TokenService(table, frozenset(), None, None, {})
        runtime = Runtime(table, EmbeddedCards([]), SimulatedWorkers(), tokens, FactRecorder(), 1)

        def make() -> ControlConnection:
            connection = ControlConnection(runtime, "cpu", None, {})
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


def resident_bytes(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) << 10


def crowd(daemon: Daemon) -> None:
    """Many connect at once, are answered, and leave."""
    files = len(daemon.open_files())
    with ExitStack() as stack:
        for _ in range(CROWD):
            stack.enter_context(RawPeer(daemon.address)).hello()
    wait_until(lambda: len(daemon.open_files()) <= files, "they are gone", 60)


def test_a_crowd_of_connections_leaves_no_memory_taken(start_daemon: Callable[..., Daemon]) -> None:
    """Each took some 73 KiB for ever."""
    limits = f"max_connections = {2 * CROWD}\nmax_connections_per_tenant = {2 * CROWD}\n"
    daemon = start_daemon(config=limits)
    pid = daemon.process.pid
    before = resident_bytes(pid)
    crowd(daemon)
    wait_until(lambda: resident_bytes(pid) - before < CROWD * LEFT_BYTES, "it is given back", 60)
    after_one = resident_bytes(pid)
    crowd(daemon)
    wait_until(lambda: resident_bytes(pid) - after_one < CROWD * MORE_BYTES, "it is given back again", 60)
