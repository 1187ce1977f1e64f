"""The daemon from start to stop: cards, zygote, lease table, listeners, and back."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Final

from gpulease.daemon.audit.recorder import Recorder
from gpulease.daemon.broker.admission import Doorkeeper
from gpulease.daemon.broker.control import LINGER_S, ControlConnection
from gpulease.daemon.broker.listening import CannotListen, Listeners
from gpulease.daemon.broker.peers import Peer
from gpulease.daemon.broker.probe import measure_overhead
from gpulease.daemon.broker.recording import boot_id, recording
from gpulease.daemon.broker.remote import RemoteDoor
from gpulease.daemon.broker.runtime import Runtime
from gpulease.daemon.broker.tokens import TokenOffice
from gpulease.daemon.broker.workers import Workers
from gpulease.daemon.cards.choice import choose_cards
from gpulease.daemon.cards.source import CardFacts, CardSource, CardsUnavailable
from gpulease.daemon.config import Config
from gpulease.daemon.core import Card, LeaseRestored, LeaseTable, PoolTimerFired, ShutdownRequested
from gpulease.daemon.journal import Journal, open_journal
from gpulease.daemon.processes import adopt_orphans, raise_descriptor_limit
from gpulease.protocol.address import Address, TlsAddress
from gpulease.protocol.failures import Failure
from gpulease.protocol.opcodes import Status

SHUTDOWN_TIMEOUT_S: Final = 10.0
"""How long leases get to be proved back when the daemon stops; their workers die in any case."""

_log = logging.getLogger("gpulease")


class Service:
    """A running daemon.

    Attributes:
        addresses: Where it listens, with the ports the kernel chose.
    """

    def __init__(
        self,
        config: Config,
        source: CardSource,
        cards: list[Card],
        workers: Workers,
        recorder: Recorder,
        journal: Journal,
    ) -> None:
        self.addresses: list[Address] = []
        table = LeaseTable(cards, config.limits, config.warm_contexts, journal.past)
        tokens = TokenOffice(table, config.require_token, config.token_key_file, config.state, journal.spent)
        self.runtime = Runtime(table, source, workers, tokens, recorder, config.max_load_s, journal)
        self._config = config
        self._doorkeeper = Doorkeeper(config.max_connections, config.max_connections_per_tenant)
        self._driver = source.driver
        self._listeners = Listeners(self._new_connection, config.socket_mode)
        self._remote: RemoteDoor | None = None
        if config.tls is not None and any(isinstance(address, TlsAddress) for address in config.listen):
            self._remote = RemoteDoor(config.tls, config.tenant_of_certificate, self._new_remote_connection)

    async def start(self) -> None:
        """Enter what an earlier daemon left, listen, and begin to make warm contexts. Raises CannotListen."""
        for kept in self.runtime.journal.kept:
            self.runtime.post(LeaseRestored(kept, has_worker=False))
        if self._remote is not None:
            await self._remote.start()
        for address in self._config.listen:
            self.addresses.append(await self._listen(address))
        self.runtime.post(PoolTimerFired())

    async def _listen(self, address: Address) -> Address:
        if not isinstance(address, TlsAddress):
            return await self._listeners.listen(address)
        if self._remote is None:
            raise CannotListen(f"can't listen on {address}: there are no certificates")
        return await self._remote.listen(address)

    async def stop(self) -> None:
        """Let everybody go: leases torn down and proved back, within a bound; then the processes, then the sockets."""
        self._listeners.close()
        if self._remote is not None:
            await self._remote.stop()
        self.runtime.post(ShutdownRequested())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                await self.runtime.drained()
        self._doorkeeper.say_goodbye(
            Failure(Status.DISCONNECTED, "the daemon is stopping", hint="Try again once it is back.")
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await self._doorkeeper.emptied()

    def _new_connection(self) -> ControlConnection:
        door = self._doorkeeper
        return ControlConnection(self.runtime, self._driver, door.admit, door.release, self._config.tenant_of_uid)

    def _new_remote_connection(self, peer: Peer, refusal: Failure | None) -> ControlConnection:
        door = self._doorkeeper

        def admit(connection: ControlConnection) -> Failure | None:
            return refusal or door.admit(connection)

        return ControlConnection(self.runtime, self._driver, admit, door.release, {}, peer)


@contextlib.asynccontextmanager
async def running_service(config: Config) -> AsyncIterator[Service]:
    """A daemon that listens, until the block is left.

    Raises JournalBroken, CardsUnavailable, ZygoteBroken, CannotRecord, TokensUnavailable or CannotListen, each with a
    sentence for the operator.
    """
    async with _keeping(config) as journal, _working(config, journal) as service:
        yield service


@contextlib.asynccontextmanager
async def _keeping(config: Config) -> AsyncIterator[Journal]:
    """The journal, if the operator wants one."""
    if config.state is None:
        yield Journal()
        return
    journal = await asyncio.to_thread(open_journal, config.state, boot_id())
    try:
        yield journal
    finally:
        await journal.stop()


@contextlib.asynccontextmanager
async def _working(config: Config, journal: Journal) -> AsyncIterator[Service]:
    adopt_orphans()
    raise_descriptor_limit()
    source = choose_cards(config.driver, config.vram_bytes)
    try:
        facts = await asyncio.to_thread(source.discover)
        if not facts:
            raise CardsUnavailable("there is no card on this host", hint="Start with --driver cpu to do without.")
        workers = Workers(source.driver, config.of_sandbox)
        try:
            await workers.start()
            _tell_what_is_off(workers)
            cards = await _measured(source, facts, workers)
            async with (
                recording(config, source.driver, cards) as recorder,
                _serving(Service(config, source, cards, workers, recorder, journal)) as service,
            ):
                yield service
        finally:
            await workers.stop()
    finally:
        source.close()


def _tell_what_is_off(workers: Workers) -> None:
    for found in workers.findings():
        if not found["on"]:
            _log.warning("the workers' sandbox is without %s: %s", found["measure"], found["detail"])


async def _measured(source: CardSource, facts: list[CardFacts], workers: Workers) -> list[Card]:
    cards = []
    for fact, overhead in zip(facts, await measure_overhead(source, workers, facts), strict=True):
        cards.append(Card(fact.uuid, fact.index, fact.name, fact.capacity_bytes, overhead, fact.is_partition))
        _log.info(
            "card %d %s %s: %d bytes to lease, %d more for each context",
            fact.index,
            fact.uuid,
            fact.name,
            fact.capacity_bytes,
            overhead,
        )
    return cards


@contextlib.asynccontextmanager
async def _serving(service: Service) -> AsyncIterator[Service]:
    try:
        await service.start()
        yield service
    finally:
        await service.stop()
        await service.runtime.stop()
