"""A model's tokenizer: the library `tokenizers`, with the model's begin token, its chat template, and streams.

The library tokenizes. This module decodes, by the bytes that each token stands for: a stream takes one table lookup per
token, and holds back incomplete characters. The library would decode part of the text again for each token.
"""

import codecs
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, Self

import numpy as np
import tokenizers

from gpulease.client.decode.decode_errors import ModelRejected, RequestRejected
from gpulease.client.decode.library_errors import panics_caught, rejected
from gpulease.client.decode.text.chat_template import ChatTemplate
from gpulease.client.decode.text.letters import LETTERS
from gpulease.client.decode.text.text_bound import most_bytes_per_token
from gpulease.client.texts import quoted

SPACE: Final = "▁"
"""SentencePiece's character for a space."""

PIECES_STEPS: Final = (
    {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
)
"""The steps of the library's decoder for SentencePiece's tokens. `bytes_of` has the same effect."""


@dataclass(frozen=True, slots=True)
class TokenTable:
    """A vocabulary as plain values, which is enough to turn tokens into text.

    Attributes:
        text: The text of a complete tokenizer.json, in UTF-8, from which the library is loaded.
        vocabulary: Number of tokens that texts can contain.
        added: The added tokens, each with its name, and whether it is special.
        pieces: The bytes that the tokens stand for, concatenated.
        ends: The end of each token's bytes in `pieces`, as i32.
        begins_with_space: Whether a space at the beginning of a text is not part of it.
        most_bytes_per_token: `Tokenizer.most_bytes_per_token`.
    """

    text: bytes
    vocabulary: int
    added: Sequence[tuple[int, str, bool]]
    pieces: bytes
    ends: bytes
    begins_with_space: bool
    most_bytes_per_token: int | None


class Tokenizer:
    """A model's tokenizer.

    A tokenizer that was made from a table loads the library when it first tokenizes a text. For a large vocabulary that
    takes a second, in which no other Python code of this process runs.

    Attributes:
        begin_token: The token that every prompt begins with; None if there is none.
        chat_template: Turns a chat into a prompt; None for a model without a chat template.
        vocabulary: Number of tokens that texts can contain. The model may have more.
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer | TokenTable,
        begin_token: int | None,
        chat_template: ChatTemplate | None,
        where: str,
        *,
        chat_begins: bool = True,
    ) -> None:
        """Wrap the library's tokenizer.

        Args:
            library: The library's tokenizer, which this object changes and owns; or its table.
            begin_token: The attribute `begin_token`.
            chat_template: The attribute `chat_template`.
            where: The tokenizer's file, for errors.
            chat_begins: Whether a chat's prompt gets the begin token if the template does not write it.

        Raises ModelRejected if its decoder is neither GPT-2's nor SentencePiece's.
        """
        self.begin_token = begin_token
        self.chat_template = chat_template
        self.chat_begins = chat_begins
        self._where = where
        # The bytes of tokens that have occurred.
        self._bytes: dict[int, bytes] = {}
        self._table: TokenTable | None = None
        self._loaded: tokenizers.Tokenizer | None = None
        if isinstance(library, TokenTable):
            self._table = library
            self.vocabulary = library.vocabulary
            self._added = {token: (name, is_special) for token, name, is_special in library.added}
            self._ends = np.frombuffer(library.ends, np.int32)
            self._begins_with_space = library.begins_with_space
            return
        # The saved state may contain truncation and padding from training, but prompts must not be cut or padded.
        library.no_truncation()
        library.no_padding()
        self._loaded = library
        self.vocabulary = int(library.get_vocab_size(with_added_tokens=True))
        added = library.get_added_tokens_decoder()
        self._added = {token: (str(entry.content), bool(entry.special)) for token, entry in added.items()}
        steps = _decoder_steps(library)
        # Accept only the two decoders that `bytes_of` reproduces.
        kinds = {step["type"] for step in steps}
        pieces = [step for step in steps if step not in PIECES_STEPS]
        if not (kinds == {"ByteLevel"} or (kinds >= {"Replace", "ByteFallback"} and not pieces)):
            shown_steps = quoted(json.dumps(pieces or steps))
            raise ModelRejected(f"{where}: the tokenizer's decoder is not known: {shown_steps}")
        self._is_byte_level = "ByteLevel" in kinds
        # SentencePiece adds a space at the beginning of a text, which decoding must remove.
        self._begins_with_space = "Strip" in kinds

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        """Tokenize a text. The names of special tokens in it become those tokens.

        Args:
            text: The text.
            begins: Whether to put the model's begin token first, if it has one and the text does not begin with it.

        Raises RequestRejected for a text with an unpaired surrogate, which UTF-8 can't encode, and LibraryPanicked if a
        bug stops the library.
        """
        # The library's own error for a lone surrogate names a type of the library's interface.
        try:
            text.encode()
        except UnicodeEncodeError as error:
            reason = f"it has a lone surrogate at {error.start}, which is not a character"
            raise RequestRejected(f"the text can't be cut into tokens: {reason}") from None
        with rejected(RequestRejected, "the text can't be cut into tokens"), panics_caught():
            tokens: list[int] = self.library.encode(text, add_special_tokens=False).ids
        # A text or template that already begins with the token must not get it twice.
        if begins and self.begin_token is not None and tokens[:1] != [self.begin_token]:
            return [self.begin_token, *tokens]
        return tokens

    def decode(self, tokens: Iterable[int], *, has_special: bool = False) -> str:
        """Return the text of tokens, with the names of special ones if `has_special`. Invalid bytes become U+FFFD."""
        names = self.special_tokens if has_special else {}
        parts = (names[token].encode() if token in names else self.bytes_of(token) for token in tokens)
        text = b"".join(parts).decode(errors="replace")
        return text.removeprefix(" ") if self._begins_with_space else text

    def stream(self, shown: Mapping[int, bytes] | None = None) -> "TextStream":
        """Return a stream for a text that continues a prompt, so a space at its beginning is kept.

        `shown` has the bytes of special tokens that have a text in this stream.
        """
        if not shown:
            return TextStream(self.bytes_of)
        return TextStream(lambda token: shown.get(token) or self.bytes_of(token))

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that a token stands for; b"" for a special token and for one outside `vocabulary`."""
        cached = self._bytes.get(token)
        if cached is None:
            cached = self._bytes[token] = self._find_bytes(token)
        return cached

    @property
    def special_tokens(self) -> dict[int, str]:
        """The names of special tokens, which have no text, by token."""
        return {token: name for token, (name, is_special) in self._added.items() if is_special}

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Return the tokens of a chat's prompt.

        Args:
            messages: The chat in order; each message has `role` and `content`.
            variables: Further variables of the template, such as `enable_thinking`.

        Raises RequestRejected for a model without a chat template, and for messages that the template refuses.
        """
        return self.encode(self.render_chat(messages, variables), begins=self.chat_begins)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, continues: bool = False
    ) -> str:
        """Return a chat's prompt as text, by `ChatTemplate.render`. Raises the errors of `encode_chat`."""
        if self.chat_template is None:
            raise RequestRejected("the model has no chat template", "Send a completion request with the prompt as text")
        return self.chat_template.render(messages, variables, continues=continues)

    @property
    def most_bytes_per_token(self) -> int | None:
        """Maximum number of bytes of a text that one token can stand for (text_bound.py); None if there is no limit."""
        return most_bytes_per_token(self.library) if self._table is None else self._table.most_bytes_per_token

    @property
    def library(self) -> tokenizers.Tokenizer:
        """The library's tokenizer. Raises ModelRejected if it must be loaded and can't be."""
        if self._loaded is None:
            assert self._table is not None
            self._loaded = library_tokenizer(self._table.text.decode(), self._where)
        return self._loaded

    def table(self) -> TokenTable:
        """Return the tokenizer's table. If there is none, build it, which takes seconds for a large vocabulary."""
        if self._table is not None:
            return self._table
        pieces = [self._find_bytes(token) for token in range(self.vocabulary)]
        return TokenTable(
            self.library.to_str().encode(),
            self.vocabulary,
            [(token, name, is_special) for token, (name, is_special) in self._added.items()],
            b"".join(pieces),
            np.fromiter(accumulate(map(len, pieces)), np.int32, len(pieces)).tobytes(),
            self._begins_with_space,
            self.most_bytes_per_token,
        )

    def values(self) -> list[Any]:
        """Return the tokenizer as plain values, for `of_values` in another process."""
        template = None if self.chat_template is None else self.chat_template.arguments
        text = self.library.to_str().encode() if self._table is None else self._table.text
        return [text, self.begin_token, template, self._where, self.chat_begins]

    @classmethod
    def of_values(cls, values: Sequence[Any], table: TokenTable | None = None) -> Self:
        """Return the tokenizer that the result of `values` describes, built from `table` if given.

        Raises ModelRejected.
        """
        text, begin_token, template, where, chat_begins = values
        chat_template = None if template is None else ChatTemplate(*template)
        source = library_tokenizer(text.decode(), where) if table is None else table
        return cls(source, begin_token, chat_template, where, chat_begins=chat_begins)

    def _find_bytes(self, token: int) -> bytes:
        # Special tokens have no text; other added tokens stand for their names.
        if token in self._added:
            name, is_special = self._added[token]
            return b"" if is_special else name.encode()
        if not 0 <= token < self.vocabulary:
            return b""
        if self._table is not None:
            begin = int(self._ends[token - 1]) if token else 0
            return self._table.pieces[begin : self._ends[token]]
        piece = self.library.id_to_token(token) or ""
        # In GPT-2's kind of vocabulary each letter is a byte. An entry with other characters stands for itself.
        if self._is_byte_level:
            return bytes(LETTERS[letter] for letter in piece) if LETTERS.keys() >= set(piece) else piece.encode()
        # In SentencePiece's kind <0x41> is a single byte, and anything else is text in which ▁ is a space.
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return piece.replace(SPACE, " ").encode()


class TextStream:
    """A text that grows token by token. It returns complete characters, and holds back an incomplete one."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        """Begin a text. `bytes_of` returns the bytes that a token stands for."""
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """Add a token, and return the characters that are complete now and were not returned before."""
        return self._decoder.decode(self._bytes_of(token))

    def end(self) -> str:
        """End the text, and return the rest: U+FFFD for an incomplete character, otherwise ""."""
        return self._decoder.decode(b"", final=True)


def library_tokenizer(text: str, where: str) -> tokenizers.Tokenizer:
    """Load a tokenizer from the text of a tokenizer.json. Raises ModelRejected."""
    with rejected(ModelRejected, f"{where}: not a valid tokenizer"):
        return tokenizers.Tokenizer.from_str(text)


def _decoder_steps(library: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """Return the steps of the library's decoder, with a sequence flattened."""
    if library.decoder is None:
        return []
    decoder = json.loads(library.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    return steps
