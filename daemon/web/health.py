"""Whether the daemon lives and can grant leases, asked of the broker once in so long however many ask."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from gpulease.daemon.web.link import BrokerSilent
from gpulease.protocol.messages import Empty, Ping
from gpulease.protocol.opcodes import Opcode

FRESH_S: Final = 0.5
"""How old an answer may be: a probe asks every few seconds, and who asks more often learns nothing by it."""

Ask = Callable[[Opcode, Any], Awaitable[Any]]


class Kept:
    """An answer that is kept for a while, and asked for once by all who want it meanwhile; so is that there is none."""

    def __init__(
        self, ask: Callable[[], Awaitable[Any]], fresh_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._fresh_s = fresh_s
        self._answer: Any = None
        self._silence: BrokerSilent | None = None
        self._until_s = clock()
        self._turn = asyncio.Lock()

    async def get(self) -> Any:
        """The answer. Raises BrokerSilent."""
        async with self._turn:
            if self._clock() >= self._until_s:
                await self._renew()
        if self._silence is not None:
            raise BrokerSilent(str(self._silence))
        return self._answer

    async def _renew(self) -> None:
        try:
            self._answer, self._silence = await self._ask(), None
        except BrokerSilent as error:
            self._silence = error
        self._until_s = self._clock() + self._fresh_s


class Health:
    """That the broker answers at all, and what it says of itself."""

    def __init__(self, ask: Ask) -> None:
        self._answers = Kept(lambda: ask(Opcode.PING, Ping(0)), FRESH_S)
        self._report = Kept(lambda: ask(Opcode.HEALTH, Empty()), FRESH_S)

    async def check_alive(self) -> None:
        """Raises BrokerSilent."""
        await self._answers.get()

    async def report(self) -> dict[str, Any]:
        """The map of HEALTH: `ready`, and `checks`. Raises BrokerSilent."""
        return dict((await self._report.get()).report)
