"""Ends a text before the first of its stops: what belongs to one is never given, however the text is cut."""

from collections.abc import Sequence


class StopFilter:
    """A text that grows by pieces and ends before a stop.

    The stop that is complete first ends the text; of those complete at once, the longest. So the text does not depend
    on how it was cut. What may be a stop's begin is held back: fewer characters than the longest stop has.

    Attributes:
        is_stopped: Whether a stop came. Nothing is given any more then.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_stopped = False

    def add(self, text: str) -> str:
        """Add a piece; returns what is certain by now."""
        if self.is_stopped or not self._stops:
            return "" if self.is_stopped else text
        held = self._held + text
        ends = [(begin + len(stop), begin) for stop in self._stops if (begin := held.find(stop)) >= 0]
        if ends:
            self.is_stopped, self._held = True, ""
            return held[: min(ends)[1]]
        kept = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - kept :]
        return held[: len(held) - kept]

    def end(self) -> str:
        """End the text without a stop; returns what was held back."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Count the characters at the text's end that begin the stop."""
    most = min(len(text), len(stop) - 1)
    return next((count for count in range(most, 0, -1) if text.endswith(stop[:count])), 0)
