"""`set`, and `setp` of halves: every comparison, flushed or not, joined or not; each name and join into every type."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.comparisons import Comparison, numbers, turning
from helpers.drawn_rows import drawn_rows, whole_numbers

pytestmark = pytest.mark.exhaustive

Rows = Sequence[tuple[int, ...]]
ComputeAll = Callable[..., dict[str, list[int]]]

SETTINGS = settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
HALVES = ("f16", "bf16")
SOURCES = [*(f"{letter}{bits}" for letter in "bus" for bits in (16, 32, 64)), "f32", "f64", *HALVES]
TRUE = {
    "u16": 0xFFFF,
    "s16": 0xFFFF,
    "f16": 0x3C00,
    "bf16": 0x3F80,
    "u32": 2**32 - 1,
    "s32": 2**32 - 1,
    "f32": 0x3F800000,
}


def stored(kind: str) -> str:
    return {"f16": "b16", "bf16": "b16"}.get(kind, kind)


def rows_of(kind: str, count: int = 2) -> st.SearchStrategy[list[tuple[int, ...]]]:
    return drawn_rows(*[numbers(kind)] * count, whole_numbers(0, 1))


def outcomes(comparison: Comparison, rows: Rows, *, opposite: bool = False) -> list[bool]:
    """What comes of rows of two numbers and a predicate."""
    return [comparison.joined(comparison.holds(a, b) != opposite, c) for a, b, c in rows]


def destinations(kind: str) -> list[tuple[str, ...]]:
    """What `set` of a kind may make, by the width of its register."""
    words = ("u32", "s32")
    return [words, ("u16", "s16", kind)] if kind in HALVES else [(*words, "f32")]


@pytest.mark.parametrize(("kind", "intos"), [(kind, intos) for kind in SOURCES for intos in destinations(kind)])
@SETTINGS
@given(data=st.data())
def test_set_gives_ones_or_one(compute_all: ComputeAll, data: st.DataObject, kind: str, intos: tuple[str, ...]) -> None:
    rows = data.draw(rows_of(kind))
    wanted = {
        f"set{one.modifiers}.{into}.{kind} %d, %a, %b{', %c' * bool(one.join)};": [
            flag and TRUE[into] for flag in outcomes(one, rows)
        ]
        for one, into in turning(kind, intos)
    }
    assert compute_all(wanted, [stored(kind), stored(kind), "pred"], f"b{16 if 'u16' in intos else 32}", rows) == wanted


@pytest.mark.parametrize("kind", HALVES)
@SETTINGS
@given(data=st.data())
def test_setp_compares_halves(compute_all: ComputeAll, data: st.DataObject, kind: str) -> None:
    rows = data.draw(rows_of(kind))
    wanted = {
        f"setp{one.modifiers}.{kind} {into}, %a, %b{', %c' * bool(one.join)};": outcomes(one, rows, opposite=opposite)
        for one, (into, opposite) in turning(kind, (("%d", False), ("%d|%x", False), ("%x|%d", True)))
    }
    assert compute_all(wanted, [stored(kind), stored(kind), "pred"], "pred", rows) == wanted


@pytest.mark.parametrize("kind", HALVES)
@SETTINGS
@given(data=st.data())
def test_pairs_have_two_results(compute_all: ComputeAll, data: st.DataObject, kind: str) -> None:
    rows = data.draw(rows_of(kind, 4))
    packed = [(a << 16 | b, c << 16 | d, e) for a, b, c, d, e in rows]
    uppers, lowers = [(a, c, e) for a, _, c, _, e in rows], [(b, d, e) for _, b, _, d, e in rows]
    numbers_of, flags_of = {}, {}
    for one, (into, true) in turning(kind, (("u32", 0xFFFF), ("s32", 0xFFFF), (f"{kind}x2", TRUE[kind]))):
        upper, lower = outcomes(one, uppers), outcomes(one, lowers)
        spelling = f"set{one.modifiers}.{into}.{kind}x2 %d, %a, %b{', %c' * bool(one.join)};"
        numbers_of[spelling] = [(a and true) << 16 | (b and true) for a, b in zip(upper, lower, strict=True)]
    for one, (into, half) in turning(kind, (("%d|%x", lowers), ("%x|%d", uppers))):
        flags_of[f"setp{one.modifiers}.{kind}x2 {into}, %a, %b{', %c' * bool(one.join)};"] = outcomes(one, half)
    for wanted, result in ((numbers_of, "b32"), (flags_of, "pred")):
        assert compute_all(wanted, ["b32", "b32", "pred"], result, packed) == wanted
