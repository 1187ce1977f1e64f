"""Reloading the settings while the daemon runs (SIGHUP, `systemctl reload`).

Some settings apply at once, the others at the next start. An unusable file changes nothing; the log has a sentence.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Final

from gpulease.daemon.broker.service import Service
from gpulease.daemon.broker.web_frontend import token_digest_of
from gpulease.daemon.config.settings import SETTINGS, Config, ConfigError
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.supervisor.notifier import Notifier, status

RELOADED: Final = frozenset(
    {
        *("tenant_of_uid", "tenant_of_certificate", "max_connections", "max_connections_per_tenant"),
        "http_token_file",
    }
)
"""The settings that apply at once, besides [tenants]. They apply to new tenants, connections and requests; leases and
connections that exist stay. A changed token in the token's file ends the access of the token before."""

_NAMES: Final = {setting.attribute: setting.name for setting in SETTINGS}
_NS_PER_USEC: Final = 1_000


def settings_that_wait(now: Config, wanted: Config) -> list[str]:
    """Return the names of the changed settings that apply at the next start only."""
    wanted = replace(wanted, limits=replace(wanted.limits, tenants=now.limits.tenants))
    differ = (item.name for item in fields(Config) if getattr(now, item.name) != getattr(wanted, item.name))
    return [_NAMES[name] for name in differ if name not in RELOADED]


class Reloader:
    """Reloads the settings, one reload after the other.

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
        self._task: asyncio.Task[None] | None = None
        self._is_wanted = False

    def ask(self) -> None:
        """Reload. A reload that is under way may have read an older file, so another one follows it."""
        self._is_wanted = True
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._reload_while_wanted())

    async def stop(self) -> None:
        """Wait for a reload that is under way."""
        self._is_wanted = False
        if self._task is not None:
            await self._task

    async def _reload_while_wanted(self) -> None:
        while self._is_wanted:
            self._is_wanted = False
            now_usec = time.monotonic_ns() // _NS_PER_USEC
            # Type=notify-reload matches the answer to the request by this time (sd_notify(3)).
            await self._notifier.tell_reliably("RELOADING=1", f"MONOTONIC_USEC={now_usec}")
            said = await self._reload()
            await self._notifier.tell_reliably("READY=1", status(said))

    def _read(self) -> tuple[Config, bytes]:
        """Return the settings and the digest of the web page's token. Raises ConfigError."""
        config = self._load()
        http = config.of_http
        # A page that the new settings drop stays until the next start, but no token opens it.
        return config, b"" if http is None else token_digest_of(http)

    async def _reload(self) -> str:
        try:
            config, token_digest = await asyncio.to_thread(self._read)
            self._service.take_settings(config, token_digest)
        except ConfigError as error:
            log_event(LogEvent.SETTINGS_KEPT, f"the settings stay as they were: {error}", reason=str(error))
            return f"The settings stay as they were: {error}"
        waiting = settings_that_wait(self._started_with, config)
        if waiting:
            said = f"the settings were read again; to be taken at the next start: {', '.join(waiting)}"
            log_event(LogEvent.SETTINGS_READ, said, waiting=waiting)
            return f"{said[0].upper()}{said[1:]}."
        log_event(LogEvent.SETTINGS_READ)
        return "The settings were read again."
