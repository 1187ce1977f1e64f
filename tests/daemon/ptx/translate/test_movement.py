from collections.abc import Callable, Sequence

import pytest

Compute = Callable[[str, Sequence[str], str, Sequence[tuple[int, ...]]], list[int]]


@pytest.mark.parametrize("kind", [*(f"{letter}{bits}" for letter in "bus" for bits in (16, 32, 64)), "f32", "f64"])
def test_mov_copies_bits(compute: Compute, kind: str) -> None:
    pattern = 0x7F80000000000001 & ((1 << int(kind[1:])) - 1)
    assert compute(f"mov.{kind} %d, %a;", [kind], kind, [(pattern,)]) == [pattern]


@pytest.mark.parametrize(
    ("literal", "kind", "pattern"),
    [
        ("-1", "u16", 0xFFFF),
        ("0b101", "u32", 5),
        ("017U", "u32", 15),
        ("0f3F800000", "f32", 0x3F800000),
        ("0f3F800000", "b32", 0x3F800000),
        ("0d3FF0000000000000", "f64", 0x3FF << 52),
        ("1.5", "f32", 0x3FC00000),
        ("1e0", "f64", 0x3FF << 52),
        ("WARP_SZ", "u32", 32),
    ],
)
def test_mov_of_constants(compute: Compute, literal: str, kind: str, pattern: int) -> None:
    assert compute(f"mov.{kind} %d, {literal};", [kind], kind, [(0,)]) == [pattern]


def test_vectors_are_unpacked_and_packed(compute: Compute) -> None:
    body = "mov.b64 {%s, %t}, %a; mov.b64 %d, {%t, %s};"
    assert compute(body, ["b64"], "b64", [(0x11111111_22222222,)]) == [0x22222222_11111111]
    assert compute("mov.b64 {_, %s}, %a; mov.u32 %d, %s;", ["b64"], "u32", [(0x3_00000007,)]) == [3]
    four = ".reg .b16 %e<4>; mov.b64 {%e0, %e1, %e2, %e3}, %a; mov.b64 %d, {%e3, %e2, %e1, %e0};"
    assert compute(four, ["b64"], "b64", [(0x0001_0002_0003_0004,)]) == [0x0004_0003_0002_0001]


@pytest.mark.parametrize("space", ["global", "const", "shared", "shared::cta", "shared::cluster", "local"])
def test_cvta_there_and_back(compute: Compute, space: str) -> None:
    body = f"cvta.{space}.u64 %w, %a; cvta.to.{space}.u64 %d, %w;"
    assert compute(body, ["u64"], "u64", [(8,), (2**40,)]) == [8, 2**40]


def test_cvta_of_global_addresses_changes_nothing(compute: Compute) -> None:
    assert compute("cvta.to.global.u64 %d, %a;", ["u64"], "u64", [(12345,)]) == [12345]
