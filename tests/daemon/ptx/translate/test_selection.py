import math
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.drawn_rows import Values, built, drawn_rows, one_of, whole_numbers
from helpers.exact import KINDS, Kind, decode, flushed

pytestmark = pytest.mark.exhaustive

Compute = Callable[[str, Sequence[str], str, Sequence[tuple[int, ...]]], list[int]]

ComputeAll = Callable[..., dict[str, list[int]]]

SETTINGS = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
TESTS = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
WORD = whole_numbers(0, 2**32 - 1)


def patterns(kind: Kind) -> Values[int]:
    return one_of(kind.edges) | whole_numbers(0, (1 << kind.bits) - 1)


def has(test: str, kind: Kind, bits: int) -> bool:
    """testp, as section 9.7.3.1 spells it out: a zero counts as normal."""
    value = decode(bits, kind)
    subnormal = 0 < bits & kind.nan < 1 << kind.digits
    return {
        "finite": not (value != value or value in (math.inf, -math.inf)),
        "infinite": value in (math.inf, -math.inf),
        "number": value == value,
        "notanumber": value != value,
        "normal": bits & kind.nan < kind.infinity and not subnormal,
        "subnormal": subnormal,
    }[test]


@pytest.mark.parametrize("kind", ["f32", "f64"])
@SETTINGS
@given(data=st.data())
def test_testp_tells_the_class(compute_all: ComputeAll, data: st.DataObject, kind: str) -> None:
    rows = data.draw(drawn_rows(patterns(KINDS[kind])))
    wanted = {f"testp.{test}.{kind} %d, %a;": [has(test, KINDS[kind], bits) for (bits,) in rows] for test in TESTS}
    assert compute_all(wanted, [kind], "pred", rows) == wanted


@pytest.mark.parametrize("kind", [*(f"{letter}{bits}" for letter in "bus" for bits in (16, 32, 64)), "f32", "f64"])
@SETTINGS
@given(data=st.data())
def test_slct_goes_by_the_sign(compute_all: ComputeAll, data: st.DataObject, kind: str) -> None:
    value = whole_numbers(0, (1 << int(kind[1:])) - 1)
    rows = data.draw(drawn_rows(value, value, patterns(KINDS["f32"])))
    expected = [b if c >> 31 else a for a, b, c in rows]
    wanted = {f"slct.{kind}.s32 %d, %a, %b, %c;": expected}
    for ftz in ("", ".ftz"):
        chosen = [a if decode(flushed(c, KINDS["f32"]) if ftz else c, KINDS["f32"]) >= 0 else b for a, b, c in rows]
        wanted[f"slct{ftz}.{kind}.f32 %d, %a, %b, %c;"] = chosen
    assert compute_all(wanted, [kind, kind, "b32"], kind, rows) == wanted


# Section 9.7.9.7's table: the highest byte first, as it is printed there.
PERMUTATIONS = {
    "f4e": ("3210", "4321", "5432", "6543"),
    "b4e": ("5670", "6701", "7012", "0123"),
    "rc8": ("0000", "1111", "2222", "3333"),
    "ecl": ("3210", "3211", "3222", "3333"),
    "ecr": ("0000", "1110", "2210", "3210"),
    "rc16": ("1010", "3232", "1010", "3232"),
}


@pytest.mark.parametrize("mode", [*PERMUTATIONS])
@SETTINGS
@given(rows=drawn_rows(WORD, WORD, WORD))
def test_prmt_picks_bytes_by_its_mode(compute: Compute, mode: str, rows: list[tuple[int, int, int]]) -> None:
    expected = []
    for a, b, c in rows:
        source = (b << 32 | a).to_bytes(8, "little")
        expected.append(int.from_bytes(bytes(source[int(place)] for place in PERMUTATIONS[mode][c & 3]), "big"))
    assert compute(f"prmt.b32.{mode} %d, %a, %b, %c;", ["b32"] * 3, "b32", rows) == expected


def nth_set(mask: int, base: int, offset: int) -> int:
    """fns, as section 9.7.1.17 spells it out; the one offset without a magnitude as on an H100."""
    if offset == 1 << 31:
        return 0
    offset = offset - (1 << 32) if offset >> 31 else offset
    if offset == 0:
        return base if base < 32 and mask >> base & 1 else 0xFFFFFFFF
    position, count = base, abs(offset) - 1
    while 0 <= position < 32:
        if mask >> position & 1:
            if count == 0:
                return position
            count -= 1
        position += 1 if offset > 0 else -1
    return 0xFFFFFFFF


@SETTINGS
@given(
    rows=drawn_rows(
        WORD | one_of([2**32 - 1]),
        whole_numbers(0, 33),
        built(lambda offset: offset & 0xFFFFFFFF, whole_numbers(-33, 33)) | WORD | one_of([1 << 31]),
        most=512,
    )
)
def test_fns_finds_the_nth_one(compute: Compute, rows: list[tuple[int, int, int]]) -> None:
    assert compute("fns.b32 %d, %a, %b, %c;", ["b32"] * 3, "b32", rows) == [nth_set(*row) for row in rows]


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_cnot_is_one_for_zero(compute: Compute, bits: int) -> None:
    kind = f"b{bits}"
    assert compute(f"cnot.{kind} %d, %a;", [kind], kind, [(0,), (1,), (1 << bits - 1,)]) == [1, 0, 0]


@pytest.mark.parametrize("mods", [".NaN", ".ftz.NaN", ".xorsign.abs", ".NaN.xorsign.abs", ".ftz.xorsign.abs"])
@pytest.mark.parametrize("name", ["min", "max"])
@SETTINGS
@given(data=st.data())
def test_min_and_max_as_modified(compute: Compute, data: st.DataObject, name: str, mods: str) -> None:
    kind = KINDS["f32"]
    rows = data.draw(drawn_rows(patterns(kind), patterns(kind)))
    results = compute(f"{name}{mods}.f32 %d, %a, %b;", ["f32", "f32"], "f32", rows)
    for row, result in zip(rows, results, strict=True):
        left, right = (flushed(v, kind) if ".ftz" in mods else v for v in row)
        sign = (left ^ right) & kind.sign if "abs" in mods else 0
        if "abs" in mods:
            left, right = left & kind.nan, right & kind.nan
        nans = [v & kind.nan > kind.infinity for v in (left, right)]
        if all(nans) or (any(nans) and ".NaN" in mods):
            assert result == kind.nan
        elif any(nans):
            assert result == (right if nans[0] else left) | sign
        else:
            pick = min if name == "min" else max
            order = sorted((left, right), key=lambda v: (float(decode(v, kind)), -(v >> 31)))
            assert result == (order[0] if pick is min else order[1]) | sign
