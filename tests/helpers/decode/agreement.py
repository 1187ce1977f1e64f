"""The rule by which two computations of a model agree, for all references of the decode engine.

Both compute with the same weights, in different precisions and orders, so their logits differ by an error. At a
position where the reference's margin between its first and second token is at most twice that error, either token is
right. All other positions are *decided*: there both must have the same token.

A comparison fails if an error exceeds the bound that the test states, or if greedy outputs diverge at a decided
position. At a decided position, equal argmaxes follow from the error; they are counted nevertheless.

A model with experts computes each position with the experts that its router scores highest. If the last chosen expert
and the first of the others have nearly the same score, rounding may exchange them. Either choice is right, although the
logits then differ by more than an error. Such *close* positions are left out of the worst error.
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
        """Return the logits [tokens, vocabulary] of every position of a prompt."""
        ...

    def greedy(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """Return `count` greedily decoded tokens for each prompt. End tokens do not end the decoding."""
        ...


@dataclass(frozen=True)
class Agreement:
    """The comparison of two computations' logits at the same positions.

    Attributes:
        positions: Number of positions compared.
        differing: Number of positions with different likeliest tokens.
        decided: Number of positions where the reference's margin exceeds twice the position's error.
        decided_differing: Number of decided positions with different likeliest tokens.
        close: Number of positions with a close choice of experts.
        worst_error: The largest difference of two logits at positions that are not close.
        least_decided_margin: The smallest margin of a decided position; infinite if there is none.
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
    """The comparison of greedy outputs.

    Attributes:
        outputs: Number of outputs compared.
        tokens: Total number of tokens in the reference's outputs.
        equal: Number of outputs that are equal.
        undecided: Number of outputs that diverge at an undecided position, or after one.
        wrong: Number of outputs that diverge before any undecided position.
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
    """Return the difference between each position's highest and second highest logit."""
    highest = np.partition(logits, -2, -1)[:, -2:]
    return highest[:, 1] - highest[:, 0]


def errors(reference: Logits, other: Logits) -> Logits:
    """Return the largest difference of two logits at each position."""
    largest: Logits = np.abs(reference - other).max(-1)
    return largest


def log_probabilities(logits: Logits) -> Logits:
    """Return log-probabilities: logits minus the logarithm of the sum of their exponentials."""
    highest = logits.max(-1, keepdims=True)
    shifted = logits - highest
    normal: Logits = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return normal


def compare(reference: Logits, other: Logits, close: npt.NDArray[np.bool_] | None = None) -> Agreement:
    """Compare logits [positions, vocabulary] of the same positions. A NaN counts as an infinite error.

    Args:
        reference: The reference's logits.
        other: The logits that are compared with them.
        close: For each position, whether its choice of experts is close; None if no position is close.
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
        other: The same number of tokens of the other computation.
        reference_margins: The reference's margin at each of its tokens.
        position_errors: The error at each token, where both models were given the reference's previous tokens.
    """
    assert len(reference) == len(other) == len(reference_margins) == len(position_errors)
    differing = [place for place, (ours, theirs) in enumerate(zip(reference, other, strict=True)) if ours != theirs]
    if not differing:
        return GreedyAgreement(1, len(reference), equal=1)
    end = differing[0] + 1
    is_undecided = bool((reference_margins[:end] <= 2 * position_errors[:end]).any())
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
        count: Number of tokens to decode after each prompt.
        are_normalised: Whether to compare log-probabilities, for a scorer that returns only these.
        are_close: Returns which positions are close; None if no position is close.
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
