"""What a daemon has from the one before it: its journal, and the zygotes that keep its sessions.

The daemon from start to stop: state, cards, zygotes, lease table, listeners, and back.

Which event loop the broker runs on.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from gpulease.daemon.broker.audit_recording import boot_id, config_digest, recording
from gpulease.daemon.broker.control_connection import LINGER_S, ConnectionLimiter, ControlConnection
from gpulease.daemon.broker.handlers.admin_requests import WebActionRunner
from gpulease.daemon.broker.handlers.token_requests import TokenService
from gpulease.daemon.broker.listeners import Listeners, NeverListens, cannot_listen
from gpulease.daemon.broker.peer import Peer
from gpulease.daemon.broker.runtime import Runtime
from gpulease.daemon.broker.tls_frontend import TlsFrontend
from gpulease.daemon.broker.web_frontend import LoadHistory, WebFrontend
from gpulease.daemon.config.settings import Config, ConfigError, OnStop, changed_hands, check_devices, check_worker_user
from gpulease.daemon.gpus.selection import choose_cards
from gpulease.daemon.gpus.source import CardFacts, CardSource, CardsUnavailable, retry
from gpulease.daemon.host.processes import adopt_orphans, raise_descriptor_limit, thread_pool
from gpulease.daemon.leases import (
    Card,
    Cause,
    KeptCard,
    LeaseTable,
    PoolTimerFired,
    ShutdownRequested,
    TenantRulesChanged,
)
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.record.audit.recorder import Recorder
from gpulease.daemon.record.journal import Journal, open_journal
from gpulease.daemon.sandbox.measures import Measure
from gpulease.daemon.supervisor.socket_activation import Assigned, GivenSocket, assign
from gpulease.daemon.workers.probe import measure_overhead
from gpulease.daemon.workers.registry import Workers
from gpulease.daemon.workers.zygote_client import ZygoteBroken
from gpulease.daemon.workers.zygote_discovery import CannotAdopt, FoundZygote, find_zygotes
from gpulease.protocol.address import Address, TlsAddress, UnixAddress
from gpulease.protocol.failures import Failure
from gpulease.protocol.opcodes import HelloOption, Status
from gpulease.protocol.primitives import Tlv

ZYGOTES: Final = "zygotes"
"""The folder in the state's where zygotes listen."""

MAX_PATH_BYTES: Final = 107
"""Of a Unix socket's path (unix(7))."""

_SOCKET_BYTES: Final = len(f"/{ZYGOTES}/01234567.sock")


class State:
    """What outlives this daemon.

    Attributes:
        zygotes: Where zygotes listen; None if nothing outlives it.
        is_left: Whether sessions are left to the next daemon when this one ends.
    """

    def __init__(self, journal: Journal, zygotes: Path | None, found: list[FoundZygote]) -> None:
        self.journal = journal
        self.zygotes = zygotes
        self.is_left = zygotes is not None
        self._found = found

    def take_zygotes(self) -> list[FoundZygote]:
        """Those that an earlier daemon left; the caller's from now on."""
        found, self._found = self._found, []
        return found


@contextlib.asynccontextmanager
async def holding_state(config: Config) -> AsyncIterator[State]:
    """The state's folder, locked until the block is left. Raises JournalBroken or CannotAdopt."""
    if config.state is None:
        yield State(Journal(), None, [])
        return
    if len(bytes(config.state)) + _SOCKET_BYTES > MAX_PATH_BYTES:
        raise CannotAdopt(
            f"the path of state is longer than {MAX_PATH_BYTES - _SOCKET_BYTES} bytes, and sockets are to be in it",
            hint="Choose a shorter one.",
        )
    journal = await asyncio.to_thread(open_journal, config.state, boot_id())
    try:
        zygotes = config.state / ZYGOTES
        zygotes.mkdir(mode=0o700, exist_ok=True)
        state = State(journal, zygotes, await asyncio.to_thread(find_zygotes, zygotes))
        try:
            yield state
        finally:
            for left in state.take_zygotes():
                left.close()
    finally:
        await journal.stop()


SHUTDOWN_TIMEOUT_S: Final = 10.0
"""How long leases get to be proved back when the daemon stops; their workers die in any case."""

SETTLE_TIMEOUT_S: Final = 10.0
"""The same for those that are ending when it stops and leaves the others to the next daemon, which goes on with them.
"""

NS_PER_S: Final = 1_000_000_000

