"""The daemon's life cycle under its service manager: starting, ready, reloading its settings, stopping.

A reload (SIGHUP) applies the settings that can change while the daemon runs. The log names these that have changed, and
the other changed settings, which apply after a restart.
"""

import asyncio
import contextlib
import faulthandler
import signal
import time
from collections.abc import Callable, Collection, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from gpulease.daemon.broker.service import Service, running_service
from gpulease.daemon.broker.web_frontend import token_digest_of
from gpulease.daemon.config.settings import Config, ConfigError
from gpulease.daemon.host.memory_cleanup import collect_rarely
from gpulease.daemon.host.socket_activation import BadHandover, GivenSocket, kept_name, take_sockets
from gpulease.daemon.host.unsolicited_fds import interrupting_closes
from gpulease.daemon.host.version import VERSION
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.supervisor import notifier as watchdog
from gpulease.daemon.supervisor.notifier import Notifier, status
from gpulease.protocol.address import Address
from gpulease.protocol.settings_reader import declared
from gpulease.protocol.time_units import NS_PER_US

MAX_LOGGED_CHANGES: Final = 32
"""Maximum number of changed settings that the log names after a reload; it states how many more there are."""


def settings_that_wait(now: Config, reloaded: Config) -> list[str]:
    """Return the names of the changed settings that apply only at the next start."""
    # [tenants] is reloaded. Existing leases and connections keep the limits and rights that they were granted.
    reloaded = replace(reloaded, limits=replace(reloaded.limits, tenants=now.limits.tenants))
    return [
        key
        for key, entry in declared(Config).items()
        if not entry.setting.is_reloaded and getattr(now, entry.attribute) != getattr(reloaded, entry.attribute)
    ]


def settings_in_effect(before: Config, reloaded: Config) -> list[str]:
    """Return the names of the changed settings that apply from now on; for [tenants] those of the tenants' tables."""
    old, new = before.limits.tenants, reloaded.limits.tenants
    changed = [
        key
        for key, entry in declared(Config).items()
        if entry.setting.is_reloaded and getattr(before, entry.attribute) != getattr(reloaded, entry.attribute)
    ]
    if old.default != new.default:
        changed.append("tenants.default")
    # A tenant's table contains what it does not change in the default one, so a change there is a change here as well.
    names = sorted(old.by_name.keys() | new.by_name.keys())
    changed += [f"tenants.{name}" for name in names if old.by_name.get(name) != new.by_name.get(name)]
    # Do not log thousands of tenants.
    omitted = len(changed) - MAX_LOGGED_CHANGES
    return changed if omitted <= 0 else [*changed[:MAX_LOGGED_CHANGES], f"and {omitted} more"]


class Reloader:
    """Reloads the settings, one reload after another.

    Args:
        service: The running daemon.
        notifier: The service manager's socket.
        load: Reads and checks the settings; raises ConfigError. It blocks, so it runs in a thread.
        config: The settings that the service was started with.
    """

    def __init__(self, service: Service, notifier: Notifier, load: Callable[[], Config], config: Config) -> None:
        self._service = service
        self._notifier = notifier
        self._load = load
        self._started_with = config
        self._last_read = config
        self._task: asyncio.Task[None] | None = None
        # Clear the event before the file is read: a signal from here on requests another reload.
        self._is_wanted = False

    def ask(self) -> None:
        """Reload. A reload in progress may have read an older file, so another one follows."""
        self._is_wanted = True
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._reload_while_wanted())

    async def stop(self) -> None:
        """Wait for the reload that is in progress, and cancel any reload that would follow it."""
        self._is_wanted = False
        if self._task is not None:
            await self._task

    async def _reload_while_wanted(self) -> None:
        while self._is_wanted:
            self._is_wanted = False
            now_usec = time.monotonic_ns() // NS_PER_US
            # Type=notify-reload matches the answer to the request by this time (sd_notify(3)).
            await self._notifier.send_reliably("RELOADING=1", f"MONOTONIC_USEC={now_usec}")
            message = await self._reload()
            await self._notifier.send_reliably("READY=1", status(message))

    def _read(self) -> tuple[Config, bytes]:
        """Return the settings and the digest of the web page's token. Raises ConfigError."""
        config = self._load()
        http = config.of_http
        # A page that the new settings drop stays until the next start, but no token opens it.
        return config, b"" if http is None else token_digest_of(http)

    async def _reload(self) -> str:
        try:
            # Apply all settings or none: settings with an error change nothing.
            config, token_digest = await asyncio.to_thread(self._read)
            self._service.take_settings(config, token_digest)
        except ConfigError as error:
            log_event(LogEvent.SETTINGS_KEPT, reason=str(error))
            return f"Settings not reloaded; the old ones stay in effect: {error}"
        # Compare with the settings of the start, because those are still in effect.
        waiting = settings_that_wait(self._started_with, config)
        # A file that lost its limits is valid, so the log must show that they are gone.
        log_event(LogEvent.SETTINGS_READ, changed=settings_in_effect(self._last_read, config), waiting=waiting)
        self._last_read = config
        if waiting:
            return f"Settings reloaded; these take effect at the next start: {', '.join(waiting)}."
        return "Settings reloaded."


