"""The daemon from start to stop.

`running_service` starts the parts in this order, and stops them in the reverse order:

1. the process: threads, descriptors, orphans;
2. the state folder: the journal and the zygotes that an earlier daemon left (`open_state`);
3. the cards (`_open_cards`) and the zygotes that fork workers (`_open_workers`);
4. the measurement of the memory that each card's driver takes, once per boot (`_measure`);
5. the audit log (`open_recorder`);
6. the lease table and its runtime, then the listeners (`Service`).
"""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpulease.daemon.broker.audit_setup import boot_id, config_digest, open_recorder
from gpulease.daemon.broker.connection_limiter import ConnectionLimiter
from gpulease.daemon.broker.control_connection import LINGER_S, ControlConnection
from gpulease.daemon.broker.listeners import Listeners, NeverListens, cannot_listen
from gpulease.daemon.broker.peer import Peer
from gpulease.daemon.broker.runtime import Runtime
from gpulease.daemon.broker.token_service import TokenService
from gpulease.daemon.broker.web_actions import WebActionRunner
from gpulease.daemon.broker.web_frontend import LoadHistory, WebFrontend
from gpulease.daemon.config.settings import (
    Config,
    ConfigError,
    OnStop,
    changed_hands,
    check_park_memory,
    check_worker_user,
    missing_devices,
    park_memory_problem,
)
from gpulease.daemon.gpus.driver_choice import choose_cards
from gpulease.daemon.gpus.source import CardFacts, CardSource, CardsUnavailable, retry
from gpulease.daemon.host.memory_limit import group_memory_limit, host_memory
from gpulease.daemon.host.periodic_task import PeriodicTask
from gpulease.daemon.host.processes import adopt_orphans, raise_descriptor_limit
from gpulease.daemon.host.socket_activation import Assigned, GivenSocket, assign
from gpulease.daemon.host.thread_pool import LoopThreadPool
from gpulease.daemon.host.unix_place import CHECK_INTERVAL_S
from gpulease.daemon.leases.devices import Card
from gpulease.daemon.leases.events import PoolTimerFired, ShutdownRequested, TenantRulesChanged
from gpulease.daemon.leases.model import Cause
from gpulease.daemon.leases.persisted import CardRow
from gpulease.daemon.leases.table import LeaseTable
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.place_log import log_restoring_fault
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.record.audit.recorder import FactRecorder
from gpulease.daemon.record.journal import Journal, open_journal
from gpulease.daemon.sandbox.measures import Measure
from gpulease.daemon.web.fleet_membership import FleetMembership
from gpulease.daemon.web.load_samples import CardLoads
from gpulease.daemon.workers.context_probe import measure_overhead
from gpulease.daemon.workers.registry import Workers
from gpulease.daemon.workers.zygote_client import ZygoteBroken
from gpulease.daemon.workers.zygote_discovery import CannotAdopt, FoundZygote, find_zygotes
from gpulease.protocol.address import MAX_UNIX_PATH_BYTES, Address, TlsAddress, UnixAddress
from gpulease.protocol.failures import Failure
from gpulease.protocol.opcodes import HelloOption, Status
from gpulease.protocol.primitives import Tlv
from gpulease.protocol.time_units import NS_PER_S

if TYPE_CHECKING:
    # These are imported if the settings ask for them, because their imports take a twentieth of a daemon's start.
    from gpulease.daemon.broker.fleet_frontend import FleetFrontend
    from gpulease.daemon.broker.tls_frontend import TlsFrontend

SHUTDOWN_TIMEOUT_S: Final = 10.0
"""Time within which leases should be proved free when the daemon stops. Their workers are killed in any case."""

SETTLE_TIMEOUT_S: Final = 10.0
"""Time for which a stopping daemon waits for leases that are ending, if it leaves the others to the next daemon. The
next daemon continues the ends that take longer."""

ZYGOTES: Final = "zygotes"
"""The folder in the state folder where zygotes listen."""

_EVERY_HOST: Final = ("0.0.0.0", "::", "")
"""Hosts of an address that listens on every interface."""

_SOCKET_BYTES: Final = len(f"/{ZYGOTES}/01234567.sock")

