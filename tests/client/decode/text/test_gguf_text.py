from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease.client.decode.checked_file import Members
from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.decode.text.gguf_text import gguf_tokenizer
from gpulease.client.decode.text.letters import LETTERS
from gpulease.client.decode.text.tokenizer import Tokenizer

AT: Final = "tokenizer.ggml."
WORDS: Final = ["Ġa", "12", "123", "1234", "ab", "Ġabc"]
MERGES: Final = ["Ġ a", "1 2", "12 3", "123 4", "a b"]
PIECES: Final = ["▁a", "ab", "▁ab", "b", "a", "▁"]


def byte_pairs(kind: str, **says: Any) -> Tokenizer:
    tokens = [*LETTERS, *WORDS, "<end>", "äh"]
    kinds = [1] * (len(tokens) - 2) + [3, 4]
    said = {f"{AT}model": "gpt2", f"{AT}pre": kind, f"{AT}tokens": tokens, f"{AT}token_type": kinds}
    return made(said | {f"{AT}merges": MERGES} | {f"{AT}{key}": value for key, value in says.items()})


def pieces(**says: Any) -> Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    scores = [0.0] * 259 + [-1.0, -2.0, -3.0, -10.0, -11.0, -12.0]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(PIECES)
    said = {f"{AT}model": "llama", f"{AT}tokens": tokens, f"{AT}scores": scores, f"{AT}token_type": kinds}
    return made(said | {f"{AT}{key}": value for key, value in says.items()})


def made(said: dict[str, Any], begin_token: int | None = None) -> Tokenizer:
    return gguf_tokenizer(Members(said, "a.gguf"), begin_token)


def cut(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.bytes_of(token).decode(errors="replace") for token in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("gpt-2", ["1234", " a", "ab"]),
        ("smollm", ["1", "2", "3", "4", " a", "ab"]),
        ("llama-bpe", ["123", "4", " a", "ab"]),
        ("qwen2", ["1", "2", "3", "4", " a", "ab"]),
    ],
)
def test_each_kind_cuts_words_as_its_authors_did(kind: str, words: list[str]) -> None:
    assert cut(byte_pairs(kind), "1234 aab") == words


def test_llama_3_takes_a_word_that_is_a_token_as_it_is() -> None:
    """The merges alone do not make this one."""
    assert cut(byte_pairs("llama-bpe"), " abc") == [" abc"]
    assert cut(byte_pairs("gpt-2"), " abc") == [" a", "b", "c"]


def test_qwen_2_composes_accents() -> None:
    assert byte_pairs("qwen2").encode("e\u0301") == byte_pairs("qwen2").encode("é")
    assert byte_pairs("llama-bpe").encode("e\u0301") != byte_pairs("llama-bpe").encode("é")


def test_control_tokens_are_found_in_texts_and_are_no_text() -> None:
    tokenizer = byte_pairs("gpt-2")
    assert len(tokenizer.encode("ab<end>äh")) == 3
    assert tokenizer.decode(tokenizer.encode("ab<end>äh")) == "abäh"


OF_PIECES: Final = pieces()


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(codec="utf-8")))
def test_a_text_of_pieces_comes_back(text: str) -> None:
    text = text.replace("▁", "_").replace("<", "")
    assert OF_PIECES.decode(OF_PIECES.encode(text)) == text


def test_pieces_merge_in_the_order_of_their_scores() -> None:
    assert cut(pieces(), "ab") == [" ab"]
    assert cut(pieces(scores=[0.0] * 259 + [-2.0, -1.0, -3.0, -10.0, -11.0, -12.0]), "aab") == [" a", "ab"]


def test_a_space_before_a_text_is_put_where_the_file_wants_it() -> None:
    assert cut(pieces(add_space_prefix=False), "ab") == ["ab"]
    assert pieces(add_space_prefix=False).decode(pieces(add_space_prefix=False).encode(" ab")) == " ab"


def test_a_character_that_is_no_piece_is_its_bytes() -> None:
    tokenizer = pieces()
    assert tokenizer.encode("é")[1:] == [3 + byte for byte in "é".encode()]
    stream = tokenizer.stream()
    assert [stream.add(token) for token in tokenizer.encode("aé")] == [" a", "", "é"]


def test_a_control_token_is_known_by_its_text_whatever_its_type() -> None:
    tokenizer = byte_pairs("gpt-2", tokens=[*LETTERS, *WORDS, "<|im_end|>"], token_type=[1] * (len(LETTERS) + 7))
    assert len(tokenizer.encode("ab<|im_end|>")) == 2
    assert tokenizer.decode(tokenizer.encode("ab<|im_end|>")) == "ab"


def test_tokens_without_a_text_are_told_apart() -> None:
    assert byte_pairs("gpt-2", tokens=[*LETTERS, *WORDS, "", ""]).vocabulary == len(LETTERS) + len(WORDS) + 2


def test_a_chat_template_knows_the_file_s_tokens() -> None:
    said = {
        f"{AT}model": "gpt2",
        f"{AT}pre": "gpt-2",
        f"{AT}tokens": list(LETTERS),
        f"{AT}merges": ["a b"],
        f"{AT}bos_token_id": list(LETTERS).index("a"),
        f"{AT}eos_token_id": 1 << 40,
        "tokenizer.chat_template": "{{ bos_token }}|{{ eos_token }}|",
    }
    said[f"{AT}tokens"] = [*LETTERS, "ab"]
    template = made(said).chat_template
    assert template is not None
    assert template.render([]) == "a||"


@pytest.mark.parametrize(
    ("says", "sentence"),
    [
        ({"model": "bert"}, "model must be one of gpt2, llama, not 'bert'"),
        ({"pre": "viking"}, "pre must be one of gpt-2, smollm, .*, not 'viking'"),
        ({"pre": None}, "pre is missing"),
        ({"tokens": ["a", "b", "a"]}, "tokens has 'a' twice"),
        ({"tokens": []}, "tokens must be a list of texts"),
        ({"tokens": [1, 2]}, "tokens must be a list of texts"),
        ({"merges": ["ab"]}, "merges has 'ab', which must be two texts"),
        ({"merges": ["x yz"]}, "not a valid tokenizer: .*yz"),
        ({"model": "llama"}, "scores are 0, tokens"),
    ],
)
def test_what_makes_no_tokenizer_is_refused(says: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelRejected, match=f"a.gguf: .*{sentence}"):
        byte_pairs("gpt-2", **says)
