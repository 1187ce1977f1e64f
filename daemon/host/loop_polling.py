"""Keeps an event loop awake for a short time, because a message for it is about to arrive.

After a sleep in the kernel, the loop answers tens of microseconds later. For even longer its code runs slower, because
the caches are cold. A request that goes through several processes is delayed at each of them.
"""

import asyncio
import time
from typing import Final

from gpulease.daemon.host.processes import has_cores_to_poll
from gpulease.protocol.opcodes import Waiting

POLL_NS: Final = 1_000_000
"""Time for which the loop polls after `stay_awake`, in nanoseconds. A worker maps a region's memory and answers within
350 us; on a host with slow cores, within 650 us."""

MAX_TURNS: Final = 2_000
"""Maximum number of turns of the loop for which it polls after `stay_awake`, each of a microsecond or more."""


class LoopPolling:
    """Polls in the running event loop for a few times `POLL_NS`.

    Requests that arrive during that time are served as usual.
    """

    def __init__(self) -> None:
        self._poll_ns = POLL_NS if has_cores_to_poll() else 0
        self._until_ns = 0
        self._turns_left = 0

    def stay_awake(self, waiting: Waiting | None, periods: int = 1) -> None:
        """Poll for `periods` times `POLL_NS` from now on, even if the loop is already polling.

        `waiting` is how the tenant waits for whom the loop would poll. It does not poll for a tenant that sleeps
        (BLOCK).
        """
        if not self._poll_ns or waiting is Waiting.BLOCK:
            return
        self._until_ns = time.monotonic_ns() + periods * self._poll_ns
        is_polling, self._turns_left = self._turns_left > 0, MAX_TURNS
        if not is_polling:
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        # A loop that has a callback ready to run polls its descriptors without sleeping.
        self._turns_left = self._turns_left - 1 if time.monotonic_ns() < self._until_ns else 0
        if self._turns_left:
            asyncio.get_running_loop().call_soon(self._turn)
