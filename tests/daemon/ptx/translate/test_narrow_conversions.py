import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.drawn_rows import Values, built, drawn_rows, one_of, whole_numbers
from helpers.exact import KINDS, Kind, Number, clamped, decode, encode, flushed, limits, number

pytestmark = pytest.mark.exhaustive

Compute = Callable[[str, Sequence[str], str, Sequence[tuple[int, ...]]], list[int]]
ComputeAll = Callable[..., dict[str, list[int]]]

SETTINGS = settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
MODES = ("rn", "rz", "rm", "rp")
WHOLE: dict[str, Callable[[Fraction], int]] = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}
TF32 = Kind(19, 10, 127)


def halfway(into: Kind, source: Kind) -> Values[int]:
    """Numbers of the source at, just above and just below what two neighbours of the target have in the middle."""

    def build(bits: int, nudge: int) -> int:
        exact = decode(bits & ~into.sign, into)
        if isinstance(exact, float):
            return bits & ((1 << source.bits) - 1)
        above = decode((bits & ~into.sign) + 1, into)
        middle = (exact + above) / 2 if isinstance(above, Fraction) else exact
        found = max(0, encode(abs(middle), source) + nudge)
        return (found | source.sign) if bits & into.sign else found

    return built(build, whole_numbers(0, (1 << into.bits) - 1), whole_numbers(-1, 1))


def patterns(source: Kind, into: Kind | None = None) -> Values[int]:
    drawn = one_of(source.edges) | whole_numbers(0, (1 << source.bits) - 1)
    return drawn | halfway(into, source) if into else drawn


def stored(kind: str) -> str:
    return {"f16": "b16", "bf16": "b16"}.get(kind, kind)


