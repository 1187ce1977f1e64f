import operator
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.exact import KINDS, decode, flushed

Compute = Callable[[str, Sequence[str], str, Sequence[tuple[int, ...]]], list[int]]

SETTINGS = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
ORDER: dict[str, Callable[[object, object], bool]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
BOOL: dict[str, Callable[[bool, bool], bool]] = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
FLOAT_NAMES = [*ORDER, *(f"{name}u" for name in ORDER), "num", "nan"]
TRUE = {"u16": 0xFFFF, "s16": 0xFFFF, "u32": 2**32 - 1, "s32": 2**32 - 1, "f32": 0x3F800000}
ONE = {"f16": 0x3C00, "bf16": 0x3F80}


def holds(name: str, kind: str, left: int, right: int, ftz: bool) -> bool:
    if kind not in KINDS:
        bits = int(kind[1:])
        signed = kind[0] == "s"
        a, b = (v - (1 << bits) if signed and v >> (bits - 1) else v for v in (left, right))
        return ORDER[{"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(name, name)](a, b)
    if ftz:
        left, right = flushed(left, KINDS[kind]), flushed(right, KINDS[kind])
    x, y = decode(left, KINDS[kind]), decode(right, KINDS[kind])
    unordered = x != x or y != y
    if name in ("num", "nan"):
        return unordered == (name == "nan")
    if unordered:
        return len(name) == 3
    return ORDER[name[:2]](x, y)


def patterns(kind: str) -> st.SearchStrategy[int]:
    if kind not in KINDS:
        bits = int(kind[1:])
        return st.sampled_from([0, 1, 1 << (bits - 1), (1 << bits) - 1]) | st.integers(0, (1 << bits) - 1)
    return st.sampled_from(KINDS[kind].edges) | st.integers(0, (1 << KINDS[kind].bits) - 1)


def stored(kind: str) -> str:
    return {"f16": "b16", "bf16": "b16"}.get(kind, kind)


def names(kind: str) -> list[str]:
    if kind in KINDS:
        return FLOAT_NAMES
    return {"b": ["eq", "ne"], "s": [*ORDER], "u": [*ORDER, "lo", "ls", "hi", "hs"]}[kind[0]]


@pytest.mark.parametrize("kind", ["b16", "b32", "b64", "u16", "s32", "u64", "s64", "f32", "f64", "f16", "bf16"])
@SETTINGS
@given(data=st.data())
def test_set_gives_ones_or_one(compute: Compute, data: st.DataObject, kind: str) -> None:
    name = data.draw(st.sampled_from(names(kind)))
    into = data.draw(st.sampled_from([*TRUE, kind] if kind in ONE else ["u32", "s32", "f32"]))
    into = "u32" if kind in ONE and into == "f32" else into
    ftz = ".ftz" if kind in ("f32", "f16") and data.draw(st.booleans()) else ""
    combine = data.draw(st.sampled_from(["", *BOOL]))
    rows = data.draw(st.lists(st.tuples(patterns(kind), patterns(kind), st.integers(0, 1)), min_size=8, max_size=48))
    spelling = f"set.{name}{'.' if combine else ''}{combine}{ftz}.{into}.{kind} %d, %a, %b{', %c' * bool(combine)};"
    results = compute(spelling, [stored(kind), stored(kind), "pred"], stored(into), rows)
    for (left, right, with_this), result in zip(rows, results, strict=True):
        flag = holds(name, kind, left, right, bool(ftz))
        flag = BOOL[combine](flag, bool(with_this)) if combine else flag
        assert result == (flag and {**TRUE, **ONE}[into])


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@SETTINGS
@given(data=st.data())
def test_setp_compares_halves(compute: Compute, data: st.DataObject, kind: str) -> None:
    name = data.draw(st.sampled_from(FLOAT_NAMES))
    ftz = ".ftz" if kind == "f16" and data.draw(st.booleans()) else ""
    combine = data.draw(st.sampled_from(["", *BOOL]))
    rows = data.draw(st.lists(st.tuples(patterns(kind), patterns(kind), st.integers(0, 1)), min_size=8, max_size=48))
    spelling = f"setp.{name}{'.' if combine else ''}{combine}{ftz}.{kind}"
    for destination, opposite in (("%d", False), ("%d|%x", False), ("%x|%d", True)):
        body = f"{spelling} {destination}, %a, %b{', %c' * bool(combine)};"
        results = compute(body, ["b16", "b16", "pred"], "pred", rows)
        for (left, right, with_this), result in zip(rows, results, strict=True):
            flag = holds(name, kind, left, right, bool(ftz)) != opposite
            assert result == (BOOL[combine](flag, bool(with_this)) if combine else flag)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@SETTINGS
@given(data=st.data())
def test_pairs_have_two_results(compute: Compute, data: st.DataObject, kind: str) -> None:
    name = data.draw(st.sampled_from(FLOAT_NAMES))
    rows = data.draw(st.lists(st.tuples(*[patterns(kind)] * 4), min_size=8, max_size=48))
    packed = [(a << 16 | b, c << 16 | d) for a, b, c, d in rows]
    for into, true in (("u32", 0xFFFF), ("s32", 0xFFFF), (f"{kind}x2", ONE[kind])):
        results = compute(f"set.{name}.{into}.{kind}x2 %d, %a, %b;", ["b32", "b32"], "b32", packed)
        for (a, b, c, d), result in zip(rows, results, strict=True):
            upper, lower = (holds(name, kind, *pair, False) and true for pair in ((a, c), (b, d)))
            assert result == upper << 16 | lower
    for destination, place in (("%d|%x", 1), ("%x|%d", 0)):
        results = compute(f"setp.{name}.{kind}x2 {destination}, %a, %b;", ["b32", "b32"], "pred", packed)
        expected = [holds(name, kind, row[place], row[place + 2], False) for row in rows]
        assert results == expected
