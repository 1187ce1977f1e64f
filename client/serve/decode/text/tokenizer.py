"""A model's tokenizer: the `tokenizers` library's, with the model's begin token, its chat template and streams."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import tokenizers

from gpulease.client.serve.decode.checked_file import rejected
from gpulease.client.serve.decode.decode_errors import ModelRejected, RequestRejected
from gpulease.client.serve.decode.text.chat_template import ChatTemplate

INCOMPLETE: Final = "\N{REPLACEMENT CHARACTER}"
MAX_INCOMPLETE: Final = 3
"""Most replacement characters at a text's end that may become another one: UTF-8 has at most 4 bytes a character, and
some decoders put a replacement for each that waits for the last. More than these stay what they are."""

KEPT_TOKENS: Final = 16
"""Tokens of a stream that are decoded again with the next one: what a token's text is can depend on a few before it."""

TURN_TOKENS: Final = 256
"""Tokens after which a stream forgets those before the last `KEPT_TOKENS`, so that a long text takes no longer."""


class Tokenizer:
    """A model's tokenizer.

    Attributes:
        begin_token: The token that a prompt begins with; None if it begins without one.
        chat_template: How a chat becomes a prompt; None for a model that is none for chats.
    """

    def __init__(
        self, library: tokenizers.Tokenizer, begin_token: int | None, chat_template: ChatTemplate | None
    ) -> None:
        """Args: library: The library's tokenizer."""
        self._library = library
        self.begin_token = begin_token
        self.chat_template = chat_template

    @property
    def vocabulary(self) -> int:
        """Number of tokens that texts can have; the model may have more."""
        return int(self._library.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        """Cut a text into tokens. The names of special tokens in it become those tokens.

        Args:
            text: The text.
            begins: Put the model's begin token before it, where it has one.

        Raises RequestRejected for a text that is no UTF-8: one with half of a surrogate pair.
        """
        with rejected(RequestRejected, "the text can't be cut into tokens"):
            tokens: list[int] = self._library.encode(text, add_special_tokens=False).ids
        if begins and self.begin_token is not None and tokens[:1] != [self.begin_token]:
            return [self.begin_token, *tokens]
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Put tokens together, without the special ones. Raises RequestRejected for what is no token at all."""
        with rejected(RequestRejected, "the tokens are no text"):
            text: str = self._library.decode(list(tokens), skip_special_tokens=True)
        return text

    def stream(self) -> "TextStream":
        """Begin a text that grows by tokens."""
        return TextStream(self.decode)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Cut a chat into the tokens of a prompt.

        Args:
            messages: Each with `role` and `content`, the first one first.
            variables: What the template takes besides, such as `enable_thinking`.

        Raises RequestRejected for a model without a chat template, and for messages that it does not take.
        """
        if self.chat_template is None:
            raise RequestRejected("the model has no chat template", "Use completions: send the prompt as a text")
        # Most templates write the begin token's name themselves.
        return self.encode(self.chat_template.render(messages, **variables))


class TextStream:
    """A text that grows by tokens: gives what is certain, and holds back a character that is not whole yet."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """Args: decode: Puts tokens together."""
        self._decode = decode
        self._tokens: list[int] = []
        self._given = 0

    def add(self, token: int) -> str:
        """Add a token. The text that is certain by now and was not given before; "" for none."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        whole = text.rstrip(INCOMPLETE)
        end = max(len(whole), len(text) - MAX_INCOMPLETE)
        new, self._given = text[self._given : end], max(self._given, end)
        if len(self._tokens) >= TURN_TOKENS and end == len(text):
            del self._tokens[:-KEPT_TOKENS]
            self._given = len(self._decode(self._tokens))
        return new

    def end(self) -> str:
        """Give the rest: a character whose last bytes never came, as replacement characters."""
        text = self._decode(self._tokens)
        new, self._given = text[self._given :], max(self._given, len(text))
        return new


def library_tokenizer(text: str, where: str) -> tokenizers.Tokenizer:
    """Make a tokenizer of a tokenizer.json's text. Raises ModelRejected."""
    with rejected(ModelRejected, f"{where}: no tokenizer"):
        return tokenizers.Tokenizer.from_str(text)