def integers(kind: str) -> Values[int]:
    bits = int(kind[1:])
    most = (1 << bits) - 1
    powers = built(lambda e, d, s: ((1 << e) + d) * s & most, whole_numbers(0, bits - 1), whole_numbers(-1, 1), sign)
    halves = built(
        lambda m, e, d: ((m << e) + d) & most, whole_numbers(0, 2**25), whole_numbers(0, 44), whole_numbers(-1, 1)
    )
    return one_of([0, 1, most, most // 2, most // 2 + 1]) | powers | halves | whole_numbers(0, most)


sign = one_of([1, -1])


NARROW = [
    *((f"{mode}{extra}", "f16", "f32") for mode in MODES for extra in ("", ".ftz", ".sat")),
    *((f"{mode}{extra}", "bf16", "f32") for mode in MODES for extra in ("", ".ftz")),
    *((f"{mode}.relu", into, "f32") for mode in ("rn", "rz") for into in ("f16", "bf16")),
    *((mode, into, "f64") for mode in MODES for into in ("f16", "bf16")),
    *((f"{mode}{extra}", "f32", "f64") for mode in MODES for extra in ("", ".ftz", ".sat")),
    *((mode, "f16", "bf16") for mode in MODES),
    *((mode, "bf16", "f16") for mode in MODES),
    *((extra, "f32", "f16") for extra in ("", "ftz", "sat")),
    *((extra, "f64", "f16") for extra in ("", "sat")),
    ("", "f32", "bf16"),
    ("", "f64", "bf16"),
]


def finished(value: Number, into: Kind, mode: str) -> int:
    if ".sat" in f".{mode}":
        # The clamp is of what has been rounded.
        value = clamped(decode(encode(value, into, mode[:2]), into))
    if "relu" in mode and value <= 0:
        value = 0.0
    bits = encode(value, into, mode[:2] if mode[:2] in MODES else "rn")
    return flushed(bits, into) if "ftz" in mode and into.bits == 32 else bits


@pytest.mark.parametrize(("into", "source"), sorted({(into, source) for _, into, source in NARROW}))
@SETTINGS
@given(data=st.data())
def test_floats_are_rounded_once(compute_all: ComputeAll, data: st.DataObject, into: str, source: str) -> None:
    drawn = patterns(KINDS[source], KINDS[into])
    rows = data.draw(drawn_rows(drawn))
    modes = {
        ".".join(part for part in ("cvt", mode, into, source) if part) + " %d, %a;": mode
        for mode, *kinds in NARROW
        if kinds == [into, source]
    }
    for body, results in compute_all(modes, [stored(source)], stored(into), rows).items():
        for (row,), result in zip(rows, results, strict=True):
            expected = narrowed(row, result, modes[body], into, source)
            assert result == expected, (body, hex(row), hex(result), hex(expected))


def narrowed(row: int, result: int, mode: str, into: str, source: str) -> int:
    """What should come of a number; of an f64's NaN, whose payload is open, the result if it is a NaN."""
    # What becomes f16 is not flushed: directed rounding makes of the smallest numbers f16's own.
    read = flushed(row, KINDS[source]) if "ftz" in mode and source == "f32" and into != "f16" else row
    expected = finished(decode(read, KINDS[source]), KINDS[into], mode)
    if (into, source) == ("f32", "f64") and ".sat" not in mode and expected == KINDS["f32"].nan:
        return row >> 32 & 1 << 31 | row >> 29 & 0x7FFFFF | 0x7FC00000
    if (into, source) == ("f16", "f64") and expected == KINDS["f16"].nan:
        return row >> 48 & 1 << 15 | row >> 42 & 0x3FF | 0x7E00
    if (into, source) == ("f32", "bf16"):
        return row << 16
    if into == "f64" and expected == KINDS["f64"].nan and math.isnan(float(decode(result, KINDS["f64"]))):
        return result
    return expected


@pytest.mark.parametrize("mode", ["rna", "rn", "rz", "rn.relu"])
@SETTINGS
@given(data=st.data())
def test_tf32_has_ten_digits(compute: Compute, data: st.DataObject, mode: str) -> None:
    rows = data.draw(drawn_rows(patterns(KINDS["f32"], TF32)))
    results = compute(f"cvt.{mode}.tf32.f32 %d, %a;", ["f32"], "b32", rows)
    for (row,), result in zip(rows, results, strict=True):
        value = decode(row, KINDS["f32"])
        if "relu" in mode and value <= 0:
            value = 0.0
        expected = 0x7FFFFFFF if value != value else encode(value, TF32, mode.removesuffix(".relu")) << 13
        assert result == expected, (hex(row), hex(result))


@pytest.mark.parametrize("mode", ["rn", "rz", "rn.relu", "rz.relu"])
@pytest.mark.parametrize("into", ["f16", "bf16"])
@SETTINGS
@given(data=st.data())
def test_a_pair_has_the_first_on_top(compute: Compute, data: st.DataObject, mode: str, into: str) -> None:
    drawn = patterns(KINDS["f32"], KINDS[into])
    rows = data.draw(drawn_rows(drawn, drawn))
    results = compute(f"cvt.{mode}.{into}x2.f32 %d, %a, %b;", ["f32", "f32"], "b32", rows)
    for row, result in zip(rows, results, strict=True):
        upper, lower = (finished(decode(v, KINDS["f32"]), KINDS[into], mode) for v in row)
        assert result == upper << 16 | lower


@pytest.mark.parametrize("into", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("source", INTEGERS)
@SETTINGS
@given(data=st.data())
def test_integers_are_rounded_once(compute_all: ComputeAll, data: st.DataObject, into: str, source: str) -> None:
    rows = data.draw(drawn_rows(integers(source)))
    wanted = {
        f"cvt.{mode}{sat}.{into}.{source} %d, %a;": [
            finished(Fraction(number(row, source)), KINDS[into], mode + sat) for (row,) in rows
        ]
        for mode in MODES
        for sat in (("",) if into == "bf16" else ("", ".sat"))
    }
    assert compute_all(wanted, [source], stored(into), rows) == wanted


def whole(bits: int, mode: str, into: str, source: str) -> int:
    """The nearest integer the mode picks that there is; of NaN 0, or the top bit where either has 64 bits."""
    value, (low, high) = decode(bits, KINDS[source]), limits(into)
    if value != value:
        return 1 << (int(into[1:]) - 1) if "64" in into + source else 0
    if value in (math.inf, -math.inf):
        result = high if value > 0 else low
    else:
        result = max(low, min(high, WHOLE[mode](Fraction(value))))
    return result & ((1 << int(into[1:])) - 1)


@pytest.mark.parametrize(
    ("source", "into"),
    [(source, into) for source in KINDS for into in (INTEGERS if source in ("f16", "bf16") else INTEGERS[:2])],
)
@SETTINGS
@given(data=st.data())
def test_floats_become_the_nearest_integer(
    compute_all: ComputeAll, data: st.DataObject, source: str, into: str
) -> None:
    rows = data.draw(drawn_rows(patterns(KINDS[source], KINDS["f16"])))
    wanted = {
        f"cvt.{mode}.{into}.{source} %d, %a;": [whole(row, mode, into, source) for (row,) in rows] for mode in WHOLE
    }
    assert compute_all(wanted, [stored(source)], into, rows) == wanted


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("mode", [*WHOLE])
@SETTINGS
@given(data=st.data())
def test_rounding_to_a_whole_number_keeps_the_sign(compute: Compute, data: st.DataObject, mode: str, kind: str) -> None:
    rows = data.draw(drawn_rows(patterns(KINDS[kind])))
    results = compute(f"cvt.{mode}.{kind}.{kind} %d, %a;", ["b16"], "b16", rows)
    for (row,), result in zip(rows, results, strict=True):
        value = decode(row, KINDS[kind])
        if isinstance(value, Fraction):
            whole = WHOLE[mode](value)
            value = Fraction(whole) if whole else math.copysign(0.0, value)
        assert result == encode(value, KINDS[kind])


@SETTINGS
@given(rows=drawn_rows(*[whole_numbers(0, 2**32 - 1) | whole_numbers(0, 300)] * 3))
def test_packing_clamps_each(compute: Compute, rows: list[tuple[int, int, int]]) -> None:
    for kind in ("u16", "s16"):
        low, high = limits(kind)
        pairs = [(a, b) for a, b, _ in rows]
        expected = []
        for row in pairs:
            upper, lower = (max(low, min(high, number(v, "s32"))) & 0xFFFF for v in row)
            expected.append(upper << 16 | lower)
        assert compute(f"cvt.pack.sat.{kind}.s32 %d, %a, %b;", ["s32", "s32"], "b32", pairs) == expected
    for kind in ("u8", "s8"):
        low, high = limits(kind)
        expected = []
        for a, b, c in rows:
            upper, lower = (max(low, min(high, number(v, "s32"))) & 0xFF for v in (a, b))
            expected.append((c << 16 | upper << 8 | lower) & 0xFFFFFFFF)
        spelling = f"cvt.pack.sat.{kind}.s32.b32 %d, %a, %b, %c;"
        assert compute(spelling, ["s32", "s32", "b32"], "b32", rows) == expected
