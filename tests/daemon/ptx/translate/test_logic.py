from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.drawn_rows import Values, drawn_rows, one_of, whole_numbers
from helpers.rows import Case, alike

ComputeAll = Callable[..., dict[str, list[int]]]
Reference = Callable[..., int]


def arithmetic_right(value: int, amount: int, bits: int) -> int:
    value = value - (1 << bits) if value >> (bits - 1) else value
    return value >> min(amount, bits)


def funnel(low: int, high: int, amount: int, side: str, mode: str) -> int:
    amount = amount & 31 if mode == "wrap" else min(amount, 32)
    both = high << 32 | low
    return (both << amount) >> 32 if side == "l" else both >> amount


def any_logic(a: int, b: int, c: int, table: int) -> int:
    return sum((table >> ((a >> k & 1) * 4 + (b >> k & 1) * 2 + (c >> k & 1)) & 1) << k for k in range(32))


def permuted(a: int, b: int, choices: int) -> int:
    both, result = b << 32 | a, 0
    for k in range(4):
        choice = choices >> 4 * k & 15
        byte = both >> 8 * (choice & 7) & 255
        result |= (255 * (byte >> 7) if choice & 8 else byte) << 8 * k
    return result


def cases() -> list[Case]:
    found: list[Case] = []
    for bits in (16, 32, 64):
        kind = f"b{bits}"
        found += [
            (f"and.{kind} %d, %a, %b;", (kind, kind), kind, lambda a, b: a & b),
            (f"or.{kind} %d, %a, %b;", (kind, kind), kind, lambda a, b: a | b),
            (f"xor.{kind} %d, %a, %b;", (kind, kind), kind, lambda a, b: a ^ b),
            (f"not.{kind} %d, %a;", (kind,), kind, lambda a: ~a),
            (f"shl.{kind} %d, %a, %b;", (kind, "u32"), kind, lambda a, b, bits=bits: a << min(b, bits)),
            (f"shr.u{bits} %d, %a, %b;", (kind, "u32"), kind, lambda a, b, bits=bits: a >> min(b, bits)),
            (
                f"shr.s{bits} %d, %a, %b;",
                (kind, "u32"),
                kind,
                lambda a, b, bits=bits: arithmetic_right(a, b, bits),
            ),
        ]
    for side in "lr":
        for mode in ("clamp", "wrap"):
            found.append(
                (
                    f"shf.{side}.{mode}.b32 %d, %a, %b, %c;",
                    ("b32", "b32", "u32"),
                    "b32",
                    lambda a, b, c, side=side, mode=mode: funnel(a, b, c, side, mode),
                )
            )
    for table in (0, 0x96, 0xE8, 0x80, 0xFF, 0x1B):
        found.append(
            (
                f"lop3.b32 %d, %a, %b, %c, {table};",
                ("b32",) * 3,
                "b32",
                lambda a, b, c, table=table: any_logic(a, b, c, table),
            )
        )
    found.append(("prmt.b32 %d, %a, %b, %c;", ("b32",) * 3, "b32", permuted))
    for name, function in (("and", lambda a, b: a & b), ("or", lambda a, b: a | b), ("xor", lambda a, b: a ^ b)):
        found.append((f"{name}.pred %d, %a, %b;", ("pred", "pred"), "pred", function))
    found.append(("not.pred %d, %a;", ("pred",), "pred", lambda a: 1 - a))
    return found


def patterns(kind: str) -> Values[int]:
    if kind == "pred":
        return whole_numbers(0, 1)
    most = (1 << int(kind[1:])) - 1
    return one_of([0, 1, 15, 16, 31, 32, 33, 63, 64, 65, most, most - 1, most // 2 + 1]) | whole_numbers(0, most)


ALIKE = alike(cases())


@pytest.mark.exhaustive
@pytest.mark.parametrize("types", ALIKE)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_agrees_bit_for_bit(compute_all: ComputeAll, data: st.DataObject, types: str) -> None:
    _, operands, result, _ = ALIKE[types][0]
    rows = data.draw(drawn_rows(*map(patterns, operands)))
    mask = 1 if result == "pred" else (1 << int(result[1:])) - 1
    wanted = {body: [reference(*row) & mask for row in rows] for body, _, _, reference in ALIKE[types]}
    assert compute_all(wanted, operands, result, rows) == wanted
