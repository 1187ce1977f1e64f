"""A filter's masks against the definition of its lists, for any tokens."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpulease.client.decode.token_filter import TokenFilter

VOCABULARY = 70
TOKEN = st.integers(0, VOCABULARY - 1) | st.integers(0, 2)
"""Few tokens in most places, so that sequences occur."""

WORDS = st.lists(st.lists(TOKEN, min_size=1, max_size=4).map(tuple), max_size=8)


def never() -> None:
    raise AssertionError("a filter's mask is there at once")


@given(st.lists(TOKEN, max_size=6), WORDS, st.lists(st.integers(0, 2), max_size=12))
def test_the_last_token_of_a_word_is_not_allowed_behind_its_others(
    allowed: list[int], words: list[tuple[int, ...]], emitted: list[int]
) -> None:
    masks = TokenFilter(VOCABULARY, allowed, words)
    assert masks.is_stepwise is any(len(word) > 1 for word in words)
    for count in range(len(emitted) + 1):
        if count:
            masks.accept(emitted[count - 1], never)
        found = np.unpackbits(masks.mask.view(np.uint8), bitorder="little")[:VOCABULARY]
        for token in range(VOCABULARY):
            text = (*emitted[:count], token)
            is_bad = any(text[-len(word) :] == word for word in words)
            assert bool(found[token]) is ((not allowed or token in allowed) and not is_bad)
