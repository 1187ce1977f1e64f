"""When two computations of a model agree: the rule for every reference of the decode engine.

Both compute the same weights, in other precisions and orders, so logits differ by an error. Where the reference's
margin between its first and second token is within twice that error, either is right. Elsewhere the two must agree.

What fails a comparison: an error over the bound that the test states, or greedy tokens that part where the reference
was decided. That a decided position's argmax is equal follows from the error by arithmetic: it is counted all the same.

A model with experts computes each position with those that its router scores highest. Where the last chosen one and
the first of the others score nearly alike, rounding may exchange them, and either is right, although the logits differ
by more than an error. Such close positions count everywhere but in the worst error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.floating[Any]]
ClosePositions = Callable[[list[int]], npt.NDArray[np.bool_]]
"""Returns for each position of a prompt whether its choice of experts is close."""


class Scorer(Protocol):
    """A model that scores tokens: the engine, or a reference for it."""

    def logits(self, token_ids: list[int]) -> Logits:
        """Logits [tokens, vocabulary] of every position of a prompt."""
        ...

    def greedy(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """The `count` likeliest next tokens of each prompt, one after another; end tokens end nothing."""
        ...


@dataclass(frozen=True)
class Agreement:
    """How two computations' logits of the same positions compare.

    Attributes:
        positions: Positions compared.
        differing: Those with different likeliest tokens.
        decided: Those where the reference's margin exceeds twice the position's error.
        decided_differing: Decided ones with different likeliest tokens.
        close: Positions whose choice of experts is close.
        worst_error: The largest difference of two logits of the other positions.
        least_decided_margin: The smallest margin of a decided position; infinite if there are none.
    """

    positions: int = 0
    differing: int = 0
    decided: int = 0
    decided_differing: int = 0
    close: int = 0
    worst_error: float = 0.0
    least_decided_margin: float = float("inf")

    def __add__(self, other: "Agreement") -> "Agreement":
        return Agreement(
            self.positions + other.positions,
            self.differing + other.differing,
            self.decided + other.decided,
            self.decided_differing + other.decided_differing,
            self.close + other.close,
            max(self.worst_error, other.worst_error),
            min(self.least_decided_margin, other.least_decided_margin),
        )

    def __str__(self) -> str:
        return (
            f"{self.positions:,} positions, argmax differs at {self.differing}; decided {self.decided:,}, of which "
            f"{self.decided_differing} differ; {self.close} close; worst error of the others {self.worst_error:.2e}"
        )


@dataclass(frozen=True)
class GreedyAgreement:
    """How greedy outputs compare.

    Attributes:
        outputs: Outputs compared.
        tokens: Tokens in each of the reference's outputs, all together.
        equal: Outputs that are wholly equal.
        undecided: Outputs that part at the first position where the reference was undecided, or behind it.
        wrong: Outputs that part where the reference was decided.
    """

    outputs: int = 0
    tokens: int = 0
    equal: int = 0
    undecided: int = 0
    wrong: int = 0

    def __add__(self, other: "GreedyAgreement") -> "GreedyAgreement":
        return GreedyAgreement(
            self.outputs + other.outputs,
            self.tokens + other.tokens,
            self.equal + other.equal,
            self.undecided + other.undecided,
            self.wrong + other.wrong,
        )

    def __str__(self) -> str:
        return (
            f"{self.outputs} greedy outputs of {self.tokens:,} tokens: {self.equal} equal, "
            f"{self.undecided} part where the reference is undecided, {self.wrong} part elsewhere"
        )


def margins(logits: Logits) -> Logits:
    """How far each position's first token is before its second."""
    highest = np.partition(logits, -2, -1)[:, -2:]
    return highest[:, 1] - highest[:, 0]


def errors(reference: Logits, other: Logits) -> Logits:
    """The largest difference of two logits at each position."""
    largest: Logits = np.abs(reference - other).max(-1)
    return largest


def log_probabilities(logits: Logits) -> Logits:
    """Logits minus the logarithm of the sum of their exponentials, for references that return only these."""
    highest = logits.max(-1, keepdims=True)
    shifted = logits - highest
    normal: Logits = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return normal


def compare(reference: Logits, other: Logits, close: npt.NDArray[np.bool_] | None = None) -> Agreement:
    """Compare logits [positions, vocabulary] of the same positions. A NaN is an infinite error and differs.

    Args:
        reference: The reference's logits.
        other: The other's.
        close: For each position whether its choice of experts is close; None: none is.
    """
    assert reference.shape == other.shape, (reference.shape, other.shape)
    assert np.isfinite(reference).all()
    error = np.nan_to_num(errors(reference, other), nan=np.inf, posinf=np.inf)
    close = np.zeros(len(reference), bool) if close is None else close
    differs = reference.argmax(-1) != other.argmax(-1)
    margin = margins(reference)
    decided = margin > 2 * error
    return Agreement(
        len(reference),
        int(differs.sum()),
        int(decided.sum()),
        int((decided & differs).sum()),
        int(close.sum()),
        float(error[~close].max(initial=0.0)),
        float(margin[decided].min(initial=np.inf)),
    )


def compare_greedy(
    reference: Sequence[int], other: Sequence[int], reference_margins: Logits, position_errors: Logits
) -> GreedyAgreement:
    """Compare one greedy output with the reference's.

    Args:
        reference: The reference's tokens.
        other: As many tokens of the other.
        reference_margins: The reference's margin at each of its tokens.
        position_errors: The error measured at each of them, both models given the reference's tokens before it.
    """
    assert len(reference) == len(other) == len(reference_margins) == len(position_errors)
    parts = [place for place, (ours, theirs) in enumerate(zip(reference, other, strict=True)) if ours != theirs]
    if not parts:
        return GreedyAgreement(1, len(reference), equal=1)
    is_undecided = bool((reference_margins[: parts[0] + 1] <= 2 * position_errors[: parts[0] + 1]).any())
    return GreedyAgreement(1, len(reference), undecided=is_undecided, wrong=not is_undecided)


def compare_scorers(
    reference: Scorer,
    other: Scorer,
    prompts: list[list[int]],
    count: int,
    *,
    are_normalised: bool = False,
    are_close: ClosePositions | None = None,
) -> tuple[Agreement, GreedyAgreement]:
    """Compare logits of all prompts with their `count` greedy tokens, and the greedy tokens themselves.

    Args:
        reference: The reference.
        other: The scorer that is compared with it.
        prompts: Tokens of each prompt.
        count: Tokens to decode after each.
        are_normalised: Whether to compare log-probabilities, for a scorer that returns only these.
        are_close: Which positions' choices of experts are close; None: none is.
    """
    logits, greedy = Agreement(), GreedyAgreement()
    outputs = zip(prompts, reference.greedy(prompts, count), other.greedy(prompts, count), strict=True)
    for prompt, tokens, others in outputs:
        path = [*prompt, *tokens][:-1]
        ours, theirs = reference.logits(path), other.logits(path)
        if are_normalised:
            ours, theirs = log_probabilities(ours), log_probabilities(theirs)
        logits += compare(ours, theirs, None if are_close is None else are_close(path))
        last = slice(len(prompt) - 1, None)
        greedy += compare_greedy(tokens, others, margins(ours)[last], errors(ours, theirs)[last])
    return logits, greedy
