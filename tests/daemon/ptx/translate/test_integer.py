from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.drawn_rows import Values, drawn_rows, one_of, whole_numbers
from helpers.exact import number, signed
from helpers.rows import Case, alike

pytestmark = pytest.mark.exhaustive

ComputeAll = Callable[..., dict[str, list[int]]]
Reference = Callable[..., int]


def quotient(a: int, b: int) -> int:
    if b == 0:
        return -1
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def remainder(a: int, b: int) -> int:
    return -1 if b == 0 else a - b * quotient(a, b)


def field(value: int, kind: str, start: int, length: int) -> int:
    """bfe, as section 9.7.1.18 spells it out, and past 255 as an H100 has it."""
    bits = int(kind[1:])
    if bits == 32:
        start, length = start & 255, length & 255
    sign = 0
    if kind[0] == "s" and length:
        sign = value >> min(start + length - 1, bits - 1) & 1
    return sum((value >> (start + k) & 1 if k < length and start + k < bits else sign) << k for k in range(bits))


def inserted(a: int, b: int, bits: int, start: int, length: int) -> int:
    """bfi, as section 9.7.1.19 spells it out, and past 255 as an H100 has it."""
    if bits == 32:
        start, length = start & 255, length & 255
    for k in range(min(length, bits)):
        if start + k < bits:
            b = b & ~(1 << (start + k)) | (a >> k & 1) << (start + k)
    return b


def highest(value: int, kind: str, shift: bool) -> int:
    bits = int(kind[1:])
    value = ~signed(value, bits) if kind[0] == "s" and value >> (bits - 1) else value
    if value == 0:
        return -1
    return bits - value.bit_length() if shift else value.bit_length() - 1


def cases() -> list[Case]:
    found: list[Case] = []

    def add(body: str, operands: tuple[str, ...], result: str, reference: Reference) -> None:
        found.append((body, operands, result, reference))

    for kind in ("u16", "s16", "u32", "s32", "u64", "s64"):
        bits = int(kind[1:])
        for name, function in (
            ("add", lambda a, b: a + b),
            ("sub", lambda a, b: a - b),
            ("mul.lo", lambda a, b: a * b),
            ("div", quotient),
            ("rem", remainder),
            ("min", min),
            ("max", max),
        ):
            add(f"{name}.{kind} %d, %a, %b;", (kind, kind), kind, function)
        add(f"mul.hi.{kind} %d, %a, %b;", (kind, kind), kind, lambda a, b, bits=bits: (a * b) >> bits)
        add(f"mad.lo.{kind} %d, %a, %b, %c;", (kind,) * 3, kind, lambda a, b, c: a * b + c)
        add(f"mad.hi.{kind} %d, %a, %b, %c;", (kind,) * 3, kind, lambda a, b, c, bits=bits: (a * b >> bits) + c)
        if bits < 64:
            wide = f"{kind[0]}{2 * bits}"
            add(f"mul.wide.{kind} %d, %a, %b;", (kind, kind), wide, lambda a, b: a * b)
            add(f"mad.wide.{kind} %d, %a, %b, %c;", (kind, kind, wide), wide, lambda a, b, c: a * b + c)
        if kind[0] == "s":
            add(f"neg.{kind} %d, %a;", (kind,), kind, lambda a: -a)
            add(f"abs.{kind} %d, %a;", (kind,), kind, abs)
        if bits > 16:
            for shift in ("", ".shiftamt"):
                add(
                    f"bfind{shift}.{kind} %d, %a;",
                    (f"b{bits}",),
                    "u32",
                    lambda a, kind=kind, shift=shift: highest(a, kind, bool(shift)),
                )
            add(
                f"bfe.{kind} %d, %a, %b, %c;",
                (f"b{bits}", "u32", "u32"),
                kind,
                lambda a, b, c, kind=kind: field(a, kind, b, c),
            )
    for bits in (32, 64):
        kind = f"b{bits}"
        add(f"popc.{kind} %d, %a;", (kind,), "u32", lambda a: a.bit_count())
        add(f"clz.{kind} %d, %a;", (kind,), "u32", lambda a, bits=bits: bits - a.bit_length())
        add(f"brev.{kind} %d, %a;", (kind,), kind, lambda a, bits=bits: int(f"{a:0{bits}b}"[::-1], 2))
        add(
            f"bfi.{kind} %d, %a, %b, %c, 9;",
            (kind, kind, "u32"),
            kind,
            lambda a, b, c, bits=bits: inserted(a, b, bits, c, 9),
        )
    limit = 2**31
    add("add.sat.s32 %d, %a, %b;", ("s32", "s32"), "s32", lambda a, b: max(-limit, min(limit - 1, a + b)))
    add("sub.sat.s32 %d, %a, %b;", ("s32", "s32"), "s32", lambda a, b: max(-limit, min(limit - 1, a - b)))
    return found


def patterns(bits: int) -> Values[int]:
    edges = [0, 1, 2, 31, 32, 33, 63, 64, (1 << bits) - 1, (1 << bits) - 2, 1 << (bits - 1), (1 << (bits - 1)) - 1]
    return one_of([e & ((1 << bits) - 1) for e in edges]) | whole_numbers(0, (1 << bits) - 1)


ALIKE = alike(cases())


@pytest.mark.parametrize("types", ALIKE)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_agrees_with_whole_numbers(compute_all: ComputeAll, data: st.DataObject, types: str) -> None:
    _, operands, result, _ = ALIKE[types][0]
    rows = data.draw(drawn_rows(*(patterns(int(k[1:])) for k in operands)))
    mask = (1 << int(result[1:])) - 1
    numbers = [[number(v, k) for v, k in zip(row, operands, strict=True)] for row in rows]
    wanted = {body: [reference(*row) & mask for row in numbers] for body, _, _, reference in ALIKE[types]}
    assert compute_all(wanted, operands, result, rows) == wanted