class Supervised:
    """A daemon with its service manager's notification socket, watchdog interval and listening sockets.

    Args:
        notifier: The notification socket.
        watched_every_s: The watchdog's interval in seconds; None without a watchdog.
        sockets: The sockets that the service manager passed.
    """

    def __init__(self, notifier: Notifier, watched_every_s: float | None, sockets: Sequence[GivenSocket]) -> None:
        self._notifier = notifier
        self._watchdog = watchdog.Watchdog(notifier, watched_every_s)
        self._given = sockets

    @classmethod
    def taken_from(cls, environment: MutableMapping[str, str], pid: int) -> "Supervised":
        """Take everything out of the environment, so that no child inherits it. Raises BadHandover."""
        # Create the notifier first, because it reports to the operator why the sockets are wrong.
        notifier, every_s = Notifier.taken_from(environment), watchdog.interval_s(environment, pid)
        try:
            return cls(notifier, every_s, take_sockets(environment, pid))
        except BadHandover as error:
            notifier.send_status(str(error))
            notifier.close()
            raise

    @classmethod
    def without_manager(cls) -> "Supervised":
        return cls(Notifier(), None, ())

    def report_failure(self, text: str) -> None:
        """Send the reason why the daemon ends, for `systemctl status`."""
        self._notifier.send_status(text)

    def close(self) -> None:
        self._notifier.close()

    async def serve(self, config: Config, load: Callable[[], Config] | None = None) -> None:
        """Run the daemon until SIGINT or SIGTERM; `load` reads its settings again. Raises as `running_service` does."""
        stop_signal: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()
        _stop_at_signals(stop_signal)
        # A reload that is requested during the start happens afterwards.
        reload_wanted = asyncio.Event()
        if load is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload_wanted.set)
        async with contextlib.AsyncExitStack() as stack:
            # From here on, closes that a peer blocks are interrupted. The start creates a context on every card, which
            # may take longer than the service manager's limit, so the limit is extended until the sockets listen.
            stack.enter_context(interrupting_closes())
            async with self._notifier.starting():
                self._notifier.send_status("Creating a context on every card.")
                service = await stack.enter_async_context(running_service(config, self._given))
            for address in service.addresses:
                log_event(LogEvent.DAEMON_LISTENING, address=str(address), version=VERSION)
            if service.url:
                log_event(LogEvent.DAEMON_SEEN, url=service.url, version=VERSION)
            # If the daemon crashes from now on, its sockets stay with the service manager, and clients wait for the
            # next daemon.
            await self._store_sockets(service)
            service.on_new_sockets = partial(self._store_new_sockets, service)
            # Units that depend on this daemon start only after this notification, because only now does the daemon
            # answer.
            await self._notifier.send_reliably("READY=1", status(_ready_text(service)))
            if self._watchdog.start():
                # The service manager ends a stuck loop with SIGABRT; faulthandler then logs where the loop was.
                faulthandler.enable()
            stack.callback(self._watchdog.stop)
            if load is not None:
                reloader = Reloader(service, self._notifier, load, config)
                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloader.ask)
                stack.push_async_callback(reloader.stop)
                if reload_wanted.is_set():
                    reloader.ask()
            # The objects that exist now live until the end, so the garbage collector need not examine them again.
            collect_rarely()
            number = await stop_signal
            # SIGINT comes from a person at a terminal, SIGTERM from the service manager. The exit of the stack then
            # ends everything above in reverse order: the reloader, the watchdog, the service.
            service.may_end_sessions(is_interrupted=number is signal.SIGINT)
            log_event(LogEvent.DAEMON_STOPPING)
            await self._notifier.send_reliably("STOPPING=1", status("Stopping."))

    async def _store_sockets(self, service: Service) -> None:
        """Let the service manager store this daemon's own listening sockets, and drop the unused ones."""
        if not self._notifier.is_connected:
            return
        # Clients that connect to a stored socket that no setting names would wait forever.
        for name in {stale_socket.name for stale_socket in service.stale}:
            await self._drop_stored(name)
        for address, fd in service.bound:
            await self._store(address, fd)
        service.leave_sockets()

    async def _store_new_sockets(self, service: Service, addresses: Collection[Address]) -> None:
        """Let the service manager replace the stored sockets of some addresses."""
        if not self._notifier.is_connected:
            return
        for address, fd in service.bound:
            if address in addresses:
                await self._drop_stored(kept_name(address))
                await self._store(address, fd)

    async def _store(self, address: Address, fd: int) -> None:
        # FDPOLL=0 keeps systemd from dropping a listening socket that is shut down for a moment.
        await self._notifier.send_reliably("FDSTORE=1", f"FDNAME={kept_name(address)}", "FDPOLL=0", fds=[fd])

    async def _drop_stored(self, name: str) -> None:
        await self._notifier.send_reliably("FDSTOREREMOVE=1", f"FDNAME={name}")


def _stop_at_signals(stop_signal: "asyncio.Future[signal.Signals]") -> None:
    def on_signal(number: signal.Signals) -> None:
        if not stop_signal.done():
            stop_signal.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)


def _ready_text(service: Service) -> str:
    return f"Leasing; listens on {', '.join(map(str, service.addresses))}."