_STOPPING: Final = Failure(Status.DISCONNECTED, "the daemon is stopping", hint="Try again once it runs again.")
_RESTARTING: Final = Failure(
    Status.BUSY,
    "the daemon is being restarted; leases continue",
    hint="Connect again in a moment, and repeat the request.",
)


@contextlib.asynccontextmanager
async def running_service(config: Config, sockets: Sequence[GivenSocket] = ()) -> AsyncIterator["Service"]:
    """Run a daemon that listens, until the block is left.

    Args:
        config: The settings, checked as far as they can be without this host.
        sockets: Listening sockets that were passed to the daemon.

    Raises:
        NoThread, CardsUnavailable, ZygoteBroken, CannotRecord, TokensUnavailable, CannotListen, CannotAdopt,
          JournalBroken, BadHandover: The daemon can't start. Each message is a sentence for the operator.
        ConfigError: A setting does not fit this host.
    """
    # Do this before anything is started: make this process the parent of zygotes' orphans, and check that threads and
    # descriptors suffice for all leases that it may have.
    adopt_orphans()
    raise_descriptor_limit()
    asyncio.get_running_loop().set_default_executor(LoopThreadPool())
    async with (
        open_state(config) as state,
        _open_cards(config) as source,
        _open_workers(config, source, state) as workers,
    ):
        # Poll the cards before any zygote starts: a card can be measured only while it has no leases.
        facts = await retry(lambda: asyncio.to_thread(source.discover, state.journal.cards))
        if not facts:
            raise CardsUnavailable("this host has no card", hint="Start with --driver cpu to emulate one.")
        # Before workers start, refuse settings that this host does not allow. A card or memory that is missing now may
        # be there later, so that is only reported: see `_report_missing`.
        _check_worker_user(config)
        _check_park_memory(config)
        await _start_workers(workers, state, source)
        # Only now is there a zygote, which forks the workers that are measured.
        cards = await _measure(source, facts, workers, state.journal)
        async with (
            open_recorder(config, source.driver, cards) as recorder,
            _started(Service(config, source, cards, workers, recorder, state.journal, sockets)) as service,
        ):
            yield service
        # Leave sessions to the next daemon only if the service decided so; a failure above keeps the default.
        state.is_left = service.leaves_sessions


