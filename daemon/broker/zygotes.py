"""The zygote that makes workers now, started anew when it dies, and those of earlier daemons that make no more."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from gpulease.daemon.broker.finding import FoundZygote
from gpulease.daemon.broker.zygote import Zygote, ZygoteBroken
from gpulease.daemon.logs.catalogue import LogEvent
from gpulease.daemon.logs.telling import tell
from gpulease.daemon.sandbox.settings import SandboxSettings

RESTART_DELAY_S: Final = 1.0
"""Between the death of a zygote and the next start: one that dies at once must not be restarted in a busy loop."""


class Zygotes:
    """All that there are.

    Args:
        on_message: Called with the zygote, each message of it and its descriptors, which are then the callee's.
        on_exit: Called with each that is gone; its workers die with it.
        folder: Where they listen for the next broker; None if they are to die with this one.
        wipes_heap: Whether they and their workers overwrite what they free of their own memory.

    Attributes:
        now: The one that makes workers, running or not.
    """

    def __init__(
        self,
        driver: str,
        on_message: Callable[[Zygote, dict[str, Any], list[int]], None],
        on_exit: Callable[[Zygote], None],
        sandbox: SandboxSettings,
        folder: Path | None,
        wipes_heap: bool,
    ) -> None:
        self._driver = driver
        self._on_message = on_message
        self._on_exit = on_exit
        self._sandbox = sandbox
        self._folder = folder
        self._wipes_heap = wipes_heap
        self.now = self._new()
        self._earlier: list[Zygote] = []
        self._restart: asyncio.Task[None] | None = None

    def take_over(self, found: FoundZygote) -> Zygote:
        """One that an earlier daemon left: it makes workers from now on, if it can make them here and no other does."""
        zygote = self._new()
        if zygote.take_over(found) and not self.now.is_running:
            self.now = zygote
        else:
            zygote.retire()
            self._earlier.append(zygote)
        return zygote

    async def start(self) -> None:
        """Start one, unless one of those taken over makes workers. Raises ZygoteBroken."""
        if not self.now.is_running:
            await self.now.start()

    async def stop(self) -> None:
        """End them, and with them their workers."""
        await self._stop_restarting()
        for zygote in (self.now, *self._earlier):
            zygote.stop()

    async def leave(self) -> None:
        """Go, and leave them to the next broker."""
        await self._stop_restarting()
        for zygote in (self.now, *self._earlier):
            zygote.leave()

    async def _stop_restarting(self) -> None:
        if self._restart is not None:
            self._restart.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._restart

    def _new(self) -> Zygote:
        return Zygote(self._driver, self._on_message, self._gone, self._sandbox, self._folder, self._wipes_heap)

    def _gone(self, zygote: Zygote) -> None:
        self._on_exit(zygote)
        if zygote is not self.now:
            tell(LogEvent.ZYGOTE_LEFT)
            self._earlier.remove(zygote)
            return
        tell(LogEvent.ZYGOTE_DIED)
        self._restart = asyncio.get_running_loop().create_task(self._start_again())

    async def _start_again(self) -> None:
        while True:
            await asyncio.sleep(RESTART_DELAY_S)
            self.now = self._new()
            try:
                await self.now.start()
            except ZygoteBroken as error:
                tell(LogEvent.ZYGOTE_NOT_STARTED, reason=str(error), hint=error.hint)
                continue
            tell(LogEvent.ZYGOTE_BACK)
            return
