"""The rule by which two computations agree: what it counts, and what it rejects."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from helpers.decode.agreement import (
    Agreement,
    GreedyAgreement,
    compare,
    compare_greedy,
    compare_scorers,
    log_probabilities,
    margins,
)

Logits = npt.NDArray[np.floating[Any]]


def rows(*logits: list[float]) -> Logits:
    return np.array(logits)


LOGITS = arrays.arrays(np.float64, (3, 5), elements=st.floats(-8, 8))


def test_a_margin_is_between_the_first_and_the_second() -> None:
    assert margins(rows([1.0, 7.0, 4.0], [2.0, 2.0, 0.0])).tolist() == [3.0, 0.0]


def test_equal_logits_agree_everywhere() -> None:
    logits = rows([1.0, 3.0], [5.0, 4.0])
    assert compare(logits, logits) == Agreement(2, 0, 2, 0, 0, 0.0, 1.0)


def test_a_position_within_the_error_is_undecided() -> None:
    found = compare(rows([1.0, 1.25]), rows([1.25, 1.0]))
    assert (found.differing, found.decided, found.worst_error) == (1, 0, 0.25)


def test_a_margin_of_twice_the_error_is_undecided() -> None:
    assert compare(rows([1.0, 2.0]), rows([1.5, 1.5])).decided == 0


def test_a_nan_is_no_agreement() -> None:
    found = compare(rows([1.0, 2.0]), rows([np.nan, 2.0]))
    assert (found.decided, found.worst_error) == (0, np.inf)


@settings(max_examples=40)
@given(LOGITS, LOGITS)
def test_decided_positions_never_differ(reference: Logits, other: Logits) -> None:
    assert compare(reference, other).decided_differing == 0


@settings(max_examples=40)
@given(LOGITS, LOGITS)
def test_positions_add_up(reference: Logits, other: Logits) -> None:
    parts = [compare(reference[place : place + 1], other[place : place + 1]) for place in range(3)]
    assert sum(parts, Agreement()) == compare(reference, other)


@settings(max_examples=40)
@given(LOGITS, st.floats(-5, 5))
def test_log_probabilities_forget_a_constant(logits: Logits, constant: float) -> None:
    np.testing.assert_allclose(log_probabilities(logits + constant), log_probabilities(logits), atol=1e-12)
    np.testing.assert_allclose(np.exp(log_probabilities(logits)).sum(-1), 1)


@pytest.mark.parametrize(
    ("other", "found"),
    [
        ([4, 5, 6], GreedyAgreement(1, 3, equal=1)),
        ([4, 5, 9], GreedyAgreement(1, 3, undecided=1)),
        ([4, 9, 6], GreedyAgreement(1, 3, undecided=1)),
        ([9, 5, 6], GreedyAgreement(1, 3, wrong=1)),
    ],
    ids=["equal", "behind it", "at it", "before it"],
)
def test_outputs_may_part_from_the_first_undecided_token_on(other: list[int], found: GreedyAgreement) -> None:
    assert compare_greedy([4, 5, 6], other, np.array([1.0, 0.1, 1.0]), np.array([0.1, 0.1, 0.1])) == found


class _Chain:
    """A model that emits the last token plus one, except for a wrong token after a given one."""

    def __init__(self, wrong_behind: int | None = None, error: float = 0.0) -> None:
        self._wrong_behind = wrong_behind
        self._error = error

    def logits(self, token_ids: list[int]) -> Logits:
        return np.eye(10)[[token + 1 for token in token_ids]] + self._error

    def greedy(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        outputs = []
        for prompt in prompts:
            tokens = list(prompt)
            for _ in range(count):
                tokens.append(0 if tokens[-1] == self._wrong_behind else tokens[-1] + 1)
            outputs.append(tokens[len(prompt) :])
        return outputs


def test_scorers_that_agree() -> None:
    logits, greedy = compare_scorers(_Chain(), _Chain(error=0.25), [[1], [2, 3]], 4)
    assert logits == Agreement(9, 0, 9, 0, 0, 0.25, 1.0)
    assert greedy == GreedyAgreement(2, 8, equal=2)


def test_an_error_where_experts_may_be_exchanged_is_not_the_worst() -> None:
    reference = np.eye(3)
    other = reference + np.array([[0.1], [5.0], [0.2]])
    agreement = compare(reference, other, np.array([False, True, False]))
    assert (agreement.close, agreement.decided) == (1, 2)
    assert abs(agreement.worst_error - 0.2) < 1e-9


def test_scorers_that_differ_by_a_constant_agree_once_normalised() -> None:
    logits, _ = compare_scorers(_Chain(), _Chain(error=100.0), [[1]], 4, are_normalised=True)
    assert logits.worst_error < 1e-12


def test_a_decode_that_parts_from_its_own_prefill_is_wrong() -> None:
    _, greedy = compare_scorers(_Chain(), _Chain(wrong_behind=4), [[1], [5]], 4)
    assert greedy == GreedyAgreement(2, 8, equal=1, wrong=1)
