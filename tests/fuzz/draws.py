"""Decisions that are derived from a fuzzer's bytes: the same bytes give the same decisions.

After their end, all are 0.
"""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draws:
    """Takes decisions from the front of an input."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_over(self) -> bool:
        return self._at >= len(self._data)

    def byte(self) -> int:
        at = self._at
        self._at = at + 1
        return self._data[at] if at < len(self._data) else 0

    def number(self, size_bytes: int) -> int:
        return int.from_bytes(self.take(size_bytes), "big")

    def below(self, bound: int) -> int:
        """Return a number from 0 to `bound` - 1. `bound` is at most 65536."""
        return (self.byte() if bound <= 256 else self.number(2)) % bound

    def pick(self, among: Sequence[T]) -> T:
        return among[self.below(len(among))]

    def chance(self, one_in: int) -> bool:
        """Return True once in `one_in` draws on average; never after the end of the input."""
        return self.byte() % one_in == one_in - 1

    def take(self, size_bytes: int) -> bytes:
        at = self._at
        self._at = at + size_bytes
        return self._data[at : self._at]

    def sized(self, most_bytes: int) -> bytes:
        """Return at most `most_bytes` bytes. The first draw is their number."""
        return self.take(self.below(most_bytes + 1))

    def rest(self) -> bytes:
        return self.take(max(0, len(self._data) - self._at))
