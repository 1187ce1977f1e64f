"""Settings read anew while the daemon runs (SIGHUP, `systemctl reload`): what is taken, and what takes a restart.

A file that can't be used changes nothing: the settings stay as they were, and the log has a sentence.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Final

from gpulease.daemon.broker.service import Service
from gpulease.daemon.broker.web_frontend import token_digest_of
from gpulease.daemon.config.settings import Config, ConfigError
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.daemon.supervisor.notifier import Notifier, status

RELOADED: Final = frozenset(
    {
        *("tenant_of_uid", "tenant_of_certificate", "max_connections", "max_connections_per_tenant"),
        "http_token_file",
    }
)
"""Beside [tenants]. For tenants and connections that come, and for what tenants ask for, from then on; what they have
stays theirs. Of the token's file what is in it is read anew; who was let in by the token before is not any more."""

_NAMES: Final = {"vram_bytes": "vram", "audit_file_bytes": "audit_file_size"}
_NS_PER_USEC: Final = 1_000


def settings_that_wait(now: Config, wanted: Config) -> list[str]:
    """The names of those that differ, and are taken at the next start only."""
    wanted = replace(wanted, limits=replace(wanted.limits, tenants=now.limits.tenants))
    differ = (item.name for item in fields(Config) if getattr(now, item.name) != getattr(wanted, item.name))
    return [_NAMES.get(name, name) for name in differ if name not in RELOADED]


class Reloading:
    """Takes settings anew, one time after the other.

    Args:
        load: Reads and checks them; raises ConfigError. It blocks, so it is called in a thread.
        config: Those the service was started with.
    """

    def __init__(self, service: Service, notifier: Notifier, load: Callable[[], Config], config: Config) -> None:
        self._service = service
        self._notifier = notifier
        self._load = load
        self._started_with = config
        self._task: asyncio.Task[None] | None = None
        self._is_wanted = False

    def ask(self) -> None:
        """Read them; once more behind a time that is under way, which may have read what is old by now."""
        self._is_wanted = True
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._reload_while_wanted())

    async def stop(self) -> None:
        """Let a time that is under way come to its end."""
        self._is_wanted = False
        if self._task is not None:
            await self._task

    async def _reload_while_wanted(self) -> None:
        while self._is_wanted:
            self._is_wanted = False
            now_usec = time.monotonic_ns() // _NS_PER_USEC
            # Type=notify-reload orders the answer by that time (sd_notify(3)).
            await self._notifier.tell_surely("RELOADING=1", f"MONOTONIC_USEC={now_usec}")
            said = await self._reload()
            await self._notifier.tell_surely("READY=1", status(said))

    def _read(self) -> tuple[Config, bytes]:
        """The settings, and what the web page's token is. Raises ConfigError."""
        config = self._load()
        http = config.of_http
        # A page that is not wanted any more is there until the next start, but opens nothing to anybody.
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
