"""Memory that the card has but that the driver refuses for a moment.

A request for more memory than the card has makes the driver take all free memory before it refuses, and release it page
by page afterwards. On a card of 80 GB, cuMemGetInfo showed 6 MB free for 0.1 s after such requests, and 64 MiB were
refused (H100 and H200, driver 580.159). So a large request is made only once the card shows enough free bytes, and a
refused request is repeated as long as the card shows enough.
"""

import time
from collections.abc import Callable
from typing import Final, TypeVar

from gpulease.daemon.drivers.interface import OutOfMemory, Poll

REFUSAL_WAIT_S: Final = 5.0
"""Longest time, in seconds, for which refused memory is requested again. Bounds how long one allocation keeps a
session from its other requests where the card's figure stays wrong. A card of 141 GB takes a few seconds to zero the
memory that a request has released; a client that asks the session for a region waits for ten."""

SHORTAGE_S: Final = 0.5
"""Time, in seconds, for which the card must show too few free bytes before that counts: another process's oversized
request may hold them for a moment."""

RETRY_S: Final = 0.001

SMALL_BYTES: Final = 1 << 30
"""Size, in bytes, up to which the driver is asked whatever the card shows: a refusal takes little from the card for a
moment, and asking cuMemGetInfo first would cost each allocation some microseconds."""


class MemoryRefused(OutOfMemory):
    """The driver has no memory (CUDA driver API, CUDA_ERROR_OUT_OF_MEMORY)."""


class TooFewShown(MemoryRefused):
    """The card shows fewer free bytes than are requested; the message says how many."""


_Taken = TypeVar("_Taken")


def take_if_shown(take: Callable[[], _Taken], size_bytes: int, free_bytes: Callable[[], int]) -> _Taken:
    """Return what `take` returns. Raises MemoryRefused; TooFewShown for a large size where the card shows less."""
    if size_bytes > SMALL_BYTES and (shown_bytes := free_bytes()) < size_bytes:
        raise TooFewShown(
            f"the card can't provide {size_bytes} bytes: it has {shown_bytes} bytes free",
            hint="Free something, or request less.",
        )
    return take()


def take_once_given(take: Callable[[], _Taken], size_bytes: int, free_bytes: Callable[[], int], poll: Poll) -> _Taken:
    """Return the result of `take`, which is called again while it is refused and the card shows enough free bytes.

    Args:
        take: Takes memory; raises MemoryRefused.
        size_bytes: The size of the request.
        free_bytes: Returns the card's free bytes.
        poll: Called before each further try; may raise to end the wait.

    Raises:
        MemoryRefused: The card has shown too few free bytes for SHORTAGE_S, or REFUSAL_WAIT_S have passed.
    """
    began_s = enough_s = time.monotonic()
    while True:
        try:
            return take_if_shown(take, size_bytes, free_bytes)
        except MemoryRefused as refused:
            shown_bytes, now_s = free_bytes(), time.monotonic()
            # The card shows enough, so the refusal should pass. Two clocks bound the wait: one since it last showed
            # enough, one since the beginning.
            if shown_bytes >= size_bytes:
                enough_s = now_s
            if now_s - enough_s >= SHORTAGE_S or now_s - began_s >= REFUSAL_WAIT_S:
                waited = f"after {now_s - began_s:.1f} s of retries"
                # The driver's own refusal says nothing of the card's free bytes.
                report_text = "" if isinstance(refused, TooFewShown) else f"; it reported {shown_bytes} bytes free"
                raise MemoryRefused(f"{refused}{report_text} {waited}", hint=refused.hint) from None
        poll()
        time.sleep(RETRY_S)
