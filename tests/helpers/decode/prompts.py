"""Prompts for decode tests: pieces of the standard library's help, which the tiny model was trained on."""

import pydoc_data.topics

import numpy as np
from tokenizers import Tokenizer

MAX_CHARACTERS = 240
"""Of a piece: more than `MAX_TOKENS` tokens of any of the models' vocabularies take."""

MIN_TOKENS = 2
MAX_TOKENS = 32


def prompts(tokenizer: Tokenizer, count: int, seed: int = 0) -> list[list[int]]:
    """Tokens of `count` different pieces, each from a random word on, of 2 to 32 tokens."""
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
