import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.drawn_rows import Values, built, drawn_rows, one_of, whole_numbers
from helpers.exact import KINDS, Kind, Number, clamped, decode, encode, flushed

pytestmark = pytest.mark.exhaustive

Compute = Callable[[str, Sequence[str], str, Sequence[tuple[int, ...]]], list[int]]
ComputeAll = Callable[..., dict[str, list[int]]]

SETTINGS = settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def exact(value: Number) -> bool:
    return isinstance(value, Fraction) or value == 0


def added(left: Number, right: Number) -> Number:
    if exact(left) and exact(right):
        total = Fraction(left) + Fraction(right)
        if total:
            return total
        both_negative = left == right == 0 and math.copysign(1, left) == math.copysign(1, right) == -1
        return -0.0 if both_negative else 0.0
    return (0.0 if exact(left) else float(left)) + (0.0 if exact(right) else float(right))


def multiplied(left: Number, right: Number) -> Number:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left * right
    return math.copysign(1, left) * math.copysign(1, right) * (abs(signum(left)) * abs(signum(right)))


def signum(value: Number) -> float:
    """A float that stands for the number where only its sign and class count."""
    return math.copysign(1.0, value) if isinstance(value, Fraction) else value


def fused(a: Number, b: Number, c: Number) -> Number:
    return added(multiplied(a, b), c)


def function(name: str) -> Callable[[Number], Number]:
    def call(value: Number) -> Number:
        number = float(value)
        if name == "tanh":
            return math.tanh(number)
        return math.nan if number != number else math.inf if number > 300 else 2.0**number

    return call


OPERATIONS: dict[str, tuple[int, Callable[..., Number]]] = {
    "add": (2, added),
    "sub": (2, lambda a, b: added(a, -b)),
    "mul": (2, multiplied),
    "fma": (3, fused),
    "ex2": (1, function("ex2")),
    "tanh": (1, function("tanh")),
}

FORMS = [
    *((f"{name}{mods}", "f16") for name in ("add", "sub", "mul") for mods in ("", ".rn.ftz", ".sat", ".ftz.sat")),
    *((f"{name}{mods}", "bf16") for name in ("add", "sub", "mul") for mods in ("", ".rn")),
    *((f"fma.rn{mods}", "f16") for mods in ("", ".ftz", ".sat", ".relu", ".ftz.relu")),
    *((f"fma.rn{mods}", "bf16") for mods in ("", ".relu")),
    ("ex2.approx", "f16"),
    ("ex2.approx.ftz", "bf16"),
    ("tanh.approx", "f16"),
    ("tanh.approx", "bf16"),
]


def spellings(name: str, kind: str) -> list[str]:
    return [spelling for spelling, number in FORMS if number == kind and spelling.partition(".")[0] == name]


def result_of(spelling: str, kind: Kind, row: Sequence[int]) -> int:
    if ".ftz" in spelling:
        row = [flushed(bits, kind) for bits in row]
    _, operation = OPERATIONS[spelling.partition(".")[0]]
    bits = encode(operation(*(decode(v, kind) for v in row)), kind)
    if ".ftz" in spelling:
        bits = flushed(bits, kind)
    value = decode(bits, kind)
    if ".sat" in spelling:
        return encode(clamped(value), kind)
    return 0 if ".relu" in spelling and value <= 0 else bits


def patterns(kind: Kind) -> Values[int]:
    """Special values, any bits, and numbers of like size, whose sums cancel or end in a tie."""
    one = kind.bias << kind.digits
    near = built(lambda v, s: v | s, whole_numbers(one - (3 << kind.digits), one + (3 << kind.digits)), signs(kind))
    return one_of(kind.edges) | near | whole_numbers(0, (1 << kind.bits) - 1)


def signs(kind: Kind) -> Values[int]:
    return one_of([0, kind.sign])


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", OPERATIONS)
@SETTINGS
@given(data=st.data())
def test_is_rounded_once(compute_all: ComputeAll, data: st.DataObject, name: str, kind: str) -> None:
    arity = OPERATIONS[name][0]
    operands = ", ".join(f"%{letter}" for letter in "abc"[:arity])
    rows = data.draw(drawn_rows(*[patterns(KINDS[kind])] * arity))
    wanted = {
        f"{spelling}.{kind} %d, {operands};": [result_of(spelling, KINDS[kind], row) for row in rows]
        for spelling in spellings(name, kind)
    }
    assert compute_all(wanted, ["b16"] * arity, "b16", rows) == wanted


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", OPERATIONS)
@SETTINGS
@given(data=st.data())
def test_a_pair_is_two_numbers(compute_all: ComputeAll, data: st.DataObject, name: str, kind: str) -> None:
    arity = OPERATIONS[name][0]
    operands = ", ".join(f"%{letter}" for letter in "abc"[:arity])
    number = patterns(KINDS[kind])
    pair = built(lambda upper, lower: upper << 16 | lower, number, number)
    rows = data.draw(drawn_rows(*[pair] * arity))
    wanted = {
        f"{spelling}.{kind}x2 %d, {operands};": [
            result_of(spelling, KINDS[kind], [v >> 16 for v in row]) << 16
            | result_of(spelling, KINDS[kind], [v & 0xFFFF for v in row])
            for row in rows
        ]
        for spelling in spellings(name, kind)
    }
    assert compute_all(wanted, ["b32"] * arity, "b32", rows) == wanted