class Service:
    """A running daemon: the lease table with its runtime, and the sockets by which peers reach it.

    Attributes:
        runtime: The runtime around the lease table.
        addresses: The addresses it listens on, with the ports that the kernel chose.
        url: The web page's URL, "" if there is none.
        stale: Sockets that an earlier daemon left at addresses that the settings no longer have.
        on_new_sockets: If set, called with the addresses that have got new sockets.
        leaves_sessions: Whether a stop leaves sessions to the next daemon. Unless a stop was requested, this is True if
          sessions can outlive the daemon: a failed start, or a fault, must not end sessions.
    """

    def __init__(
        self,
        config: Config,
        source: CardSource,
        cards: list[Card],
        workers: Workers,
        recorder: FactRecorder,
        journal: Journal,
        sockets: Sequence[GivenSocket] = (),
    ) -> None:
        # Make the parts from the core outwards: the table, the tokens for its leases, the runtime around both, then the
        # listeners.
        table = LeaseTable(
            cards, config.limits, config.warm_contexts, journal.recovered, config.recycling, config.placement
        )
        tokens = TokenService(
            table, config.require_token, config.token_key_file, config.state, journal.spent, journal.revoked_tokens
        )
        self.runtime = Runtime(table, source, workers, tokens, recorder, config.max_load_s, journal)
        self.addresses: list[Address] = []
        self.url = ""
        self.stale: list[GivenSocket] = []
        self.leaves_sessions = config.state is not None
        self._config = config
        self._cards = cards
        self._driver = source.driver
        self._recorder = recorder
        self._given = sockets
        # HELLO reports to every client whether leases survive a restart, and whether the cards are real.
        keeps = () if config.state is None else (Tlv(HelloOption.KEEPS_LEASES, b""),)
        warns = (Tlv(HelloOption.WARNING, source.warning.encode()),) if source.warning else ()
        self._hello_options = (*keeps, *warns)
        self._limiter = ConnectionLimiter(
            config.max_connections, config.max_connections_per_tenant, self.runtime.memory_reserve.is_enough
        )
        self._listeners = Listeners(self._new_connection, config.socket_mode)
        self._restoring = PeriodicTask(self._restore_sockets, CHECK_INTERVAL_S, log_restoring_fault)
        self.on_new_sockets: Callable[[Collection[Address]], Awaitable[None]] | None = None
        self.runtime.health.cards_warning = source.warning
        self.runtime.health.memory_warning = lambda: park_memory_problem(config.limits, host_memory())
        self.runtime.health.listening_problem = self._listeners.problem
        self._tls: TlsFrontend | None = None
        if config.tls is not None and any(isinstance(address, TlsAddress) for address in config.listen):
            from gpulease.daemon.broker import tls_frontend

            self._tls = tls_frontend.TlsFrontend(
                config.tls, config.tenant_of_certificate, self._new_remote_connection, journal
            )
        self._loads: LoadHistory | None = None
        self._web: WebFrontend | None = None
        # The web process reads through a connection of its own, and requests actions through its channel.
        if (http := config.of_http) is not None:
            self._loads = LoadHistory(table, source, workers, self._notify_page)
            actions = WebActionRunner(self.runtime)
            self._web = WebFrontend(http, config.of_sandbox, self._new_reader, actions, first=self._first_for_page)
        self._fleet: FleetFrontend | None = None
        # The fleet's process claims names and quota bytes before the table admits their leases.
        if config.fleet is not None:
            from gpulease.daemon.broker import fleet_frontend

            self._fleet = fleet_frontend.FleetFrontend(
                config.fleet,
                config.of_sandbox,
                table,
                cards,
                self.runtime.post,
                journal,
                self._fleet_addresses,
                self._notify_page,
            )
            self.runtime.claims = self.runtime.health.fleet = self._fleet
            self.runtime.metrics.fleet = self._fleet.figures

    # --- start ---

    async def start(self) -> None:
        """Take over the leases and workers of an earlier daemon, listen, and begin to make warm contexts.

        Raises CannotListen or BadHandover.
        """
        # First prepare for a lack of memory, then take over the leases, and only then let peers connect: a peer must
        # never see a table without the leases that continue.
        self.runtime.memory_reserve.release_on_memory_error(asyncio.get_running_loop())
        self._report_missing()
        self.runtime.adopt(self._cards, time.monotonic_ns() + self._config.limits.max_ttl_s * NS_PER_S)
        await self.runtime.card_watch.start()
        if self._tls is not None:
            await self._tls.start()
        elif self._config.tls is not None:
            log_event(LogEvent.TLS_NOT_USED)
        # Assign the sockets that the service manager or the earlier daemon left to the addresses.
        assigned = await self._assign_given()
        for address in self._config.listen:
            self.addresses.append(await self._listen(address, assigned))
        if self._web is not None:
            self.url = await self._web.listen(assigned.of(http) if (http := self._config.http) else ())
        if self._loads is not None:
            self._loads.start()
        if self._fleet is not None:
            await self._fleet.start()
        # Start warm contexts and metrics last, because they must not delay the first client.
        self.runtime.post(PoolTimerFired())
        self.runtime.metrics.start()
        self._restoring.start()
        self.runtime.health.is_listening = True

    async def _assign_given(self) -> Assigned:
        """Assign the sockets that were passed to the daemon to the configured addresses, and close the stale ones."""
        if not self._given:
            return Assigned()
        http = self._config.http
        addresses = [*self._config.listen, *([http] if http else [])]
        assigned = assign(self._given, {address: await _resolve(address) for address in addresses})
        self.stale = assigned.stale
        for given in assigned.stale:
            if given.was_kept:
                # The service manager still has it open. Shut it down, so that no client waits on a socket that is not
                # served.
                given.sock.shutdown(socket.SHUT_RDWR)
            given.sock.close()
        return assigned

    async def _listen(self, address: Address, assigned: Assigned) -> Address:
        sockets = assigned.of(address)
        if not isinstance(address, TlsAddress):
            listening = await self._listeners.listen(address, sockets, set_mode=not assigned.is_units(address))
            # A given socket that was closed and replaced can no longer be reached, so it is stale.
            self.stale += [given for given in assigned.kept(address) if given.sock.fileno() < 0]
            return listening
        if self._tls is None:
            raise NeverListens(f"can't listen on {address}: the settings name no certificates")
        return await self._tls.listen(address, sockets)

    async def _restore_sockets(self) -> None:
        recreated = await self._listeners.restore()
        if recreated and self.on_new_sockets is not None:
            await self.on_new_sockets(recreated)

    def _fleet_addresses(self) -> list[str]:
        """Return the addresses for tenants of other hosts; the host's name replaces the address of all interfaces.

        A Unix socket's path or a loopback address is left out: on another host it would lead to that host's daemon.
        """
        return [str(_named(address)) for address in self.addresses if isinstance(address, TlsAddress)]

    # --- connections ---

    def _new_connection(self) -> ControlConnection:
        tenants = self._config.tenant_of_uid
        return ControlConnection(self.runtime, self._driver, self._limiter, tenants, options=self._hello_options)

    def _new_remote_connection(self, peer: Peer, refusal: Failure | None) -> ControlConnection:
        return ControlConnection(self.runtime, self._driver, self._limiter, {}, peer, refusal, self._hello_options)

    def _new_reader(self, peer: Peer) -> ControlConnection:
        """Accept a connection of one of the daemon's own processes, which does not count against the limits."""
        return ControlConnection(self.runtime, self._driver, None, {}, peer, options=self._hello_options)

    def _notify_page(self, message: CardLoads | FleetMembership) -> None:
        if self._web is not None:
            self._web.send(message)

    def _first_for_page(self) -> Iterator[CardLoads | FleetMembership]:
        if self._loads is not None:
            yield from self._loads.messages()
        if self._fleet is not None:
            yield self._fleet.membership()

    # --- a new configuration ---

    def take_settings(self, config: Config, token_digest: bytes) -> None:
        """Apply the settings that can change while the daemon runs; see `lifecycle.Reloader`.

        All other settings stay unchanged.

        Args:
            config: The settings in their file now.
            token_digest: The digest of the web page's token in its file now; b"" if there is none.
        """
        # If a local user or a certificate has another tenant name now, nobody may get the contexts of that name's
        # former owner.
        by_uid = (self._config.tenant_of_uid, config.tenant_of_uid)
        by_certificate = (self._config.tenant_of_certificate, config.tenant_of_certificate)
        self.runtime.post(TenantRulesChanged(config.limits.tenants, changed_hands(by_uid, by_certificate)))
        self._config = replace(
            self._config,
            limits=replace(self._config.limits, tenants=config.limits.tenants),
            tenant_of_uid=config.tenant_of_uid,
            tenant_of_certificate=config.tenant_of_certificate,
            max_connections=config.max_connections,
            max_connections_per_tenant=config.max_connections_per_tenant,
        )
        self._limiter.set_limits(config.max_connections, config.max_connections_per_tenant)
        if self._tls is not None:
            self._tls.set_tenants(config.tenant_of_certificate)
        if self._web is not None:
            self._web.set_token(token_digest)
            self._config = replace(self._config, http_token_file=config.http_token_file)
        self._recorder.reloaded(config_digest(self._config))
        self._report_missing()

    def _report_missing(self) -> None:
        """Log each setting that needs a card or memory that this host does not have now, and report it as health."""
        health = self.runtime.health
        missing = missing_devices(self._config.limits.tenants, self._cards)
        health.missing_cards = "; ".join(missing)
        for reason in (*missing, health.memory_warning()):
            if reason:
                log_event(LogEvent.SETTING_BEYOND_HOST, reason=reason)

    # --- stop ---

    @property
    def bound(self) -> list[tuple[Address, int]]:
        """The listening sockets that this daemon made, each with its address in the settings."""
        makers = [maker for maker in (self._listeners, self._tls, self._web) if maker is not None]
        return [listener for maker in makers for listener in maker.bound]

    def leave_sockets(self) -> None:
        """Keep the sockets' files on `stop`, because another process keeps the sockets open for the next daemon."""
        self._listeners.leave_paths()

    def may_end_sessions(self, *, is_interrupted: bool) -> None:
        """Let a stop end the sessions if the operator has configured that.

        Args:
            is_interrupted: Whether SIGINT asked the daemon to stop.
        """
        self.leaves_sessions = self._config.on_stop is OnStop.KEEP and not is_interrupted

    async def stop(self) -> None:
        """Stop listening, end sessions or leave them, and close all connections. Each step has a time limit."""
        self.runtime.health.is_listening = False
        await self._restoring.stop()
        # First stop accepting peers, then end or leave the sessions, then let open connections read their last replies.
        self._listeners.close()
        if self._loads is not None:
            await self._loads.stop()
        if self._web is not None:
            await self._web.stop()
        if self._tls is not None:
            await self._tls.stop()
        if self.leaves_sessions:
            await self._leave_sessions()
        else:
            await self._end_sessions()
        # Stop the fleet's process after the leases, because claims are released only once the memory is proved free.
        if self._fleet is not None:
            await self._fleet.stop()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await self._limiter.wait_until_empty()

    async def _end_sessions(self) -> None:
        """Tear leases down and wait for the proofs that their memory is free. Their processes end later in any case."""
        self.runtime.post(ShutdownRequested())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                await self.runtime.drained()
        self._limiter.close_all_with(_STOPPING)

    async def _leave_sessions(self) -> None:
        self._limiter.turn_away_all(_RESTARTING)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_TIMEOUT_S):
                await self.runtime.settled()


