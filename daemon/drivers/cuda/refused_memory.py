"""Memory that the card has and the driver refuses for a moment.

After a request for more than the card had, the driver refused 64 MiB although cuMemGetInfo showed nearly all of the
card free (H200, driver 580.159, after other processes had given large pieces back). A moment later it gave them.
"""

import time
from collections.abc import Callable
from typing import Final, TypeVar

from gpulease.daemon.drivers.interface import OutOfMemory, Poll

REFUSAL_WAIT_S: Final = 0.5
"""Longest time, in seconds, for which refused memory is asked for again. Bounds how long one allocation keeps a session
from its other requests where the card's figure stays wrong."""

RETRY_S: Final = 0.001


class MemoryRefused(OutOfMemory):
    """The driver has no memory (CUDA driver API, CUDA_ERROR_OUT_OF_MEMORY)."""


_Taken = TypeVar("_Taken")


def take_once_given(take: Callable[[], _Taken], size_bytes: int, free_bytes: Callable[[], int], poll: Poll) -> _Taken:
    """Return what `take` returns, which is called again while it is refused and the card shows enough free bytes.

    Args:
        take: Takes memory; raises MemoryRefused.
        size_bytes: How much.
        free_bytes: Returns the card's free bytes.
        poll: Called before each further try; may raise to end the wait.

    Raises:
        MemoryRefused: The card shows too few free bytes, or REFUSAL_WAIT_S have passed.
    """
    until_s = time.monotonic() + REFUSAL_WAIT_S
    while True:
        try:
            return take()
        except MemoryRefused:
            if free_bytes() < size_bytes or time.monotonic() >= until_s:
                raise
        poll()
        time.sleep(RETRY_S)
