from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.drawn_rows import Values, drawn_rows, one_of, whole_numbers
from helpers.rows import Case, alike

ComputeAll = Callable[..., dict[str, list[int]]]
Reference = Callable[..., int]


def number(value: int, bits: int, signed: bool) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if signed and value >> (bits - 1) else value


def dot(left: str, right: str, count: int, start: int) -> Reference:
    def reference(a: int, b: int, c: int) -> int:
        width = 32 // count
        return c + sum(
            number(a >> width * k, width, left == "s32") * number(b >> start + 8 * k, 8, right == "s32")
            for k in range(count)
        )

    return reference


def product24(kind: str, half: str, a: int, b: int) -> int:
    whole = number(a, 24, kind == "s32") * number(b, 24, kind == "s32")
    return whole if half == "lo" else whole >> 16


def mask(mode: str, a: int, b: int) -> int:
    a, b = (v & 31 if mode == "wrap" else min(v, 32) for v in (a, b))
    return ((1 << b) - 1) << a


def extended(mode: str, kind: str, a: int, b: int) -> int:
    """szext, as section 9.7.1.21 spells it out."""
    too_large = b >= 32 and mode == "clamp"
    b &= 31
    high = 0 if too_large else ~0 << b
    negative = kind == "s32" and b != 0 and not too_large and a >> ((b - 1) & 31) & 1
    return a & ~high | (high if negative else 0)


def halves(function: Reference, signed: bool) -> Reference:
    def reference(a: int, b: int) -> int:
        parts = [function(number(a >> s, 16, signed), number(b >> s, 16, signed)) & 0xFFFF for s in (0, 16)]
        return parts[1] << 16 | parts[0]

    return reference


def cases() -> list[Case]:
    found: list[Case] = []
    word, kinds = ("b32",), ("u32", "s32")
    for left in kinds:
        for right in kinds:
            found.append((f"dp4a.{left}.{right} %d, %a, %b, %c;", word * 3, "b32", dot(left, right, 4, 0)))
            for half, start in (("lo", 0), ("hi", 16)):
                found.append(
                    (f"dp2a.{half}.{left}.{right} %d, %a, %b, %c;", word * 3, "b32", dot(left, right, 2, start))
                )
    for kind in ("u16", "s16", "u32", "s32", "u64", "s64"):
        found.append((f"sad.{kind} %d, %a, %b, %c;", (kind,) * 3, kind, lambda a, b, c: c + abs(a - b)))
    for kind in kinds:
        for half in ("lo", "hi"):
            found.append(
                (
                    f"mul24.{half}.{kind} %d, %a, %b;",
                    word * 2,
                    "b32",
                    lambda a, b, k=kind, h=half: product24(k, h, a, b),
                )
            )
            found.append(
                (
                    f"mad24.{half}.{kind} %d, %a, %b, %c;",
                    word * 3,
                    "b32",
                    lambda a, b, c, k=kind, h=half: product24(k, h, a, b) + c,
                )
            )
        for mode in ("clamp", "wrap"):
            spelling = f"szext.{mode}.{kind} %d, %a, %b;"
            found.append((spelling, word * 2, "b32", lambda a, b, m=mode, k=kind: extended(m, k, a, b)))
    for mode in ("clamp", "wrap"):
        found.append((f"bmsk.{mode}.b32 %d, %a, %b;", word * 2, "b32", lambda a, b, m=mode: mask(m, a, b)))
    for name, pick in (("min", min), ("max", max)):
        for spelling in (f"{name}.s32.relu", f"{name}.relu.s32"):
            found.append((f"{spelling} %d, %a, %b;", ("s32",) * 2, "s32", lambda a, b, p=pick: max(0, p(a, b))))
        for spelling in (f"{name}.s16x2.relu", f"{name}.relu.s16x2"):
            clamped = halves(lambda a, b, p=pick: max(0, p(a, b)), True)
            found.append((f"{spelling} %d, %a, %b;", word * 2, "b32", clamped))
        for kind in ("u16x2", "s16x2"):
            found.append((f"{name}.{kind} %d, %a, %b;", word * 2, "b32", halves(pick, kind[0] == "s")))
    for kind in ("u16x2", "s16x2"):
        found.append((f"add.{kind} %d, %a, %b;", word * 2, "b32", halves(lambda a, b: a + b, False)))
    return found


def patterns(bits: int) -> Values[int]:
    edges = [0, 1, 31, 32, 33, 255, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1]
    some = [0x80FF7F01, 0x8000FFFF, 0x00800000, 0x007FFFFF, 0xFF800000]
    return one_of([e & ((1 << bits) - 1) for e in edges + some]) | whole_numbers(0, (1 << bits) - 1)


ALIKE = alike(cases())


@pytest.mark.exhaustive
@pytest.mark.parametrize("types", ALIKE)
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_agrees_with_whole_numbers(compute_all: ComputeAll, data: st.DataObject, types: str) -> None:
    _, operands, result, _ = ALIKE[types][0]
    mask = (1 << int(result[1:])) - 1
    rows = data.draw(drawn_rows(*(patterns(int(k[1:])) for k in operands)))
    numbers = [[number(v, int(k[1:]), k[0] == "s") for v, k in zip(row, operands, strict=True)] for row in rows]
    wanted = {body: [reference(*row) & mask for row in numbers] for body, _, _, reference in ALIKE[types]}
    assert compute_all(wanted, operands, result, rows) == wanted