_STOPPING: Final = Failure(Status.DISCONNECTED, "the daemon is stopping", hint="Try again once it is back.")
_LEAVING: Final = Failure(
    Status.BUSY, "the daemon is being restarted; leases go on", hint="Connect again in a moment, and ask again."
)


class Service:
    """A running daemon.

    Attributes:
        addresses: Where it listens, with the ports the kernel chose.
        url: The web page's, "" if there is none.
        leaves_sessions: Whether its stop leaves sessions to the next daemon. Until it is told to stop, it does so
            wherever they can outlive it: that it can't start, or breaks, must not end them.
        stale: Sockets that an earlier daemon left for addresses that are not listened on any more.
    """

    def __init__(
        self,
        config: Config,
        source: CardSource,
        cards: list[Card],
        workers: Workers,
        recorder: Recorder,
        journal: Journal,
        given: Sequence[GivenSocket] = (),
    ) -> None:
        self.addresses: list[Address] = []
        self.url = ""
        self.stale: list[GivenSocket] = []
        self._given = given
        self.leaves_sessions = config.state is not None
        self._cards = cards
        self._recorder = recorder
        table = LeaseTable(cards, config.limits, config.warm_contexts, journal.past, config.recycling)
        tokens = TokenService(
            table, config.require_token, config.token_key_file, config.state, journal.spent, journal.revoked_tokens
        )
        self.runtime = Runtime(table, source, workers, tokens, recorder, config.max_load_s, journal)
        self._config = config
        self._options = () if config.state is None else (Tlv(HelloOption.KEEPS_LEASES, b""),)
        has_memory = self.runtime.headroom.is_enough
        self._doorkeeper = ConnectionLimiter(config.max_connections, config.max_connections_per_tenant, has_memory)
        self._driver = source.driver
        self._listeners = Listeners(self._new_connection, config.socket_mode)
        self._remote: TlsFrontend | None = None
        if config.tls is not None and any(isinstance(address, TlsAddress) for address in config.listen):
            self._remote = TlsFrontend(config.tls, config.tenant_of_certificate, self._new_remote_connection, journal)
        self._web: WebFrontend | None = None
        self._loads: LoadHistory | None = None
        http = config.of_http
        if http is not None:
            self._loads = LoadHistory(table, source, workers, self._tell_load)
            acts, loads = WebActionRunner(self.runtime), self._loads.messages
            self._web = WebFrontend(http, config.of_sandbox, self._new_reader, acts, loads=loads)

    async def start(self) -> None:
        """Take over what was left, listen, and begin to make warm contexts. Raises CannotListen or BadHandover."""
        self.runtime.headroom.watch(asyncio.get_running_loop())
        self.runtime.adopt(self._cards, time.monotonic_ns() + self._config.limits.max_ttl_s * NS_PER_S)
        await self.runtime.card_watch.start()
        if self._remote is not None:
            await self._remote.start()
        elif self._config.tls is not None:
            log_event(LogEvent.TLS_NOT_USED)
        assigned = await self._assigned()
        for address in self._config.listen:
            self.addresses.append(await self._listen(address, assigned))
        if self._web is not None:
            self.url = await self._web.listen(assigned.of(http) if (http := self._config.http) else ())
        if self._loads is not None:
            self._loads.start()
        self.runtime.post(PoolTimerFired())
        self.runtime.metrics.start()
        self.runtime.health.is_listening = True

    async def _assigned(self) -> Assigned:
        """Whose socket each is that was handed over."""
        if not self._given:
            return Assigned()
        http = self._config.http
        addresses = [*self._config.listen, *([http] if http else [])]
        assigned = assign(self._given, {address: await _hosts_of(address) for address in addresses})
        self.stale = assigned.stale
        for one in assigned.stale:
            one.sock.close()
        return assigned

    async def _listen(self, address: Address, assigned: Assigned) -> Address:
        given = assigned.of(address)
        if not isinstance(address, TlsAddress):
            return await self._listeners.listen(address, given, set_mode=not assigned.is_units(address))
        if self._remote is None:
            raise NeverListens(f"can't listen on {address}: there are no certificates")
        return await self._remote.listen(address, given)

    @property
    def bound(self) -> list[tuple[Address, int]]:
        """The listening sockets that this daemon made, each with its address as the settings have it."""
        doors = [door for door in (self._listeners, self._remote, self._web) if door is not None]
        return [one for door in doors for one in door.bound]

    def leave_sockets(self) -> None:
        """Somebody keeps the listening sockets open for the next daemon: their files stay when this one stops."""
        self._listeners.leave_paths()

    def take_settings(self, config: Config, token_digest: bytes) -> None:
        """What can be changed while it runs, from now on: see `supervisor.reloading`. What is not said of it stays.

        `token_digest`: of the web page's token, as its file has it now; b"" if there is none.

        Raises ConfigError, and changes nothing, if a tenant's cards are not all here.
        """
        _check_devices(config, self._cards)
        of_uid, of_certificate = (
            (self._config.tenant_of_uid, config.tenant_of_uid),
            (self._config.tenant_of_certificate, config.tenant_of_certificate),
        )
        self.runtime.post(TenantRulesChanged(config.limits.tenants, changed_hands(of_uid, of_certificate)))
        limits = replace(self._config.limits, tenants=config.limits.tenants)
        self._config = replace(
            self._config,
            limits=limits,
            tenant_of_uid=config.tenant_of_uid,
            tenant_of_certificate=config.tenant_of_certificate,
            max_connections=config.max_connections,
            max_connections_per_tenant=config.max_connections_per_tenant,
        )
        self._doorkeeper.widen(config.max_connections, config.max_connections_per_tenant)
        if self._remote is not None:
            self._remote.rename(config.tenant_of_certificate)
        if self._web is not None:
            self._web.take_token(token_digest)
            self._config = replace(self._config, http_token_file=config.http_token_file)
        self._recorder.reloaded(config_digest(self._config))

    def may_end_sessions(self, *, is_interrupted: bool) -> None:
        """It was told to stop, by SIGINT if `is_interrupted`: sessions end with it if the operator wants that."""
        self.leaves_sessions = self._config.on_stop is OnStop.KEEP and not is_interrupted

    async def stop(self) -> None:
        """Stop listening, let everybody go, and end sessions or leave them, each within a bound."""
        self.runtime.health.is_listening = False
        self._listeners.close()
        if self._loads is not None:
            await self._loads.stop()
        if self._web is not None:
            await self._web.stop()
        if self._remote is not None:
            await self._remote.stop()
        if self.leaves_sessions:
            await self._leave_sessions()
        else:
            await self._end_sessions()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await self._doorkeeper.emptied()

    async def _end_sessions(self) -> None:
        """Leases torn down and proved back; their processes end later, in any case."""
        self.runtime.post(ShutdownRequested())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                await self.runtime.drained()
        self._doorkeeper.say_goodbye(_STOPPING)

    async def _leave_sessions(self) -> None:
        self._doorkeeper.turn_away(_LEAVING)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                await self.runtime.settled()

    def _new_connection(self) -> ControlConnection:
        door = self._doorkeeper
        tenants = self._config.tenant_of_uid
        return ControlConnection(self.runtime, self._driver, door.admit, door.release, tenants, options=self._options)

    def _new_remote_connection(self, peer: Peer, refusal: Failure | None) -> ControlConnection:
        door = self._doorkeeper

        def admit(connection: ControlConnection) -> Failure | None:
            return refusal or door.admit(connection)

        return ControlConnection(self.runtime, self._driver, admit, door.release, {}, peer, self._options)

    def _tell_load(self, message: dict[str, Any]) -> None:
        if self._web is not None:
            self._web.tell_load(message)

    def _new_reader(self, peer: Peer) -> ControlConnection:
        """Of a process of ours, which takes nobody's place."""
        return ControlConnection(self.runtime, self._driver, lambda _: None, lambda _: None, {}, peer, self._options)


