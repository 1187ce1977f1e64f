"""Prompts for decode tests: pieces of the standard library's help, with which the tiny model was trained."""

import pydoc_data.topics

import numpy as np
from tokenizers import Tokenizer

MAX_CHARACTERS = 240
"""Maximum length of a piece. It has more than `MAX_TOKENS` tokens with any of the models' vocabularies."""

MIN_TOKENS = 2
MAX_TOKENS = 32


def prompts(tokenizer: Tokenizer, count: int, seed: int = 0) -> list[list[int]]:
    """Return the tokens of `count` different pieces. Each begins at a random word, and has 2 to 32 tokens."""
    text = "\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    random = np.random.default_rng(seed)
    pieces: list[list[int]] = []
    while len(pieces) < count:
        word = text.index(" ", random.integers(0, len(text) - 2 * MAX_CHARACTERS)) + 1
        tokens = tokenizer.encode(text[word : word + MAX_CHARACTERS], add_special_tokens=False).ids
        piece = tokens[: random.integers(MIN_TOKENS, MAX_TOKENS + 1)]
        if piece not in pieces:
            pieces.append(piece)
    return pieces
