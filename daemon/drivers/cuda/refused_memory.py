"""Memory that the card has and the driver refuses for a moment.

After a request for more than the card had, the driver refused 64 MiB although cuMemGetInfo had shown nearly all of the
card free (H200, driver 580.159). That was seen during the work of many other processes, never alone on the card. In one
such run it still refused after half a second.
"""

import time
from collections.abc import Callable
from typing import Final, TypeVar

from gpulease.daemon.drivers.interface import OutOfMemory, Poll

REFUSAL_WAIT_S: Final = 5.0
"""Longest time, in seconds, for which refused memory is requested again. Bounds how long one allocation keeps a
session from its other requests where the card's figure stays wrong. A card of 141 GB zeroes what a request has
released in some seconds; a client that asks the session for a region waits for ten."""

SHORTAGE_S: Final = 0.1
"""Time, in seconds, for which the card must show too few free bytes until that is believed: right after a request
that was too large, the figure may include what that request had taken for a moment."""

RETRY_S: Final = 0.001


class MemoryRefused(OutOfMemory):
    """The driver has no memory (CUDA driver API, CUDA_ERROR_OUT_OF_MEMORY)."""


_Taken = TypeVar("_Taken")


def take_once_given(take: Callable[[], _Taken], size_bytes: int, free_bytes: Callable[[], int], poll: Poll) -> _Taken:
    """Return the result of `take`, which is called again while it is refused and the card shows enough free bytes.

    Args:
        take: Takes memory; raises MemoryRefused.
        size_bytes: How much.
        free_bytes: Returns the card's free bytes.
        poll: Called before each further try; may raise to end the wait.

    Raises:
        MemoryRefused: The card has shown too few free bytes for SHORTAGE_S, or REFUSAL_WAIT_S have passed.
    """
    began_s = enough_s = time.monotonic()
    while True:
        try:
            return take()
        except MemoryRefused as refused:
            shown_bytes, now_s = free_bytes(), time.monotonic()
            # The card shows enough, so the refusal should pass. Two clocks bound the wait: one since it last showed
            # enough, one since the beginning.
            if shown_bytes >= size_bytes:
                enough_s = now_s
            if now_s - enough_s >= SHORTAGE_S or now_s - began_s >= REFUSAL_WAIT_S:
                waited = f"it reported {shown_bytes} bytes free for {now_s - began_s:.1f} s of retries"
                raise MemoryRefused(f"{refused}; {waited}", hint=refused.hint) from None
        poll()
        time.sleep(RETRY_S)
