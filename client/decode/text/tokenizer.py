"""A model's tokenizer: the `tokenizers` library's, with the model's begin token, its chat template and streams.

The library tokenizes. Tokens become text here, by the bytes that each stands for: a stream then costs one table look-up
a token, and holds back incomplete characters. The library would decode a part of the text again for every token.
"""

import codecs
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Self

import tokenizers

from gpulease.client.decode.checked_file import rejected
from gpulease.client.decode.decode_errors import ModelRejected, RequestRejected
from gpulease.client.decode.text.chat_template import ChatTemplate
from gpulease.client.decode.text.letters import LETTERS
from gpulease.client.decode.text.text_bound import most_bytes_per_token
from gpulease.client.texts import quoted

SPACE: Final = "▁"
"""SentencePiece's mark of a space."""

PIECES_STEPS: Final = (
    {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
)
"""What the library does to put SentencePiece's tokens together; here it is done by bytes."""


class Tokenizer:
    """A model's tokenizer.

    Attributes:
        begin_token: The token that a prompt begins with; None if it begins without one.
        chat_template: How a chat becomes a prompt; None for a model that is none for chats.
        vocabulary: Number of tokens that texts can have; the model may have more.
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        begin_token: int | None,
        chat_template: ChatTemplate | None,
        where: str,
        *,
        chat_begins: bool = True,
    ) -> None:
        """Take the library's tokenizer.

        Args:
            library: The library's.
            begin_token: The attribute.
            chat_template: The attribute.
            where: The file that it is of, for errors.
            chat_begins: Whether a chat's prompt begins with the begin token where the template does not write it.

        Raises ModelRejected where its tokens are neither GPT-2's nor SentencePiece's.
        """
        # What training cut and filled its texts to may be saved with the library's state.
        library.no_truncation()
        library.no_padding()
        self.begin_token = begin_token
        self.chat_template = chat_template
        self.chat_begins = chat_begins
        self.vocabulary = int(library.get_vocab_size(with_added_tokens=True))
        self._library, self._where = library, where
        self._added = library.get_added_tokens_decoder()
        steps = _decoder_steps(library)
        kinds = {step["type"] for step in steps}
        pieces = [step for step in steps if step not in PIECES_STEPS]
        if not (kinds == {"ByteLevel"} or (kinds >= {"Replace", "ByteFallback"} and not pieces)):
            shown_steps = quoted(json.dumps(pieces or steps))
            raise ModelRejected(f"{where}: the tokenizer's decoder is not known: {shown_steps}")
        self._is_byte_level = "ByteLevel" in kinds
        # SentencePiece's texts begin with a space that is not theirs.
        self._begins_with_space = "Strip" in kinds
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        """Cut a text into tokens. The names of special tokens in it become those tokens.

        Args:
            text: The text.
            begins: Put the model's begin token before it, where it has one and the text does not name it.

        Raises RequestRejected for a text that is not UTF-8: one with half of a surrogate pair.
        """
        with rejected(RequestRejected, "the text can't be cut into tokens"):
            tokens: list[int] = self._library.encode(text, add_special_tokens=False).ids
        if begins and self.begin_token is not None and tokens[:1] != [self.begin_token]:
            return [self.begin_token, *tokens]
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        """Put the tokens of a whole text together, without the special ones. Broken bytes become U+FFFD."""
        text = b"".join(map(self.bytes_of, tokens)).decode(errors="replace")
        return text.removeprefix(" ") if self._begins_with_space else text

    def stream(self) -> "TextStream":
        """Begin a text that grows by tokens, after a prompt: a space at its beginning belongs to it."""
        return TextStream(self.bytes_of)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token stands for; b"" for a special one and for one that texts don't have."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._find_bytes(token)
        return known

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Cut a chat into the tokens of a prompt.

        Args:
            messages: Each with `role` and `content`, the first one first.
            variables: What the template takes besides, such as `enable_thinking`.

        Raises RequestRejected for a model without a chat template, and for messages that it does not take.
        """
        return self.encode(self.render_chat(messages, variables), begins=self.chat_begins)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Put a chat into the model's template. Raises as `encode_chat` does."""
        if self.chat_template is None:
            raise RequestRejected("the model has no chat template", "Send the prompt as a text, for a completion")
        return self.chat_template.render(messages, **variables)

    @property
    def most_bytes_per_token(self) -> int | None:
        """How many bytes of a text one token can stand for, at most (text_bound.py); None if nothing bounds that."""
        return most_bytes_per_token(self._library)

    def values(self) -> list[Any]:
        """Return all of it as plain values, for `of_values` in another process."""
        template = None if self.chat_template is None else self.chat_template.arguments
        return [self._library.to_str(), self.begin_token, template, self._where, self.chat_begins]

    @classmethod
    def of_values(cls, values: Sequence[Any]) -> Self:
        """Make the tokenizer of which `values` came. Raises ModelRejected."""
        library, begin_token, template, where, chat_begins = values
        chat_template = None if template is None else ChatTemplate(*template)
        return cls(library_tokenizer(library, where), begin_token, chat_template, where, chat_begins=chat_begins)

    def _find_bytes(self, token: int) -> bytes:
        if token in self._added:
            added = self._added[token]
            return b"" if added.special else str(added.content).encode()
        if not 0 <= token < self.vocabulary:
            return b""
        piece = self._library.id_to_token(token) or ""
        if self._is_byte_level:
            return bytes(LETTERS[letter] for letter in piece) if LETTERS.keys() >= set(piece) else piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return piece.replace(SPACE, " ").encode()


class TextStream:
    """A text that grows by tokens: gives what is certain, and holds back a character that is not whole yet."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        """Args: bytes_of: Gives the bytes that a token stands for."""
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """Add a token, and return the text that is certain by now and was not given before; "" for none."""
        return self._decoder.decode(self._bytes_of(token))

    def end(self) -> str:
        """Return the rest: U+FFFD for an incomplete character, otherwise ""."""
        return self._decoder.decode(b"", final=True)


def library_tokenizer(text: str, where: str) -> tokenizers.Tokenizer:
    """Make a tokenizer of a tokenizer.json's text. Raises ModelRejected."""
    with rejected(ModelRejected, f"{where}: not a valid tokenizer"):
        return tokenizers.Tokenizer.from_str(text)


def _decoder_steps(library: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """What the library does to put tokens together."""
    if library.decoder is None:
        return []
    said = json.loads(library.decoder.__getstate__())
    steps: list[dict[str, Any]] = said.get("decoders", [said])
    return steps