@contextlib.asynccontextmanager
async def _started(service: Service) -> AsyncIterator[Service]:
    try:
        await service.start()
        yield service
    finally:
        await service.stop()
        await service.runtime.stop()


class LastingState:
    """The state that outlives this daemon: the journal, and the zygotes with their sessions.

    Attributes:
        zygotes: The folder where zygotes listen; None if nothing outlives the daemon.
        is_left: Whether sessions are left to the next daemon when this one ends.
    """

    def __init__(self, journal: Journal, zygotes: Path | None, found_zygotes: list[FoundZygote]) -> None:
        self.journal = journal
        self.zygotes = zygotes
        self.is_left = zygotes is not None
        self._found_zygotes = found_zygotes

    def take_zygotes(self) -> list[FoundZygote]:
        """Return the zygotes that an earlier daemon left, which the caller must close."""
        zygotes, self._found_zygotes = self._found_zygotes, []
        return zygotes


@contextlib.asynccontextmanager
async def open_state(config: Config) -> AsyncIterator[LastingState]:
    """Open and lock the state folder until the block is left. Raises JournalBroken or CannotAdopt."""
    if config.state is None:
        yield LastingState(Journal(), None, [])
        return
    # Check this first: otherwise a path that is too long would fail only when the first zygote is started.
    if len(bytes(config.state)) + _SOCKET_BYTES > MAX_UNIX_PATH_BYTES:
        raise CannotAdopt(
            f"the path of state must have at most {MAX_UNIX_PATH_BYTES - _SOCKET_BYTES} bytes, because the "
            "daemon creates sockets in that folder",
            "Choose a shorter path.",
            os.EX_CONFIG,
        )
    journal = await asyncio.to_thread(open_journal, config.state, boot_id())
    try:
        # The lock of the journal also protects this folder: no other daemon takes these zygotes.
        zygotes = _zygotes_folder(config.state)
        state = LastingState(journal, zygotes, await asyncio.to_thread(find_zygotes, zygotes))
        try:
            yield state
        finally:
            for zygote in state.take_zygotes():
                zygote.close()
    finally:
        await journal.stop()


