"""Lists of tokens that an answer may or may not contain: `allowed_token_ids`, and `bad_words` as token sequences.

The allowed next tokens depend only on the emitted tokens, so a replay continues with the same choices.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from gpulease.client.decode.row_records import mask_words


class TokenFilter:
    """The masks of one request's lists. It implements `TokenMasks`.

    Attributes:
        mask: The mask of the next token, [mask_words] u32.
        is_ready: Always true, because masks are computed at once.
        is_stepwise: Whether the mask depends on the emitted tokens.
    """

    is_ready = True

    def __init__(self, vocabulary: int, allowed: Sequence[int], bad_words: Sequence[tuple[int, ...]]) -> None:
        """Begin before any token is emitted.

        Args:
            vocabulary: Number of the model's tokens. All tokens in the lists are below this number.
            allowed: The tokens that are allowed; () allows all.
            bad_words: Sequences of tokens. The last token of each is not allowed after its other tokens.
        """
        is_allowed = np.full(32 * mask_words(vocabulary), not allowed)
        is_allowed[list(allowed)] = True
        # For the beginning of each sequence (all tokens but the last), the last tokens that would complete one.
        self._lasts: dict[tuple[int, ...], list[int]] = {}
        for *before, last in bad_words:
            if before:
                self._lasts.setdefault(tuple(before), []).append(last)
            else:
                is_allowed[last] = False
        self._lengths = sorted({len(before) for before in self._lasts})
        self._recent: tuple[int, ...] = ()
        self._usual: NDArray[np.uint32] = np.packbits(is_allowed, bitorder="little").view(np.uint32)
        self.mask = self._usual
        self.is_stepwise = bool(self._lasts)

    def accept(self, token: int, on_ready: Callable[[], None]) -> None:
        """Process the emitted token. The next mask is computed at once, so `on_ready` is not called."""
        if not self.is_stepwise:
            return
        self._recent = (*self._recent, token)[-self._lengths[-1] :]
        # If fewer than `length` tokens were emitted, the slice is shorter. Looking up a shorter beginning again does no
        # harm.
        lasts = {last for length in self._lengths for last in self._lasts.get(self._recent[-length:], ())}
        # After most tokens no sequence is about to be completed, so the mask is the usual one.
        self.mask = self._without(lasts) if lasts else self._usual

    def _without(self, tokens: set[int]) -> NDArray[np.uint32]:
        mask, numbers = self._usual.copy(), np.fromiter(tokens, np.uint32, len(tokens))
        # Several tokens may have their bits in the same word.
        np.bitwise_and.at(mask, numbers // 32, ~(np.uint32(1) << numbers % 32))
        return mask
