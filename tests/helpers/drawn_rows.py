"""Rows of operands for tests of instructions. Each list of rows comes from one seed that hypothesis draws.

When hypothesis drew each operand, this took a third of these tests' time. Failing lists are not shrunk, because each
row is computed by itself, and the assertion shows the row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final, Generic, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")

WIDE: Final = 1 << 16
"""In ranges of more numbers than this, small numbers would be too rare if all numbers were equally likely."""

MOST_ROWS: Final = 48
"""One and a half warps, so that in one warp some threads do not run."""


@dataclass(frozen=True)
class Values(Generic[T]):
    """One or several ways to draw values, each equally likely. `a | b` has the ways of both."""

    ways: tuple[Callable[[Random], T], ...]

    def __or__(self, other: "Values[T]") -> "Values[T]":
        return Values((*self.ways, *other.ways))

    def draw(self, random: Random) -> T:
        return random.choice(self.ways)(random)


def one_of(values: Sequence[T]) -> Values[T]:
    return Values((lambda random: random.choice(values),))


def whole_numbers(least: int, most: int) -> Values[int]:
    """Return whole numbers from `least` to `most`. In wide ranges, half exceed `least` by a number of few bits."""
    count = most - least + 1

    def small(random: Random) -> int:
        return least + random.getrandbits(random.randint(1, count.bit_length())) % count

    def draw(random: Random) -> int:
        return small(random) if count > WIDE and random.getrandbits(1) else random.randint(least, most)

    return Values((draw,))


def built(function: Callable[..., T], *parts: Values[Any]) -> Values[T]:
    """Return the results of a function whose arguments are values of `parts`."""
    return Values((lambda random: function(*(part.draw(random) for part in parts)),))


def drawn_rows(*columns: Values[T], most: int = MOST_ROWS) -> st.SearchStrategy[list[tuple[T, ...]]]:
    """Return lists of rows with one value of each column, from half of `most` to `most` of them."""

    def rows(random: Random) -> list[tuple[T, ...]]:
        return [tuple(column.draw(random) for column in columns) for _ in range(random.randint(most // 2, most))]

    return st.randoms(use_true_random=True).map(rows)