def _zygotes_folder(state: Path) -> Path:
    """Return the folder where zygotes listen, and make it if it is missing. Raises CannotAdopt."""
    folder = state / ZYGOTES
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        raise CannotAdopt(f"{folder} must be a folder", "Move away what has this path.", os.EX_CONFIG) from None
    except OSError as error:
        hint = "Check the disk and its free space, then start again."
        raise CannotAdopt(f"can't create the folder {folder}: {error.strerror}", hint, os.EX_IOERR) from None
    return folder


@contextlib.asynccontextmanager
async def _open_cards(config: Config) -> AsyncIterator[CardSource]:
    source = await retry(lambda: asyncio.to_thread(choose_cards, config.driver, config.vram_bytes))
    try:
        yield source
    finally:
        source.close()


@contextlib.asynccontextmanager
async def _open_workers(config: Config, source: CardSource, state: LastingState) -> AsyncIterator[Workers]:
    # The sandbox and the wiping of the heap apply to all workers of this daemon. Workers that an earlier daemon left
    # keep theirs.
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


async def _start_workers(workers: Workers, state: LastingState, source: CardSource) -> None:
    """Start a zygote, even if an earlier daemon left some, and log which sandbox measures are off."""
    try:
        await workers.start(state.take_zygotes())
    except ZygoteBroken:
        # Zygotes preload the driver, which may be the part that is broken.
        driver_problem = await asyncio.to_thread(source.why_no_context)
        if driver_problem is not None:
            raise driver_problem from None
        raise
    for finding in workers.findings():
        if not finding["on"]:
            log_event(LogEvent.SANDBOX_OFF, measure=finding["measure"], reason=finding["detail"])


