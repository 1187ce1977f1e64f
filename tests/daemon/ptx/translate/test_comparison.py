from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.comparisons import numbers, turning
from helpers.drawn_rows import drawn_rows, whole_numbers

pytestmark = pytest.mark.exhaustive

Rows = Sequence[tuple[int, ...]]
Compute = Callable[[str, Sequence[str], str, Rows], list[int]]
ComputeAll = Callable[..., dict[str, list[int]]]

INTEGERS = [f"{letter}{bits}" for letter in "bsu" for bits in (16, 32, 64)]
SETTINGS = settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.mark.parametrize("kind", [*INTEGERS, "f32", "f64"])
@SETTINGS
@given(data=st.data())
def test_setp_orders_as_the_type_does(compute_all: ComputeAll, data: st.DataObject, kind: str) -> None:
    """Every comparison, alone and joined with a predicate; the second result is that of the opposite."""
    rows = data.draw(drawn_rows(numbers(kind), numbers(kind), whole_numbers(0, 1)))
    wanted: dict[str, list[bool]] = {}
    for comparison, (destination, opposite, negated) in turning(kind, (("%d", 0, 0), ("%d|%y", 0, 1), ("%x|%d", 1, 0))):
        with_this = f", {'!' * negated}%c" if comparison.join else ""
        wanted[f"setp{comparison.modifiers}.{kind} {destination}, %a, %b{with_this};"] = [
            comparison.joined(comparison.holds(left, right) != opposite, c ^ negated) for left, right, c in rows
        ]
    assert compute_all(wanted, [kind, kind, "pred"], "pred", rows) == wanted


def test_setp_with_ftz_takes_subnormals_for_zero(compute: Compute) -> None:
    rows = [(1, 0), (0x80000001, 0), (0x00800000, 0)]
    assert compute("setp.eq.ftz.f32 %d, %a, %b;", ["f32", "f32"], "pred", rows) == [1, 1, 0]


@pytest.mark.parametrize("kind", [*INTEGERS, "f32", "f64"])
def test_selp_takes_the_first_if_the_predicate_holds(compute: Compute, kind: str) -> None:
    assert compute(f"selp.{kind} %d, %a, %b, %c;", [kind, kind, "pred"], kind, [(7, 9, 1), (7, 9, 0)]) == [7, 9]


def test_guards_of_both_senses(compute: Compute) -> None:
    body = "mov.u32 %d, 1; @%c mov.u32 %d, %a; @!%c add.u32 %d, %b, %d;"
    assert compute(body, ["u32", "u32", "pred"], "u32", [(5, 8, 1), (5, 8, 0)]) == [5, 9]
