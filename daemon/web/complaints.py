"""What is logged of the server's own troubles, and of wrong tokens, within bounds: a peer may cause them for ever."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

import h11

from gpulease.daemon.logs.catalogue import LogEvent
from gpulease.daemon.logs.telling import tell

PAUSE_S: Final = 10.0
"""Between two lines."""

LOGGERS: Final = ("uvicorn.error", "asyncio")

CallLater = Callable[[float, Callable[[], None]], object]


def _call_later(delay_s: float, call: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_later(delay_s, call)


class Sparing(logging.Filter):
    """Lets a line through now and then, and none of what is only a peer's breach of the protocol.

    Of that uvicorn tells what h11 says of an answer for which it came too late.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._next_s = clock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is logged."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, h11.ProtocolError) or self._clock() < self._next_s:
            return False
        self._next_s = self._clock() + PAUSE_S
        return True


def spare_the_log() -> None:
    """From now on, for all that the server logs."""
    sparing = Sparing()
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(logging.ERROR)
        logger.addFilter(sparing)


class WrongTokens:
    """Tells the log that somebody comes with wrong tokens, at once and then every PAUSE_S, with how many came.

    None is refused unseen for that: whoever may connect could then keep operators out, and a token can't be guessed.
    """

    def __init__(self, call_later: CallLater = _call_later) -> None:
        self._call_later = call_later
        self._count = 0
        self._is_pausing = False

    def one_more(self) -> None:
        """One came."""
        self._count += 1
        if not self._is_pausing:
            self._tell()

    def _tell(self) -> None:
        tell(LogEvent.WEB_WRONG_TOKEN, count=self._count)
        self._count = 0
        self._is_pausing = True
        self._call_later(PAUSE_S, self._pause_over)

    def _pause_over(self) -> None:
        self._is_pausing = False
        # Not with the next that comes: who guesses for a few seconds and is gone would have come once.
        if self._count:
            self._tell()
