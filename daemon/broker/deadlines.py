"""What a control connection may be waiting for, each with a clock of its own."""

import asyncio
from collections.abc import Callable
from enum import Enum, auto
from typing import Any


class Wait(Enum):
    """One thing a peer owes."""

    HELLO = auto()
    FRAME = auto()
    READING = auto()
    ATTACH = auto()
    CLOSE = auto()


class Deadlines:
    """The clocks of one connection. None is touched by another's start or stop."""

    def __init__(self) -> None:
        self._handles: dict[Wait, asyncio.TimerHandle] = {}

    def start(self, wait: Wait, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Do `action` in `delay_s` unless it is stopped; a clock that runs goes on as it was."""
        if wait not in self._handles:
            self._handles[wait] = asyncio.get_running_loop().call_later(delay_s, action, *arguments)

    def stop(self, wait: Wait) -> None:
        """The peer did what it owed, or owes it no more."""
        if (handle := self._handles.pop(wait, None)) is not None:
            handle.cancel()

    def stop_all(self) -> None:
        """The connection is gone."""
        for handle in self._handles.values():
            handle.cancel()
        self._handles.clear()
