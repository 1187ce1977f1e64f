from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulease.daemon.drivers.interface import ImageRejected
from helpers.drawn_rows import Values, drawn_rows, one_of, whole_numbers

Compute = Callable[[str, Sequence[str], str, Sequence[tuple[int, ...]]], list[int]]

SETTINGS = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
WORD = (1 << 32) - 1


def number(value: int, kind: str) -> int:
    """A bit pattern as the type reads it."""
    bits = int(kind[1:])
    return value - (1 << bits) if kind[0] == "s" and value >> (bits - 1) else value


def wide(bits: int) -> Values[int]:
    most = (1 << bits) - 1
    return one_of([0, 1, most, most - 1, 1 << 31, WORD, most >> 1]) | whole_numbers(0, most)


@pytest.mark.parametrize("kind", ["u32", "s32"])
@pytest.mark.parametrize("name", ["add", "sub"])
@SETTINGS
@given(rows=drawn_rows(wide(64), wide(64)))
def test_two_words_make_a_long_one(compute: Compute, name: str, kind: str, rows: list[tuple[int, int]]) -> None:
    body = f"""{{ .reg .b32 %l, %h, %m, %n; mov.b64 {{%l, %h}}, %a; mov.b64 {{%m, %n}}, %b;
        {name}.cc.{kind} %l, %l, %m; {name}c.{kind} %h, %h, %n; mov.b64 %d, {{%l, %h}}; }}"""
    expected = [(a + b if name == "add" else a - b) & ((1 << 64) - 1) for a, b in rows]
    assert compute(body, ["b64", "b64"], "b64", rows) == expected


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["u64", "s64", "u32", "s32"])
@pytest.mark.parametrize("name", ["add", "sub"])
@SETTINGS
@given(data=st.data())
def test_the_flag_goes_through_a_chain(compute: Compute, data: st.DataObject, name: str, kind: str) -> None:
    """Three digits, each a + b with what the one before carried; the last flag is kept as 0 or 1."""
    bits = int(kind[1:])
    rows = data.draw(drawn_rows(*[wide(bits)] * 4))
    last = "addc" if name == "add" else "subc"
    body = f"""{name}.cc.{kind} %d, %a, %b; {last}.cc.{kind} %d, %c, %e; {last}.{kind} %d, 0, 0;"""
    body = f".reg .b{bits} %e; ld.global.b{bits} %e, [%p+24];\n{body}"
    results = compute(body, [kind] * 3, kind, rows)
    for (a, b, c, e), result in zip(rows, results, strict=True):
        whole = (c << bits | a) + (e << bits | b) if name == "add" else (c << bits | a) - (e << bits | b)
        carried = whole >> 2 * bits
        assert result == carried & ((1 << bits) - 1)


@SETTINGS
@given(rows=drawn_rows(wide(32), wide(32)))
def test_an_addition_finds_a_carry_where_nothing_was_borrowed(compute: Compute, rows: list[tuple[int, int]]) -> None:
    for last in ("addc.u32 %d, 0, 0;", "madc.lo.u32 %d, 0, 0, 0;"):
        body = f"sub.cc.u32 %d, %a, %b; {last}"
        assert compute(body, ["u32", "u32"], "u32", rows) == [int(a >= b) for a, b in rows]


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
@SETTINGS
@given(data=st.data())
def test_products_are_added_with_carry(compute: Compute, data: st.DataObject, kind: str) -> None:
    bits = int(kind[1:])
    rows = data.draw(drawn_rows(*[wide(bits)] * 3))
    low = f"mad.lo.cc.{kind} %d, %a, %b, %c;"
    assert compute(low, [kind] * 3, kind, rows) == [(a * b + c) & ((1 << bits) - 1) for a, b, c in rows]
    body = f"{low} madc.hi.cc.{kind} %d, %a, %b, %c; addc.{kind} %d, %d, 0;"
    expected = []
    for a, b, c in rows:
        product = number(a, kind) * number(b, kind) & ((1 << 2 * bits) - 1)
        whole = product + c + (c << bits)
        expected.append(((whole >> bits) + (whole >> 2 * bits)) & ((1 << bits) - 1))
    assert compute(body, [kind] * 3, kind, rows) == expected


@SETTINGS
@given(rows=drawn_rows(*[wide(32)] * 3))
def test_the_upper_half_is_signed_if_the_type_is(compute: Compute, rows: list[tuple[int, int, int]]) -> None:
    body = "mad.hi.cc.s32 %d, %a, %b, %c; madc.lo.s32 %d, 0, 0, 0;"
    expected = [((number(a, "s32") * number(b, "s32") >> 32 & WORD) + c) >> 32 for a, b, c in rows]
    assert compute(body, ["s32"] * 3, "u32", rows) == expected


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("addc.u32 %d, %a, %a;", "no .cc instruction"),
        ("setp.eq.u32 %x, %a, 0; @%x bra L; add.cc.u32 %d, %a, %a; L: addc.u32 %d, %a, %a;", "no .cc instruction"),
        ("add.cc.u32 %d, %a, %a; bar.sync 0; addc.u32 %d, %a, %a;", "no .cc instruction"),
        ("setp.eq.u32 %x, %a, 0; @%x add.cc.u32 %d, %a, %a;", "predicate"),
        ("add.cc.u32 %d, %a, %a; subc.u32 %d, %a, %a;", "borrow"),
    ],
)
def test_a_broken_chain_is_refused(compute: Compute, body: str, reason: str) -> None:
    with pytest.raises(ImageRejected, match=reason):
        compute(body, ["u32"], "u32", [(0,)])
