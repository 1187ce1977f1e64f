"""Applies a decode server's changed settings on SIGHUP."""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpulease.client.errors import GpuLeaseError, InvalidRequest

if TYPE_CHECKING:
    # These imports need the extra `serve`. If it is missing, the commands' error names the extra to install.
    from gpulease.client.decode.openai.decode_settings import DecodeSettings
    from gpulease.client.decode.supervisor.background_tasks import BackgroundTasks

log: Final = logging.getLogger("gpulease.decode")


def check_kind(path: Path, reloaded: "DecodeSettings", settings: "DecodeSettings") -> None:
    """Raise InvalidRequest if a settings file that was read again is for the other kind of server."""
    if (reloaded.pool is None) is not (settings.pool is None):
        must = "model, and no [models.NAME]" if settings.pool is None else "[pool] and [models.NAME], and no model"
        raise InvalidRequest(f"{path} must have {must}", "Restart the server to change between one model and many")


class SettingsReload:
    """Reads a settings file again on each SIGHUP and applies it, in tasks of the server.

    A SIGHUP without a handler ends the process, so make this object before a model is loaded. Signals before `begin`
    are handled after it.

    Args:
        path: The file.
        tasks: The server's tasks.
    """

    def __init__(self, path: Path, tasks: "BackgroundTasks") -> None:
        self._path, self._tasks = path, tasks
        self._apply: Callable[[DecodeSettings], Awaitable[str]] | None = None
        self._begun, self._one_at_a_time = asyncio.Event(), asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGHUP, self._start)

    def begin(self, apply: "Callable[[DecodeSettings], Awaitable[str]]") -> None:
        """Apply settings from now on.

        Args:
            apply: Applies settings, and returns the text for the log. If it raises a GpuLeaseError, the server keeps
                its earlier settings.
        """
        self._apply = apply
        self._begun.set()

    def close(self) -> None:
        self._loop.remove_signal_handler(signal.SIGHUP)

    def _start(self) -> None:
        self._tasks.start(self._reload())

    async def _reload(self) -> None:
        from gpulease.client.decode.openai.decode_settings import load_decode_settings

        await self._begun.wait()
        assert self._apply is not None
        async with self._one_at_a_time:
            try:
                # Load the settings in a thread, because that reads files.
                applied = await self._apply(await asyncio.to_thread(load_decode_settings, self._path))
            except GpuLeaseError as error:
                log.error("the settings were not reloaded: %s", error)
                return
            log.info("the settings were reloaded: %s", applied)
