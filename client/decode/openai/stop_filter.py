"""Ends a text before its first stop, or after it, however the text is split into pieces."""

from collections.abc import Sequence


class StopFilter:
    """A text that grows piece by piece and ends before a stop; with `includes_stop`, after it.

    The stop that is completed first ends the text; of several completed by the same character, the longest one. So the
    result does not depend on the pieces. Text that may be the beginning of a stop is held back: fewer characters than
    the longest stop has.

    Attributes:
        is_stopped: Whether a stop was found. Then no more text is given out.
        found: That stop; "" if none was found.
    """

    def __init__(self, stops: Sequence[str], *, includes_stop: bool = False) -> None:
        self._stops, self._includes_stop = tuple(stops), includes_stop
        self._pending = ""
        self.is_stopped = False
        self.found = ""

    def add(self, text: str) -> str:
        """Add a piece. Returns the text that is certain to be given out."""
        if self.is_stopped or not self._stops:
            return "" if self.is_stopped else text
        pending = self._pending + text
        # Order by end, then by begin: the stop completed first, and of those the longest.
        matches = [(begin + len(stop), begin) for stop in self._stops if (begin := pending.find(stop)) >= 0]
        if matches:
            self.is_stopped, self._pending = True, ""
            end, begin = min(matches)
            self.found = pending[begin:end]
            return pending[: end if self._includes_stop else begin]
        # Hold back the longest end of the text that may still become a stop.
        overlap = max(_overlap(pending, stop) for stop in self._stops)
        self._pending = pending[len(pending) - overlap :]
        return pending[: len(pending) - overlap]

    def end(self) -> str:
        """End the text without a stop. Returns the text that was held back."""
        pending, self._pending = self._pending, ""
        return pending


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of the stop with which the text ends."""
    # A whole stop would have been found before, so only proper prefixes matter.
    longest = min(len(text), len(stop) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(stop[:count])), 0)
