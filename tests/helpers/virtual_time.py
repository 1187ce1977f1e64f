"""An event loop with a clock that jumps to the next timer instead of waiting for it."""

import asyncio
import selectors
from typing import Any


class _Jump(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, Any]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise AssertionError("every task waits, and nothing will wake one")
        if not ready and timeout is not None:
            self.now += max(0.0, timeout)
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Runs timers in order, without waiting. Its `time` begins at 0."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._jump.now
