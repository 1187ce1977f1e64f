"""Keeps an event loop from sleeping for a moment, because what it waits for is about to come.

After a sleep in the kernel the loop answers tens of microseconds later, and its code runs slower, from colder caches,
for longer than that. A request that goes through several processes pays this at each of them.
"""

import asyncio
import time
from typing import Final

from gpulease.daemon.host.processes import has_cores_to_poll

POLL_NS: Final = 1_000_000
"""Time for which the loop polls after `stay_awake`, in nanoseconds: a worker maps a region's memory and answers in 350
us, and on a host with slow cores in 650."""

MAX_TURNS: Final = 2_000
"""Maximum number of turns of the loop for which it polls after `stay_awake`, each of a microsecond or more."""


class LoopPolling:
    """Polls in the running event loop for `POLL_NS` at a time. Whatever arrives meanwhile is served as usual."""

    def __init__(self) -> None:
        self._poll_ns = POLL_NS if has_cores_to_poll() else 0
        self._until_ns = 0
        self._turns_left = 0

    def stay_awake(self) -> None:
        """Poll from now on; a call while the loop polls already makes it poll for longer."""
        if not self._poll_ns:
            return
        self._until_ns = time.monotonic_ns() + self._poll_ns
        is_polling, self._turns_left = self._turns_left > 0, MAX_TURNS
        if not is_polling:
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        # A loop with a callback that is ready polls its descriptors without sleeping.
        self._turns_left = self._turns_left - 1 if time.monotonic_ns() < self._until_ns else 0
        if self._turns_left:
            asyncio.get_running_loop().call_soon(self._turn)
