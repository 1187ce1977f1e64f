import json
import unicodedata
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from gpulease.client.decode.text.letters import LETTERS
from gpulease.client.decode.text.text_bound import NFC_SHRINKS, most_bytes_per_token

WORD: Final = "Ġthe"
SPACES: Final = "▁▁▁▁"


def byte_level(*steps: Any) -> LibraryTokenizer:
    """GPT-2's kind: every byte, one longer entry, and an added token of 7 bytes."""
    entries = [*LETTERS, "Ġt", "Ġth", WORD]
    merges = [("Ġ", "t"), ("Ġt", "h"), ("Ġth", "e")]
    library = LibraryTokenizer(models.BPE({entry: n for n, entry in enumerate(entries)}, merges))
    library.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return library


def pieces(bytes_known: int = 256) -> LibraryTokenizer:
    """SentencePiece's kind, with tokens of bytes for what it does not know."""
    entries = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(bytes_known)), "▁", "▁▁", SPACES, "a"]
    library = LibraryTokenizer(
        models.BPE(
            {entry: n for n, entry in enumerate(entries)},
            [("▁", "▁"), ("▁▁", "▁▁")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return library


def with_nfc() -> LibraryTokenizer:
    library = byte_level(pre_tokenizers.Digits(individual_digits=True))
    library.normalizer = normalizers.NFC()
    return library


def changed(**parts: Any) -> LibraryTokenizer:
    library = byte_level()
    for name, part in parts.items():
        setattr(library, name, part)
    return library


@pytest.mark.parametrize(
    ("library", "most"),
    [
        (byte_level(), 7),
        (byte_level(pre_tokenizers.Split(Regex(r"\s+"), "isolated")), 7),
        (pieces(), len(SPACES.encode())),
        (with_nfc(), 7 * NFC_SHRINKS),
        (changed(normalizer=normalizers.Replace("abcd", "ab")), 14),
    ],
)
def test_the_bound_is_the_longest_entry_times_what_the_normaliser_shrinks(library: LibraryTokenizer, most: int) -> None:
    assert most_bytes_per_token(library) == most


TEXTS: Final = st.lists(
    st.one_of(st.text(max_size=8), st.sampled_from(["\u1fbe\u0308\u0301", "<|end|>", " the", "    ", "\u212a"])),
    max_size=30,
).map("".join)


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.sampled_from([byte_level, pieces, with_nfc]))
def test_no_text_has_more_bytes_than_its_tokens_stand_for(text: str, make: Any) -> None:
    library = make()
    most = most_bytes_per_token(library)
    assert most is not None
    assert len(text.encode()) <= len(library.encode(text, add_special_tokens=False).ids) * most


@pytest.mark.parametrize(
    ("library", "text"),
    [
        (changed(normalizer=normalizers.Strip()), " " * 900),
        (changed(normalizer=normalizers.StripAccents()), "e" + "\u0301" * 900),
        (changed(normalizer=normalizers.Replace("a", "")), "a" * 900),
        (byte_level(pre_tokenizers.Whitespace()), " " * 900),
        (byte_level(pre_tokenizers.Split(" ", "removed")), " " * 900),
        (pieces(bytes_known=200), "\U0001f600" * 900),
        (changed(model=models.BPE({"a": 0}, [])), "b" * 900),
    ],
)
def test_a_tokenizer_that_drops_text_has_no_bound(library: LibraryTokenizer, text: str) -> None:
    """Each makes no token at all of the text, or one of all of it."""
    assert most_bytes_per_token(library) is None
    assert len(library.encode(text, add_special_tokens=False).ids) <= 3


def test_an_added_token_that_takes_spaces_along_has_no_bound() -> None:
    library = byte_level()
    library.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True, normalized=False)])
    assert len(library.encode(" " * 900 + "<mask>", add_special_tokens=False).ids) == 1
    assert most_bytes_per_token(library) is None


def test_truncation_has_no_bound() -> None:
    library = byte_level()
    library.enable_truncation(3)
    assert most_bytes_per_token(library) is None


def test_an_added_token_behind_the_normaliser_counts_as_it_is_there() -> None:
    library = changed(normalizer=normalizers.Prepend("▁▁▁▁▁▁"))
    library.add_tokens([AddedToken("word", normalized=True)])
    assert most_bytes_per_token(library) == len("▁▁▁▁▁▁word".encode())


def test_nfc_shrinks_no_text_by_more_than_the_factor() -> None:
    """The proof of the module's step 2, on all characters of the Unicode that Python has."""
    decomposed = {
        character: found
        for code in range(0x110000)
        if not 0xD800 <= code < 0xE000 and (found := unicodedata.normalize("NFD", character := chr(code))) != character
    }
    weight: dict[str, int] = {}
    for character, found in decomposed.items():
        if len(found) == 1:
            weight[found] = max(weight.get(found, 0), len(character.encode()))

    def weight_of(text: str) -> int:
        return sum(max(weight.get(part, 0), len(part.encode())) for part in text)

    assert all(len(character.encode()) <= weight_of(found) for character, found in decomposed.items())
    composed = {c: found for c, found in decomposed.items() if unicodedata.normalize("NFC", c) == c}
    for character, found in [*composed.items(), *((part, part) for part in weight)]:
        assert weight_of(found) <= NFC_SHRINKS * len(character.encode())
    shrunk = "\u1fbe\u0308\u0301"
    assert len(shrunk.encode()) == 3.5 * len(unicodedata.normalize("NFC", shrunk).encode())


def test_the_library_says_what_its_steps_are_as_json() -> None:
    """What the bound reads: a library that says it otherwise fails here, and not silently."""
    said = json.loads(normalizers.Sequence([normalizers.NFC(), normalizers.Prepend("a")]).__getstate__())
    assert [step["type"] for step in said["normalizers"]] == ["NFC", "Prepend"]
    said = json.loads(pre_tokenizers.Split(" ", "removed").__getstate__())
    assert (said["type"], said["behavior"]) == ("Split", "Removed")
