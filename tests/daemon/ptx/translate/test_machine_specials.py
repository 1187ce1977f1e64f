"""Special registers that tell about the machine and the time."""

import time
from collections.abc import Callable, Sequence

import pytest

Compute = Callable[[str, Sequence[str], str, Sequence[tuple[int, ...]]], list[int]]


@pytest.mark.parametrize(("name", "value"), [("smid", 0), ("nsmid", 1)])
def test_there_is_one_multiprocessor(compute: Compute, name: str, value: int) -> None:
    assert compute(f"mov.u32 %d, %{name};", [], "u32", [()] * 3) == [value] * 3


def test_a_grid_has_a_number(compute: Compute) -> None:
    assert compute("mov.u64 %d, %gridid;", [], "u64", [()]) == [0]


def test_the_global_timer_counts_nanoseconds(compute: Compute) -> None:
    before = time.time_ns()
    first, second = compute("mov.u64 %d, %globaltimer;", [], "u64", [(), ()])
    assert before <= first <= second <= time.time_ns()
    body = "mov.u32 %s, %globaltimer_lo; mov.u32 %t, %globaltimer_hi; mov.b64 %d, {%s, %t};"
    (joined,) = compute(body, [], "b64", [()])
    assert abs(joined - second) < 60 * 10**9


def test_the_clock_goes_on(compute: Compute) -> None:
    body = "mov.u64 %w, %clock64; mov.u64 %d, %clock64; sub.u64 %d, %d, %w;"
    assert 0 <= compute(body, [], "u64", [()])[0] < 10**9
    body = "mov.u32 %t, %clock_hi; mov.u64 %w, %clock64; shr.u64 %w, %w, 32; cvt.u32.u64 %s, %w; sub.u32 %d, %s, %t;"
    assert compute(body, [], "u32", [()])[0] in (0, 1)


def test_predicate_constants(compute: Compute) -> None:
    for constant, value in ((0, 0), (1, 1), (-1, 1), (2, 1)):
        assert compute(f"mov.pred %d, {constant};", [], "pred", [()]) == [value]


def test_shared_memory_has_a_size(compute: Compute) -> None:
    for name in ("total_smem_size", "dynamic_smem_size"):
        assert compute(f"mov.u32 %d, %{name};", [], "u32", [()]) == [0]