@contextlib.asynccontextmanager
async def running_service(config: Config, given: Sequence[GivenSocket] = ()) -> AsyncIterator[Service]:
    """A daemon that listens, until the block is left; `given`: sockets that were handed over to it.

    Raises NoThread, CardsUnavailable, ZygoteBroken, CannotRecord, TokensUnavailable, CannotListen, CannotAdopt,
    JournalBroken, BadHandover, or ConfigError for what shows on this host only, each with a sentence for the operator.
    """
    adopt_orphans()
    raise_descriptor_limit()
    asyncio.get_running_loop().set_default_executor(thread_pool())
    async with (
        holding_state(config) as state,
        _cards_of(config) as source,
        _workers_of(config, source, state) as workers,
    ):
        facts = await retry(lambda: asyncio.to_thread(source.discover, state.journal.cards))
        if not facts:
            raise CardsUnavailable("there is no card on this host", hint="Start with --driver cpu to do without.")
        _check_devices(config, [Card(f.uuid, f.index, f.name, f.capacity_bytes, 0, f.is_partition) for f in facts])
        _check_worker_user(config)
        await _start_workers(workers, state, source)
        _tell_what_is_off(workers)
        cards = await _measured(source, facts, workers, state.journal)
        async with (
            recording(config, source.driver, cards) as recorder,
            _serving(Service(config, source, cards, workers, recorder, state.journal, given)) as service,
        ):
            yield service
        state.is_left = service.leaves_sessions


