"""The maximum number of bytes of a text that one token can stand for. With it, a text that can't fit is refused early.

`most_bytes_per_token` returns M such that a text of B bytes in UTF-8 that the tokenizer cuts into n tokens has
B <= n * M; or None if no such M is known. Each step of the library, in its order, has a bound:

1. Added tokens are cut out of the text. Each stands for the bytes of its own name, unless it absorbs the spaces next to
   it (`lstrip`, `rstrip`): then there is no bound. A token that is matched after the normaliser (`normalized`) stands
   for the bytes of its normalised name at that point, and step 2 applies to it.
2. The normaliser turns each part of b bytes into a part of at least b / S bytes. Prepending only adds bytes, so S is 1.
   Replacing p bytes by c bytes has S = p / c, but at least 1. NFC has S = 4: give each character of full decompositions
   the weight of the longest single character that decomposes to it. Then no character has more bytes than its
   decomposition has weight, and no composed character has fewer than a fourth of that. Unicode's stability rules
   guarantee this for existing characters; a test compares the tables that Python has. For a sequence of normalisers,
   multiply their S. Other normalisers delete or fold text, and have no bound.
3. The pre-tokenizer cuts the text. It replaces bytes by letters, or spaces by marks, which are not shorter. A
   pre-tokenizer that drops text, such as the spaces between words, has no bound.
4. BPE merges letters. An unknown character is dropped, or fused with others into one `unk` of any length. This can't
   happen if every byte is known: as one of GPT-2's letters, or as a token `<0x..>` (`byte_fallback`). Then a token
   stands for the bytes of its entry: its letters, or its characters in UTF-8. Other models, and BPE with prefixes or
   suffixes of words, have no bound.

Post-processors and begin tokens only add tokens. Truncation drops text, so it has no bound.
"""

import json
from typing import Any, Final

import tokenizers
from tokenizers import models

from gpulease.client.decode.text.letters import LETTERS

NFC_SHRINKS: Final = 4
"""Maximum ratio of a text's bytes to those of its NFC: 3.5, for U+1FBE U+0308 U+0301, rounded up."""

_CUTTING: Final = frozenset({"ByteLevel", "Digits", "Metaspace"})
"""Pre-tokenizers that may cut or replace parts of a text, but never drop any."""

_BYTE_TOKENS: Final = tuple(f"<0x{byte:02X}>" for byte in range(256))


def most_bytes_per_token(library: tokenizers.Tokenizer) -> int | None:
    """Return the bound M that the module's docstring defines, 1 or more; None for a tokenizer without a bound."""
    # These are steps 2 to 4 of the module's docstring. If any of them has no bound, the tokenizer has none.
    shrinks = _shrinks(_state(library.normalizer))
    cuts = _steps(_state(library.pre_tokenizer), "pretokenizers")
    longest_entry = _longest_entry(library, is_byte_level=any(step["type"] == "ByteLevel" for step in cuts))
    if shrinks is None or longest_entry is None or library.truncation is not None or not all(map(_drops_nothing, cuts)):
        return None
    longest = longest_entry
    # Step 1: take the longest name of an added token, before or after the normaliser.
    for added in library.get_added_tokens_decoder().values():
        # Such a token absorbs any number of spaces.
        if added.lstrip or added.rstrip:
            return None
        name = str(added.content)
        if added.normalized and library.normalizer is not None:
            longest = max(longest, len(library.normalizer.normalize_str(name).encode()))
        longest = max(longest, len(name.encode()))
    return longest * shrinks


def _state(component: Any) -> dict[str, Any] | None:
    # The library shows a component's configuration only as its pickled state, which is JSON.
    state: dict[str, Any] | None = None if component is None else json.loads(component.__getstate__())
    return state


def _steps(state: dict[str, Any] | None, of_sequence: str) -> list[dict[str, Any]]:
    """Return the steps of a component, with nested sequences flattened."""
    if state is None:
        return []
    if state["type"] != "Sequence":
        return [state]
    return [step for part in state[of_sequence] for step in _steps(part, of_sequence)]


def _shrinks(normalizer: dict[str, Any] | None) -> int | None:
    """Return S of step 2, rounded up; None if there is no bound."""
    shrinks = 1
    for step in _steps(normalizer, "normalizers"):
        kind = step["type"]
        if kind == "NFC":
            shrinks *= NFC_SHRINKS
        # A regular expression could match any number of bytes, so only fixed strings have a bound.
        elif kind == "Replace" and "String" in step["pattern"] and step["content"]:
            shrinks *= -(-len(step["pattern"]["String"].encode()) // len(step["content"].encode()))
        elif kind != "Prepend":
            return None
    return shrinks


def _drops_nothing(cut: dict[str, Any]) -> bool:
    # These two drop the separator if their behaviour is "Removed".
    if cut["type"] in ("Split", "Punctuation"):
        return bool(cut["behavior"] != "Removed")
    return cut["type"] in _CUTTING


def _longest_entry(library: tokenizers.Tokenizer, *, is_byte_level: bool) -> int | None:
    """Return the most bytes that an entry of the vocabulary stands for; None if step 4 has no bound."""
    model = library.model
    if not isinstance(model, models.BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    vocabulary = library.get_vocab(with_added_tokens=False)
    # Each character of an entry stands for one byte.
    if is_byte_level:
        return max(map(len, vocabulary)) if LETTERS.keys() <= vocabulary.keys() else None
    if model.byte_fallback and all(token in vocabulary for token in _BYTE_TOKENS):
        return max(len(entry.encode()) for entry in vocabulary)
    return None