async def _measure(source: CardSource, facts: Sequence[CardFacts], workers: Workers, journal: Journal) -> list[Card]:
    """Return the cards, each with the bytes that a context takes. Only cards that are new in this boot are measured."""
    if source.warning:
        log_event(LogEvent.CARDS_PRETENDED, reason=source.warning)
    unknown = [fact for fact in facts if fact.uuid not in journal.cards]
    # The bytes of a worker that was reaped just before may not be free yet.
    has_other_contexts = bool(workers.found_workers())
    # Cards that were measured in this boot keep their figures: with leases on them they can't be measured.
    overheads = {uuid: row.overhead_bytes for uuid, row in journal.cards.items()}
    overheads |= zip([fact.uuid for fact in unknown], await measure_overhead(source, workers, unknown), strict=True)
    cards = []
    for fact in facts:
        overhead = overheads[fact.uuid]
        spare = max(0, fact.found_bytes - fact.capacity_bytes)
        sizes = (fact.capacity_bytes, overhead, fact.is_partition, spare, fact.slack_bytes)
        pins = source.driver == "cuda"
        others = source.has_others
        cards.append(
            Card(fact.uuid, fact.index, fact.name, *sizes, pins_host_memory=pins, peers=fact.peers, has_others=others)
        )
        log_event(
            LogEvent.CARD_FOUND,
            index=fact.index,
            card=fact.uuid,
            name=fact.name,
            capacity_bytes=fact.capacity_bytes,
            overhead_bytes=overhead,
        )
    # Do not store figures that were measured while other contexts existed: they would be used until the next boot.
    if unknown and has_other_contexts:
        log_event(LogEvent.CARD_CROWDED)
    elif unknown:
        measured = [
            CardRow(entry.uuid, entry.found_bytes, overheads[entry.uuid], entry.unattributed_bytes) for entry in facts
        ]
        journal.remember_cards(measured)
    return cards


def _check_worker_user(config: Config) -> None:
    if config.worker_user is None or Measure.USER in config.sandbox_without:
        return
    try:
        check_worker_user(config.worker_user)
    except ValueError as error:
        raise ConfigError(f"setting {error}") from None


def _check_park_memory(config: Config) -> None:
    try:
        check_park_memory(config.limits, group_memory_limit())
    except ValueError as error:
        raise ConfigError(f"setting {error}") from None


def _named(address: TlsAddress) -> TlsAddress:
    return replace(address, host=os.uname().nodename) if address.host in _EVERY_HOST else address


async def _resolve(address: Address) -> list[tuple[str, int]]:
    """Return the IP addresses and port of a name. Raises CannotListen."""
    if isinstance(address, UnixAddress):
        return []
    loop = asyncio.get_running_loop()
    try:
        infos = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise cannot_listen(f"listen on {address}", error) from None
    return [(str(entry[4][0]), int(entry[4][1])) for entry in infos]


def loop_factory() -> Any:
    """Return uvloop's factory for `asyncio.Runner`; None, for asyncio's slower loop, if uvloop is missing."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