def test_a_fused_sum_is_not_rounded_as_a_double_first(compute: Compute) -> None:
    # 3 * 89 = 267 lies in the middle of 266 and 268; what is added is too small for a double to keep.
    kind = KINDS["bf16"]
    three, other, tiny = (encode(Fraction(v), kind) for v in (3, 89, Fraction(1, 2**100)))
    rows = [(three, other, tiny), (three, other, tiny | kind.sign)]
    expected = [encode(Fraction(v), kind) for v in (268, 266)]
    assert compute("fma.rn.bf16 %d, %a, %b, %c;", ["b16"] * 3, "b16", rows) == expected


@pytest.mark.parametrize("name", ["neg", "abs"])
@pytest.mark.parametrize("kind", ["f16", "bf16", "f16x2", "bf16x2"])
@pytest.mark.parametrize("ftz", ["", ".ftz"])
@SETTINGS
@given(data=st.data())
def test_signs_are_turned_or_cleared(compute: Compute, data: st.DataObject, name: str, kind: str, ftz: str) -> None:
    ftz = "" if kind[0] == "b" else ftz
    layout = KINDS[kind.removesuffix("x2")]
    count = 2 if kind.endswith("x2") else 1
    rows = data.draw(drawn_rows(*[patterns(layout)] * count))
    packed = [(sum(v << 16 * n for n, v in enumerate(row)),) for row in rows]
    stored = f"b{16 * count}"
    for row, result in zip(rows, compute(f"{name}{ftz}.{kind} %d, %a;", [stored], stored, packed), strict=True):
        for number, bits in enumerate(row):
            bits = flushed(bits, layout) if ftz else bits
            expected = bits ^ layout.sign if name == "neg" else bits & layout.nan
            if bits & layout.nan > layout.infinity:
                expected = layout.nan
            assert result >> 16 * number & 0xFFFF == expected


def chosen(name: str, mods: str, kind: Kind, left: int, right: int) -> int:
    if ".ftz" in mods:
        left, right = flushed(left, kind), flushed(right, kind)
    sign = (left ^ right) & kind.sign
    if ".abs" in mods:
        left, right = left & kind.nan, right & kind.nan
    nans = [bits & kind.nan > kind.infinity for bits in (left, right)]
    if all(nans) or (".NaN" in mods and any(nans)):
        return kind.nan
    if any(nans):
        found = right if nans[0] else left
    else:
        pick = min if name == "min" else max

        def key(bits: int) -> tuple[float, float]:
            value = decode(bits, kind)
            return float(value), math.copysign(1, value)

        found = pick(left, right, key=key)
    return found | sign if ".abs" in mods else found


@pytest.mark.parametrize("mods", ["", ".NaN", ".xorsign.abs", ".NaN.xorsign.abs", ".ftz", ".ftz.NaN.xorsign.abs"])
@pytest.mark.parametrize("kind", ["f16", "bf16", "f16x2", "bf16x2"])
@pytest.mark.parametrize("name", ["min", "max"])
@SETTINGS
@given(data=st.data())
def test_the_smaller_or_larger(compute: Compute, data: st.DataObject, name: str, kind: str, mods: str) -> None:
    mods = mods.replace(".ftz", "") if kind[0] == "b" else mods
    layout = KINDS[kind.removesuffix("x2")]
    count = 2 if kind.endswith("x2") else 1
    rows = data.draw(drawn_rows(*[patterns(layout)] * 2 * count))
    stored = f"b{16 * count}"
    packed = [tuple(sum(v << 16 * n for n, v in enumerate(row[k::2])) for k in (0, 1)) for row in rows]
    results = compute(f"{name}{mods}.{kind} %d, %a, %b;", [stored] * 2, stored, packed)
    for row, result in zip(rows, results, strict=True):
        for number in range(count):
            expected = chosen(name, mods, layout, *row[2 * number : 2 * number + 2])
            assert result >> 16 * number & 0xFFFF == expected
