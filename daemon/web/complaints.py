"""What is logged of the server's own troubles, and of wrong tokens, within bounds: a peer may cause them for ever."""

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
    """Tells the log that somebody comes with wrong tokens, at once and then now and then, with how many.

    None is refused unseen for that: whoever may connect could then keep operators out, and a token can't be guessed.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._count = 0
        self._next_s = clock()

    def one_more(self) -> None:
        """One came."""
        self._count += 1
        if self._clock() >= self._next_s:
            tell(LogEvent.WEB_WRONG_TOKEN, count=self._count)
            self._count = 0
            self._next_s = self._clock() + PAUSE_S
