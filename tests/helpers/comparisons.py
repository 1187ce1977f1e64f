"""All comparisons of PTX (ISA section 9.3.1 and 9.7.6): their names and their results."""

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, TypeVar

from hypothesis import strategies as st

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
    """What follows the opcode: `.cmp`, `.and`, `.or`, `.xor` or nothing, `.ftz` or not, of numbers of a kind."""

    name: str
    join: str
    ftz: bool
    kind: str

    @property
    def modifiers(self) -> str:
        return "".join(f".{part}" for part in (self.name, self.join, "ftz" * self.ftz) if part)

    def joined(self, flag: bool, with_this: int) -> bool:
        """What an outcome becomes with the predicate operand."""
        return JOINS[self.join](flag, bool(with_this))

    def holds(self, left: int, right: int) -> bool:
        """Whether the comparison itself holds for two bit patterns."""
        return _holds(self.name, self.kind, self.ftz, left, right)


def comparisons(kind: str) -> Iterator[Comparison]:
    names = _NAMES["float" if kind in KINDS else kind[0]]
    for name, join, ftz in itertools.product(names, JOINS, (False, True) if kind in _FLUSHABLE else (False,)):
        yield Comparison(name, join, ftz, kind)


def turning(kind: str, choices: Sequence[T]) -> Iterator[tuple[Comparison, T]]:
    """All comparisons of a kind, each with one of the choices: each choice meets every name, every join, and `.ftz`.

    Where there are fewer names than choices, each comparison comes with them all.
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
    # Those with a third letter, u, are true of what has no order.
    return len(name) == 3 if unordered else ORDER[name[:2]](x, y)


def _whole(bits: int, kind: str) -> int:
    width = int(kind[1:])
    return bits - (1 << width) if kind[0] == "s" and bits >> (width - 1) else bits


def numbers(kind: str) -> st.SearchStrategy[int]:
    if kind in KINDS:
        edges, width = KINDS[kind].edges, KINDS[kind].bits
    else:
        width = int(kind[1:])
        edges = [0, 1, (1 << width) - 1, 1 << (width - 1), (1 << (width - 1)) - 1]
    return st.sampled_from(edges) | st.integers(0, (1 << width) - 1)
