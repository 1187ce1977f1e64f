"""Ends a text before its first stop, or behind it, however the text is split into pieces."""

from collections.abc import Sequence


class StopFilter:
    """A text that grows piece by piece and ends before a stop; with `includes_stop`, behind it.

    The stop that is completed first ends the text; of several completed by the same character, the longest one. So the
    result does not depend on the pieces. Text that may be the beginning of a stop is held back: fewer characters than
    the longest stop has.

    Attributes:
        is_stopped: Whether a stop was found. Then no more text is given out.
    """

    def __init__(self, stops: Sequence[str], *, includes_stop: bool = False) -> None:
        self._stops, self._includes_stop = tuple(stops), includes_stop
        self._held = ""
        self.is_stopped = False

    def add(self, text: str) -> str:
        """Add a piece. Returns the text that is certain to be given out."""
        if self.is_stopped or not self._stops:
            return "" if self.is_stopped else text
        held = self._held + text
        # Order by end, then by begin: the stop completed first, and of those the longest.
        ends = [(begin + len(stop), begin) for stop in self._stops if (begin := held.find(stop)) >= 0]
        if ends:
            self.is_stopped, self._held = True, ""
            end, begin = min(ends)
            return held[: end if self._includes_stop else begin]
        # Hold back the longest end of the text that may still become a stop.
        kept = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - kept :]
        return held[: len(held) - kept]

    def end(self) -> str:
        """End the text without a stop. Returns the text that was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of the stop with which the text ends."""
    # A whole stop would have been found before, so only proper prefixes matter.
    most = min(len(text), len(stop) - 1)
    return next((count for count in range(most, 0, -1) if text.endswith(stop[:count])), 0)
