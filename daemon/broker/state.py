"""What a daemon has from the one before it: its journal, and the zygotes that keep its sessions."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from gpulease.daemon.broker.finding import CannotAdopt, FoundZygote, find_zygotes
from gpulease.daemon.broker.recording import boot_id
from gpulease.daemon.config import Config
from gpulease.daemon.journal import Journal, open_journal

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
