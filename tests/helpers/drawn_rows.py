"""Rows of operands for tests of instructions, each list of rows from one seed that hypothesis draws.

To draw each operand, hypothesis took a third of these tests' time. Rows are not made smaller once they have failed:
each row is computed alone, and the assertion shows it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final, Generic, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")

WIDE: Final = 1 << 16
"""Ranges of more numbers than these hold too few small ones, if each number is as likely as the others."""

MOST_ROWS: Final = 48
"""One and a half warps: also a warp of which some threads do not run."""


@dataclass(frozen=True)
class Values(Generic[T]):
    """Values in one or several ways, each as likely as the others. `a | b` has the ways of both."""

    ways: tuple[Callable[[Random], T], ...]

    def __or__(self, other: "Values[T]") -> "Values[T]":
        return Values((*self.ways, *other.ways))

    def draw(self, random: Random) -> T:
        return random.choice(self.ways)(random)


def one_of(values: Sequence[T]) -> Values[T]:
    return Values((lambda random: random.choice(values),))


def whole_numbers(least: int, most: int) -> Values[int]:
    """Return whole numbers from `least` to `most`. In wide ranges, every second one is above `least` by few bits."""
    count = most - least + 1

    def small(random: Random) -> int:
        return least + random.getrandbits(random.randint(1, count.bit_length())) % count

    def draw(random: Random) -> int:
        return small(random) if count > WIDE and random.getrandbits(1) else random.randint(least, most)

    return Values((draw,))


def built(function: Callable[..., T], *parts: Values[Any]) -> Values[T]:
    """Return the results of a function with values of `parts`."""
    return Values((lambda random: function(*(part.draw(random) for part in parts)),))


def drawn_rows(*columns: Values[T], most: int = MOST_ROWS) -> st.SearchStrategy[list[tuple[T, ...]]]:
    """Return lists of rows with one value of each column, from half of `most` to `most` of them."""

    def rows(random: Random) -> list[tuple[T, ...]]:
        return [tuple(column.draw(random) for column in columns) for _ in range(random.randint(most // 2, most))]

    return st.randoms(use_true_random=True).map(rows)
