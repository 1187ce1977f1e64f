import math
import operator
import struct
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

Compute = Callable[[str, Sequence[str], str, Sequence[tuple[int, ...]]], list[int]]

ORDER: dict[str, Callable[[float, float], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
FLOAT_NAMES = [*ORDER, *(f"{name}u" for name in ORDER), "num", "nan"]
EDGES = {
    "f32": [0, 1 << 31, 0x3F800000, 0xBF800000, 0x7FC00000, 0x7F800000, 1],
    "f64": [0, 1 << 63, 0x3FF << 52, 0xBFF << 52, 0x7FF8 << 48, 0x7FF << 52],
}


def decoded(bits: int, kind: str) -> float:
    if kind[0] == "f":
        code, size = ("<f", 4) if kind == "f32" else ("<d", 8)
        return float(struct.unpack(code, bits.to_bytes(size, "little"))[0])
    width = int(kind[1:])
    return bits - (1 << width) if kind[0] == "s" and bits >> (width - 1) else bits


def holds(name: str, kind: str, a: float, b: float) -> bool:
    if kind[0] != "f":
        return ORDER[UNSIGNED.get(name, name)](a, b)
    unordered = math.isnan(a) or math.isnan(b)
    if name in ("num", "nan"):
        return unordered == (name == "nan")
    if unordered:
        return name.endswith("u") and name not in ORDER
    return ORDER[name if name in ORDER else name[:-1]](a, b)


def spellings() -> list[tuple[str, str]]:
    found = [(name, kind) for kind in ("s16", "s32", "s64", "u16", "u32", "u64") for name in ORDER]
    found += [(name, kind) for kind in ("u16", "u32", "u64") for name in UNSIGNED]
    found += [(name, kind) for kind in ("b16", "b32", "b64") for name in ("eq", "ne")]
    return found + [(name, kind) for kind in ("f32", "f64") for name in FLOAT_NAMES]


def patterns(kind: str) -> st.SearchStrategy[int]:
    most = (1 << int(kind[1:])) - 1
    edges = EDGES.get(kind, [0, 1, most, most // 2, most // 2 + 1])
    return st.sampled_from(edges) | st.integers(0, most)


@pytest.mark.parametrize(("name", "kind"), spellings())
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_setp_orders_as_the_type_does(compute: Compute, data: st.DataObject, name: str, kind: str) -> None:
    rows = data.draw(st.lists(st.tuples(patterns(kind), patterns(kind)), min_size=1, max_size=48))
    expected = [int(holds(name, kind, decoded(a, kind), decoded(b, kind))) for a, b in rows]
    assert compute(f"setp.{name}.{kind} %d, %a, %b;", [kind, kind], "pred", rows) == expected


ROWS = [(a, b, c) for a in (1, 2) for b in (1, 2) for c in (0, 1)]


@pytest.mark.parametrize(("name", "join"), [("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)])
@pytest.mark.parametrize("negated", ["", "!"])
def test_setp_joins_both_results_with_a_predicate(
    compute: Compute, name: str, join: Callable[[int, int], int], negated: str
) -> None:
    body = f"setp.lt.{name}.u32 %x|%y, %a, %b, {negated}%c;\n"
    flip = int(bool(negated))
    kinds = ["u32", "u32", "pred"]
    first = compute(body + "mov.pred %d, %x;", kinds, "pred", ROWS)
    second = compute(body + "mov.pred %d, %y;", kinds, "pred", ROWS)
    assert first == [join(int(a < b), c ^ flip) for a, b, c in ROWS]
    assert second == [join(int(not a < b), c ^ flip) for a, b, c in ROWS]


def test_setp_with_ftz_takes_subnormals_for_zero(compute: Compute) -> None:
    rows = [(1, 0), (0x80000001, 0), (0x00800000, 0)]
    assert compute("setp.eq.ftz.f32 %d, %a, %b;", ["f32", "f32"], "pred", rows) == [1, 1, 0]


@pytest.mark.parametrize("kind", ["b16", "u32", "s64", "f32", "f64"])
def test_selp_takes_the_first_if_the_predicate_holds(compute: Compute, kind: str) -> None:
    assert compute(f"selp.{kind} %d, %a, %b, %c;", [kind, kind, "pred"], kind, [(7, 9, 1), (7, 9, 0)]) == [7, 9]


def test_guards_of_both_senses(compute: Compute) -> None:
    body = "mov.u32 %d, 1; @%c mov.u32 %d, %a; @!%c add.u32 %d, %b, %d;"
    assert compute(body, ["u32", "u32", "pred"], "u32", [(5, 8, 1), (5, 8, 0)]) == [5, 9]
