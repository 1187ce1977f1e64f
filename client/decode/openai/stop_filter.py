"""Ends a text before or after its first stop. The result does not depend on how the text is split into pieces."""

from collections.abc import Sequence


class StopFilter:
    """Takes a text piece by piece, and ends it before a stop or, with `includes_stop`, after it.

    The stop that is completed first ends the text. If one character completes several stops, the longest one counts.
    Text that may be the beginning of a stop is held back. It is always shorter than the longest stop.

    Attributes:
        is_stopped: Whether a stop was found. After that, no text is returned.
        found: The stop that was found; "" if none was.
    """

    def __init__(self, stops: Sequence[str], *, includes_stop: bool = False) -> None:
        self._stops, self._includes_stop = tuple(stops), includes_stop
        self._pending = ""
        self.is_stopped = False
        self.found = ""

    def add(self, text: str) -> str:
        """Add a piece. Returns the text that is certain to be part of the result."""
        if self.is_stopped or not self._stops:
            return "" if self.is_stopped else text
        pending = self._pending + text
        # The smallest pair is the stop that ends first, or, if several end at the same place, the one that begins
        # first.
        matches = [(begin + len(stop), begin) for stop in self._stops if (begin := pending.find(stop)) >= 0]
        if matches:
            self.is_stopped, self._pending = True, ""
            end, begin = min(matches)
            self.found = pending[begin:end]
            return pending[: end if self._includes_stop else begin]
        # Hold back the longest ending of the text with which a stop may begin.
        overlap = max(_overlap(pending, stop) for stop in self._stops)
        self._pending = pending[len(pending) - overlap :]
        return pending[: len(pending) - overlap]

    def end(self) -> str:
        """End the text without a stop. Returns the text that was held back."""
        pending, self._pending = self._pending, ""
        return pending


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper prefix of the stop with which the text ends."""
    # The caller has already searched for complete stops, so only proper prefixes matter.
    longest = min(len(text), len(stop) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(stop[:count])), 0)
