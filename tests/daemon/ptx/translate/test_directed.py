import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.drawn_rows import Values, built, drawn_rows, one_of, whole_numbers
from helpers.exact import KINDS, Kind, Number, clamped, decode, encode, flushed

pytestmark = pytest.mark.exhaustive

Compute = Callable[[str, Sequence[str], str, Sequence[tuple[int, ...]]], list[int]]
ComputeAll = Callable[..., dict[str, list[int]]]

SETTINGS = settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
MODES = ("rz", "rm", "rp")
SIGNS = one_of([0, 1])
ARITY = {"add": 2, "sub": 2, "mul": 2, "div": 2, "fma": 3, "mad": 3, "sqrt": 1, "rcp": 1}


def negative(value: Number) -> bool:
    return math.copysign(1, value) < 0


def product(left: Number, right: Number) -> Number:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left * right
    a, b = (math.copysign(1.0, v) if isinstance(v, Fraction) else v for v in (left, right))
    return a * b


def quotient(left: Number, right: Number) -> Number:
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left / right
    if left != left or right != right or left == right == 0 or (math.isinf(left) and math.isinf(right)):
        return math.nan
    sign = -1.0 if negative(left) != negative(right) else 1.0
    return sign * (math.inf if math.isinf(left) or right == 0 else 0.0)


def total(left: Number, right: Number, mode: str) -> Number:
    """A sum; one that is exactly zero has the sign IEEE 754 section 6.3 gives it."""
    finite = [isinstance(v, Fraction) or v == 0 for v in (left, right)]
    if not all(finite):
        return sum(0.0 if f else float(v) for v, f in zip((left, right), finite, strict=True))
    exact = Fraction(left) + Fraction(right)
    if exact:
        return exact
    signs = {negative(left), negative(right)}
    return -0.0 if signs == {True} or (mode == "rm" and len(signs) == 2) else 0.0


def root(value: Number, kind: Kind) -> Number:
    """A number that every mode rounds as it rounds the root: exact, or with a digit set far behind the last."""
    if not isinstance(value, Fraction):
        return value if value != value or value >= 0 else math.nan
    if value < 0:
        return math.nan
    scale = 2 * (kind.digits + kind.bias + 40)
    scaled = value.numerator * (1 << 2 * scale) // value.denominator
    found = math.isqrt(scaled)
    exact = Fraction(found * found) == value * (1 << 2 * scale)
    return Fraction(2 * found + (not exact), 2 << scale)


def operate(name: str, mode: str, kind: Kind, values: Sequence[Number]) -> Number:
    match name:
        case "add":
            return total(values[0], values[1], mode)
        case "sub":
            return total(values[0], -values[1], mode)
        case "mul":
            return product(values[0], values[1])
        case "div":
            return quotient(values[0], values[1])
        case "rcp":
            return quotient(Fraction(1), values[0])
        case "sqrt":
            return root(values[0], kind)
    return total(product(values[0], values[1]), values[2], mode)


def patterns(kind: Kind) -> Values[int]:
    """Special values, any bits, and short numbers: their products, quotients and roots are often exact."""
    short = built(lambda v, s: v << (kind.digits - 3) | s * kind.sign, whole_numbers(0, kind.bias * 16), SIGNS)
    one = kind.bias << kind.digits
    near = built(lambda d, s: (one + d) | s * kind.sign, whole_numbers(-5, 1 << kind.digits), SIGNS)
    return one_of(kind.edges) | short | near | whole_numbers(0, (1 << kind.bits) - 1)


# Those with .sat.
NEAR_ONE = ("add", "sub", "mul", "fma", "mad")
FORMS = [
    *((name, mode, extra, "f32") for name in ARITY for mode in MODES for extra in ("", ".ftz")),
    *((name, mode, sat, "f32") for name in NEAR_ONE for mode in MODES for sat in (".sat", ".ftz.sat")),
    *((name, mode, "", "f64") for name in ARITY for mode in MODES),
]


@cache
def result_of(name: str, mode: str, extra: str, kind: str, row: tuple[int, ...]) -> int:
    layout = KINDS[kind]
    read = [flushed(bits, layout) for bits in row] if ".ftz" in extra else row
    expected = encode(operate(name, mode, layout, [decode(bits, layout) for bits in read]), layout, mode)
    if ".ftz" in extra:
        expected = flushed(expected, layout)
    if ".sat" in extra:
        expected = encode(clamped(decode(expected, layout)), layout)
    return expected


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("name", ARITY)
@SETTINGS
@given(data=st.data())
def test_is_what_the_mode_picks(compute_all: ComputeAll, data: st.DataObject, name: str, kind: str) -> None:
    arity, layout = ARITY[name], KINDS[kind]
    rows = data.draw(drawn_rows(*[patterns(layout)] * arity))
    operands = ", ".join(f"%{letter}" for letter in "abc"[:arity])
    forms = {
        f"{name}.{mode}{extra}.{kind} %d, {operands};": (mode, extra)
        for of, mode, extra, number in FORMS
        if (of, number) == (name, kind)
    }
    for body, results in compute_all(forms, [kind] * arity, kind, rows).items():
        for row, result in zip(rows, results, strict=True):
            expected = result_of(name, *forms[body], kind, row)
            if kind == "f64" and expected == layout.nan:
                assert result & layout.nan > layout.infinity
            else:
                assert result == expected, (body, row, hex(result), hex(expected))


def test_the_mode_ends_with_the_instruction(compute: Compute) -> None:
    third = encode(Fraction(1, 3), KINDS["f32"])
    row = (KINDS["f32"].bias << 23, encode(Fraction(3), KINDS["f32"]))
    body = "div.rz.f32 %d, %a, %b; div.rp.f32 %d, %a, %b; div.rn.f32 %d, %a, %b;"
    assert compute(body, ["f32", "f32"], "f32", [row]) == [third]
    assert compute("div.rn.f32 %d, %a, %b; div.rz.f32 %d, %a, %b;", ["f32", "f32"], "f32", [row]) == [third - 1]
    # With operands that are known when it is compiled.
    assert compute("div.rz.f32 %d, 0f3f800000, 0f40400000;", ["f32"], "f32", [(0,)]) == [third - 1]
    assert float(Fraction(1, 3)) == 1.0 / 3.0