def _check_devices(config: Config, cards: Sequence[Card]) -> None:
    try:
        check_devices(config.limits.tenants, cards)
    except ValueError as error:
        raise ConfigError(f"setting {error}") from None


def _check_worker_user(config: Config) -> None:
    if config.worker_user is None or Measure.USER in config.sandbox_without:
        return
    try:
        check_worker_user(config.worker_user)
    except ValueError as error:
        raise ConfigError(f"setting {error}") from None


@contextlib.asynccontextmanager
async def _cards_of(config: Config) -> AsyncIterator[CardSource]:
    source = await retry(lambda: asyncio.to_thread(choose_cards, config.driver, config.vram_bytes))
    try:
        yield source
    finally:
        source.close()


@contextlib.asynccontextmanager
async def _workers_of(config: Config, source: CardSource, state: State) -> AsyncIterator[Workers]:
    workers = Workers(
        config.driver_of_workers(source.driver),
        config.of_sandbox,
        state.zygotes,
        wipes_heap=config.recycling is not None,
        grace_ns=config.limits.grace_ns(Cause.EXPIRED),
    )
    try:
        yield workers
    finally:
        if state.is_left:
            await workers.leave()
        else:
            await workers.stop()


async def _start_workers(workers: Workers, state: State, source: CardSource) -> None:
    try:
        await workers.start(state.take_zygotes())
    except ZygoteBroken:
        # What they preload may be the very thing that is broken.
        driver_says = await asyncio.to_thread(source.why_no_context)
        if driver_says is not None:
            raise driver_says from None
        raise


def _tell_what_is_off(workers: Workers) -> None:
    for found in workers.findings():
        if not found["on"]:
            log_event(LogEvent.SANDBOX_OFF, measure=found["measure"], reason=found["detail"])


async def _measured(source: CardSource, facts: Sequence[CardFacts], workers: Workers, journal: Journal) -> list[Card]:
    """What is on each card besides tenants' bytes; measured of those only that were not measured in this boot."""
    unknown = [fact for fact in facts if fact.uuid not in journal.cards]
    # The bytes of one that was just reaped may not be back yet.
    is_beside_others = bool(workers.found())
    overheads = {uuid: known.overhead_bytes for uuid, known in journal.cards.items()}
    overheads |= zip([fact.uuid for fact in unknown], await measure_overhead(source, workers, unknown), strict=True)
    cards = []
    for fact in facts:
        overhead = overheads[fact.uuid]
        spare = max(0, fact.found_bytes - fact.capacity_bytes)
        shape = (fact.capacity_bytes, overhead, fact.is_partition, spare, fact.slack_bytes)
        cards.append(Card(fact.uuid, fact.index, fact.name, *shape))
        log_event(
            LogEvent.CARD_FOUND,
            index=fact.index,
            card=fact.uuid,
            name=fact.name,
            capacity_bytes=fact.capacity_bytes,
            overhead_bytes=overhead,
        )
    if unknown and is_beside_others:
        log_event(LogEvent.CARD_CROWDED)
    elif unknown:
        measured = [KeptCard(one.uuid, one.found_bytes, overheads[one.uuid], one.unattributed_bytes) for one in facts]
        journal.remember_cards(measured)
    return cards


@contextlib.asynccontextmanager
async def _serving(service: Service) -> AsyncIterator[Service]:
    try:
        await service.start()
        yield service
    finally:
        await service.stop()
        await service.runtime.stop()


async def _hosts_of(address: Address) -> list[tuple[str, int]]:
    """The IP addresses and port that a name stands for. Raises CannotListen."""
    if isinstance(address, UnixAddress):
        return []
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise cannot_listen(f"listen on {address}", error) from None
    return [(str(entry[4][0]), int(entry[4][1])) for entry in found]


def loop_factory() -> Any:
    """uvloop's, for `asyncio.Runner`; None, for asyncio's own, which does the same, slower, where it is missing."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
