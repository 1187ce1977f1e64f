"""Changes to the logits of one request's next token: biases, penalties, and a mask of the tokens that may come next.

A guide's state depends only on the prompt and the emitted tokens, so a replay continues with the same choices.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from gpulease.client.decode.row_records import ENTRY, Rows

_GROWTH: Final = 64
"""Number of entries for which a new guide has room."""


class TokenMasks(Protocol):
    """Decides which tokens may come next, by a grammar or by a request's lists (token_filter.py).

    Attributes:
        mask: The mask of the next token, [mask_words] u32.
        is_ready: Whether `mask` is the mask of the next token. It is false while that mask is being computed.
        is_stepwise: Whether the mask depends on the emitted tokens.
    """

    mask: NDArray[np.uint32]
    is_ready: bool
    is_stepwise: bool

    def accept(self, token: int, on_ready: Callable[[], None]) -> None:
        """Process the emitted token, and compute the next mask. `on_ready` is called when it is ready."""


class TokenGuide:
    """The guide of one request.

    Attributes:
        masks: Decides which tokens may come next; None for any.
        emitted: Number of tokens that were accepted.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        repetition: float = 1.0,
        presence: float = 0.0,
        frequency: float = 0.0,
        biases: Iterable[tuple[int, float]] = (),
        min_tokens: int = 0,
        end_tokens: Iterable[int] = (),
        masks: TokenMasks | None = None,
    ) -> None:
        """Begin before any token is emitted.

        Args:
            prompt: The prompt's tokens, to which the repetition penalty also applies.
            repetition: The repetition penalty.
            presence: The presence penalty.
            frequency: The frequency penalty.
            biases: Pairs of a token and the number that is added to its logit.
            min_tokens: Number of tokens that must be emitted before one of `end_tokens`.
            end_tokens: Tokens that end the sequence.
            masks: Decides which tokens may come next.
        """
        self.masks, self.emitted = masks, 0
        self._repetition, self._presence, self._frequency = repetition, presence, frequency
        self._min_tokens, self._ends = min_tokens, tuple(end_tokens)
        self._penalises = (repetition, presence, frequency) != (1.0, 0.0, 0.0)
        self._biases = dict(biases)
        self._entries: Rows = np.zeros(_GROWTH, ENTRY)
        # The index of each token's entry. A token has at most one, because the kernel's lanes write in parallel.
        self._places: dict[int, int] = {}
        self._counts: dict[int, int] = {}
        for token, bias in self._biases.items():
            self._entry(token)["addend"] = bias
        if repetition != 1.0:
            for token in dict.fromkeys(prompt):
                self._entry(token)["divisor"] = repetition
        if min_tokens:
            for token in self._ends:
                self._entry(token)["addend"] = -np.inf

    @property
    def is_stepwise(self) -> bool:
        """Whether the choice of a token depends on the previous token, which must then be known to plan the row."""
        return self._penalises or (self.masks is not None and self.masks.is_stepwise)

    @property
    def is_ready(self) -> bool:
        """Whether the next token can be chosen now."""
        return self.masks is None or self.masks.is_ready

    @property
    def entries(self) -> Rows:
        """ENTRY records for the next token, at most one for each logit."""
        return self._entries[: len(self._places)]

    def accept(self, token: int, on_ready: Callable[[], None]) -> None:
        """Process an emitted token. If the next token can't be chosen yet, `on_ready` is called when it can."""
        self.emitted += 1
        if self._penalises:
            count = self._counts[token] = self._counts.get(token, 0) + 1
            entry = self._entry(token)
            entry["divisor"] = self._repetition
            entry["subtrahend"] = self._presence + self._frequency * count
        if self.emitted == self._min_tokens:
            for end in self._ends:
                self._entry(end)["addend"] = self._biases.get(end, 0.0)
        if self.masks is not None:
            self.masks.accept(token, on_ready)

    def _entry(self, token: int) -> Rows:
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = len(self._places)
            if place == len(self._entries):
                self._entries = np.concatenate([self._entries, np.zeros(place, ENTRY)])
            self._entries[place]["token"], self._entries[place]["divisor"] = token, 1.0
        # A slice is a view of the record, which assignments change.
        return self._entries[place : place + 1]
