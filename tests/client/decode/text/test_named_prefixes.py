"""The tokens of named prefixes are those with which prompts begin."""

import pytest

from gpulease.client.decode import TINY_MODEL, open_model
from gpulease.client.decode.decode_errors import ModelRejected
from gpulease.client.decode.decode_requests import SharedPrefix
from gpulease.client.decode.text.named_prefixes import NamedPrefix, shared_prefixes
from gpulease.client.decode.text.tokenizer import Tokenizer

TEXT = "You answer questions about the documentation of a programming language."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = open_model(TINY_MODEL).tokenizer()
    assert isinstance(found, Tokenizer)
    return found


def test_texts_and_tokens_are_read_as_prompts_are(tokenizer: Tokenizer) -> None:
    named = [NamedPrefix("a", text=TEXT), NamedPrefix("b", token_ids=tuple(range(20)))]
    found = shared_prefixes(named, tokenizer, 256)
    assert found == (SharedPrefix("a", tuple(tokenizer.encode(TEXT))), SharedPrefix("b", tuple(range(20))))


def test_chats_with_a_system_message_begin_with_its_prefix(tokenizer: Tokenizer) -> None:
    (prefix,) = shared_prefixes([NamedPrefix("a", system=TEXT)], tokenizer, 256)
    system = {"role": "system", "content": TEXT}
    for text in ("What is it?", "Hello", "0", "a\nb"):
        tokens = tokenizer.encode_chat([system, {"role": "user", "content": text}])
        # The last token may be the space before the user's message, or a part of its first word.
        assert tuple(tokens[: len(prefix.token_ids) - 1]) == prefix.token_ids[:-1]
    assert TEXT in tokenizer.decode(prefix.token_ids)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (NamedPrefix("short", text="a"), "prefix short must have at least 16 tokens, not 1"),
        (NamedPrefix("long", text=TEXT * 100), "prefix long: .*the model's context"),
        (NamedPrefix("odd", text=TEXT + "\ud800"), "prefix odd: the text can't be cut into tokens"),
    ],
)
def test_a_prefix_that_can_t_be_read_is_refused_by_name(tokenizer: Tokenizer, named: NamedPrefix, said: str) -> None:
    with pytest.raises(ModelRejected, match=said):
        shared_prefixes([named], tokenizer, 256)
