"""The names and results of all comparisons of PTX (PTX ISA sections 9.3.1 and 9.7.6)."""

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, TypeVar

from helpers.drawn_rows import Values, one_of, whole_numbers
from helpers.exact import KINDS, decode, flushed

T = TypeVar("T")

ORDER: Final[dict[str, Callable[[object, object], bool]]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
JOINS: Final[dict[str, Callable[[bool, bool], bool]]] = {
    "": lambda flag, _: flag,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}
_UNSIGNED: Final = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_NAMES: Final = {
    "b": ("eq", "ne"),
    "s": (*ORDER,),
    "u": (*ORDER, *_UNSIGNED),
    "float": (*ORDER, *(f"{name}u" for name in ORDER), "num", "nan"),
}
_FLUSHABLE: Final = ("f16", "f32")


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of two numbers of `kind`: comparison operator, Boolean operator ("" for none), and `.ftz`."""

    name: str
    join: str
    ftz: bool
    kind: str

    @property
    def modifiers(self) -> str:
        return "".join(f".{part}" for part in (self.name, self.join, "ftz" * self.ftz) if part)

    def joined(self, flag: bool, with_this: int) -> bool:
        """Return the outcome, combined with the predicate operand by the Boolean operator."""
        return JOINS[self.join](flag, bool(with_this))

    def holds(self, left: int, right: int) -> bool:
        """Return whether the comparison holds for two bit patterns, before it is combined with a predicate."""
        return _holds(self.name, self.kind, self.ftz, left, right)


def comparisons(kind: str) -> Iterator[Comparison]:
    names = _NAMES["float" if kind in KINDS else kind[0]]
    for name, join, ftz in itertools.product(names, JOINS, (False, True) if kind in _FLUSHABLE else (False,)):
        yield Comparison(name, join, ftz, kind)


def turning(kind: str, choices: Sequence[T]) -> Iterator[tuple[Comparison, T]]:
    """Yield all comparisons of a kind, each with one of the choices, so that each choice occurs with every comparison
    operator, every Boolean operator, and `.ftz`.

    If the kind has fewer comparison operators than there are choices, yield each comparison with every choice.
    """
    names, joins = _NAMES["float" if kind in KINDS else kind[0]], [*JOINS]
    for one in comparisons(kind):
        turn = (names.index(one.name) + joins.index(one.join) + one.ftz) % len(choices)
        for choice in choices if len(names) < len(choices) else choices[turn : turn + 1]:
            yield one, choice


@cache
def _holds(name: str, kind: str, ftz: bool, left: int, right: int) -> bool:
    if kind not in KINDS:
        return ORDER[_UNSIGNED.get(name, name)](_whole(left, kind), _whole(right, kind))
    x, y = (decode(flushed(bits, KINDS[kind]) if ftz else bits, KINDS[kind]) for bits in (left, right))
    unordered = x != x or y != y
    if name in ("num", "nan"):
        return unordered == (name == "nan")
    # Operators of three letters end in u: they hold if the numbers are unordered, that is if one is NaN.
    return len(name) == 3 if unordered else ORDER[name[:2]](x, y)


def _whole(bits: int, kind: str) -> int:
    width = int(kind[1:])
    return bits - (1 << width) if kind[0] == "s" and bits >> (width - 1) else bits


def numbers(kind: str) -> Values[int]:
    if kind in KINDS:
        edges, width = KINDS[kind].edges, KINDS[kind].bits
    else:
        width = int(kind[1:])
        edges = [0, 1, (1 << width) - 1, 1 << (width - 1), (1 << (width - 1)) - 1]
    return one_of(edges) | whole_numbers(0, (1 << width) - 1)
