"""Video instructions against their definition in section 9.7.18."""

import operator
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings

from helpers.drawn_rows import drawn_rows, one_of, whole_numbers

pytestmark = pytest.mark.exhaustive

Compute = Callable[[str, Sequence[str], str, Sequence[tuple[int, ...]]], list[int]]
FEW = settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "vadd": operator.add,
    "vsub": operator.sub,
    "vabsdiff": lambda a, b: abs(a - b),
    "vmin": min,
    "vmax": max,
    "vavrg": lambda a, b: (a + b + (a + b >= 0)) >> 1,
}
CONDITIONS: dict[str, Callable[[int, int], bool]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
WORD = one_of([0, 1, 2**31, 2**32 - 1, 0x7F80FF01, 0x7FFF8000]) | whole_numbers(0, 2**32 - 1)
TYPES = [("u32", "u32", "u32"), ("s32", "s32", "s32"), ("u32", "s32", "u32"), ("s32", "u32", "s32")]


def parts(word: int, bits: int, kind: str) -> list[int]:
    found = [word >> start & ((1 << bits) - 1) for start in range(0, 32, bits)]
    return [v - (1 << bits) if kind == "s32" and v >> (bits - 1) else v for v in found]


def clamped(value: int, bits: int, kind: str) -> int:
    low = -(1 << bits - 1) if kind == "s32" else 0
    return min(max(value, low), low + (1 << bits) - 1)


def check(compute: Compute, text: str, expected: Callable[[int, int, int], int], count: int) -> None:
    @FEW
    @given(drawn_rows(WORD, WORD, WORD))
    def run(rows: list[tuple[int, int, int]]) -> None:
        names = ", ".join(f"%{name}" for name in "abc"[:count])
        found = compute(f"{text} %d, {names};", ["u32"] * 3, "u32", rows)
        assert found == [expected(*row) % 2**32 for row in rows]

    run()


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize(
    ("lanes", "into", "left", "right", "more"),
    [
        *((lanes, *TYPES[which], more) for lanes, which in ((2, 1), (4, 2)) for more in ("", ".sat", ".add")),
        *((lanes, *TYPES[which], more) for lanes, which in ((2, 0), (4, 3)) for more in (".sat", ".add")),
    ],
)
def test_lanes(compute: Compute, name: str, into: str, left: str, right: str, more: str, lanes: int) -> None:
    bits = 32 // lanes

    def expected(a: int, b: int, c: int) -> int:
        values = [OPERATIONS[name](x, y) for x, y in zip(parts(a, bits, left), parts(b, bits, right), strict=True)]
        if more == ".add":
            return c + sum(values)
        if more == ".sat":
            values = [clamped(value, bits, into) for value in values]
        return sum((value & ((1 << bits) - 1)) << bits * n for n, value in enumerate(values))

    check(compute, f"{name}{lanes}.{into}.{left}.{right}{more}", expected, 3)


@pytest.mark.parametrize("name", list(OPERATIONS)[:-1])
@pytest.mark.parametrize(
    ("into", "left", "right", "more"),
    [(*kinds, more) for kinds, more in zip(TYPES, ["", ".sat", ".add", ".sat.min"], strict=True)]
    + [(*TYPES[1], ".max")],
)
def test_whole_numbers(compute: Compute, name: str, into: str, left: str, right: str, more: str) -> None:
    seconds: dict[str, Callable[[int, int], int]] = {"add": operator.add, "min": min, "max": max}
    second = seconds.get(more.split(".")[-1])

    def expected(a: int, b: int, c: int) -> int:
        value = OPERATIONS[name](*parts(a, 32, left), *parts(b, 32, right))
        value = clamped(value, 32, into) if ".sat" in more else value
        return second(*parts(value % 2**32, 32, into), *parts(c, 32, into)) if second else value

    check(compute, f"{name}.{into}.{left}.{right}{more}", expected, 3 if second else 2)


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("more", ["", ".add"])
def test_comparisons(compute: Compute, condition: str, more: str) -> None:
    holds = CONDITIONS[condition]
    kinds = ("s32", "u32") if condition in ("eq", "lt", "gt") else ("u32", "s32")
    whole = f"vset.{kinds[0]}.{kinds[1]}.{condition}"
    check(compute, whole, lambda a, b, c: holds(*parts(a, 32, kinds[0]), *parts(b, 32, kinds[1])), 2)
    for bits in (8, 16):

        def expected(a: int, b: int, c: int, bits: int = bits) -> int:
            pairs = zip(parts(a, bits, kinds[0]), parts(b, bits, kinds[1]), strict=True)
            ones = [holds(x, y) for x, y in pairs]
            return c + sum(ones) if more else sum(one << bits * n for n, one in enumerate(ones))

        check(compute, f"vset{32 // bits}.{kinds[0]}.{kinds[1]}.{condition}{more}", expected, 3)


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_shifts(compute: Compute, mode: str, kind: str) -> None:
    rows = [(word, n) for word in (1, 0x80000001, 0xFFFFFFFF) for n in (0, 1, 31, 32, 33, 2**32 - 1)]
    distances = [min(n, 32) if mode == "clamp" else n % 32 for _, n in rows]
    values = [parts(word, 32, kind)[0] for word, _ in rows]
    for name, move in (("vshl", operator.lshift), ("vshr", operator.rshift)):
        into = "s32" if kind == "u32" else "u32"
        found = compute(f"{name}.{into}.{kind}.u32.{mode} %d, %a, %b;", ["u32", "u32"], "u32", rows)
        assert found == [move(v, n) % 2**32 for v, n in zip(values, distances, strict=True)]
