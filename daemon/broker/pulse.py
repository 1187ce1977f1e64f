"""Whether a process that the broker speaks to lives: it is asked, and what never answers is given up."""

import asyncio
import contextlib
from collections.abc import Callable

from gpulease.daemon.channel import ChannelClosed


class Pulse:
    """Asks one again and again.

    Questions are counted, not seconds: while this process was stopped, stuck, or suspended with its host, none was
    asked; and what was answered meanwhile is read before the next one.

    Args:
        beat_s: Between two questions.
        hung_after_s: Of questions in a row without an answer: then it is not asked again but given up.
        ask: Sends a question; may raise ChannelClosed or BlockingIOError.
        on_silence: Gives it up; gets a clause for the log.
    """

    def __init__(
        self, beat_s: float, hung_after_s: float, ask: Callable[[], None], on_silence: Callable[[str], None]
    ) -> None:
        self._beat_s = beat_s
        self._most_unanswered = max(1, round(hung_after_s / beat_s))
        self._ask = ask
        self._on_silence = on_silence
        self._unanswered = 0
        self._next: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Ask from now on."""
        self.end()
        self._unanswered = 0
        self._beat()

    def answered(self) -> None:
        """It lives."""
        self._unanswered = 0

    def end(self) -> None:
        """Ask no more."""
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _beat(self) -> None:
        if self._unanswered >= self._most_unanswered:
            self._next = None
            self._on_silence(f"it gave no sign of life for {self._unanswered * self._beat_s:g} s")
            return
        self._unanswered += 1
        self._next = asyncio.get_running_loop().call_later(self._beat_s, self._beat)
        # One that has no room for the question has not answered the earlier ones either.
        with contextlib.suppress(BlockingIOError, ChannelClosed):
            self._ask()
