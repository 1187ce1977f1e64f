"""Turns a tenant's texts, chats and token lists into tokens. Refuses a prompt that can't fit the context early.

This runs in separate processes (text_processes.py), because a tokenizer may hold the interpreter's lock for seconds,
and a chat template is a program.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpulease.client.decode.decode_errors import AdmissionReason, AdmissionRefused, RequestRejected
from gpulease.client.decode.text.tokenizer import Tokenizer

MAX_TEXT_BYTES: Final = 16 << 20
"""Longest text or chat for any model, in bytes of UTF-8, so that its copies can't fill the memory."""

MAX_CHAT_DEPTH: Final = 32
"""Maximum depth of lists and objects in a message, so that recursion can't exhaust the stack."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a prompt with too many tokens is truncated.

    Attributes:
        most: Maximum number of tokens that remain; None: as many as fit in the context together with the answer.
        answer_tokens: Maximum number of tokens of the answer.
        keeps_begin: Whether the prompt's beginning remains, rather than its end.
    """

    most: int | None
    answer_tokens: int
    keeps_begin: bool

    def of(self, tokens: list[int], context: int) -> list[int]:
        """Return the tokens that remain of a prompt, at least one, in a context of `context` positions."""
        # The answer's last token takes no position, because it is never computed.
        most = max(1, context + 1 - self.answer_tokens) if self.most is None else self.most
        return tokens[:most] if self.keeps_begin else tokens[-most:]


class PromptReader:
    """Reads prompts for one model.

    Attributes:
        max_text_bytes: Maximum number of bytes of a text, and of all texts of a chat together. More can't fit into the
            model's context (text_bound.py). Parts of messages that a template leaves out count, too, because the
            template processes them.
    """

    def __init__(self, tokenizer: Tokenizer, context: int) -> None:
        """Prepare to read. `context` is the maximum number of positions of a sequence."""
        # Use the proven limit if the tokenizer has one, otherwise only the general limit.
        bytes_per_token = tokenizer.most_bytes_per_token
        self.max_text_bytes = (
            MAX_TEXT_BYTES if bytes_per_token is None else min(MAX_TEXT_BYTES, context * bytes_per_token)
        )
        self._tokenizer, self._context = tokenizer, context

    @property
    def template(self) -> str:
        """The source of the model's chat template; "" if it has none."""
        template = self._tokenizer.chat_template
        return "" if template is None else template.arguments[0]

    def special_token(self, name: str) -> int | None:
        """Return the special token with this name; None if there is none."""
        return next(
            (token for token, special_name in self._tokenizer.special_tokens.items() if special_name == name), None
        )

    def read_text(self, text: str, *, begins: bool = True, cut: Cut | None = None) -> list[int]:
        """Tokenize a text, with the begin token first if `begins`, and truncate it by `cut`.

        Raises AdmissionRefused for a text that can't fit, RequestRejected for a text that is not valid Unicode.
        """
        self._check_bytes(_text_bytes(text), "the prompt", cut)
        return self.checked(self._tokenizer.encode(text, begins=begins), cut)

    def read_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        begins: bool | None = None,
        continues: bool = False,
        cut: Cut | None = None,
    ) -> list[int]:
        """Put a chat into the model's template, and tokenize the result.

        If `begins`, the prompt begins with one begin token; None: as the tokenizer's files say. If `continues`, the
        prompt ends with the last message's content.

        Raises AdmissionRefused for a chat that can't fit, RequestRejected for a chat that the template refuses.
        """
        # Check the size before the template runs. Do not count roles, which are short, and names of members, which are
        # not part of the prompt.
        texts = [[value for name, value in message.items() if name != "role"] for message in messages]
        self._check_bytes(_bytes_in([texts, variables], MAX_CHAT_DEPTH), "the chat", cut)
        tokenizer = self._tokenizer
        # A template may add text, so `read_text` checks the rendered prompt again.
        begins = tokenizer.chat_begins if begins is None else begins
        rendered = tokenizer.render_chat(messages, variables, continues=continues)
        return self.read_text(rendered, begins=begins, cut=cut)

    def read_word(self, word: str) -> list[tuple[int, ...]]:
        """Return the sequences of tokens that stand for a word, as in vLLM's `bad_words`.

        The first stands for the word at the beginning of a text. The second stands for the word after a space, if it
        has the same number of tokens and another first token. Raises RequestRejected for a word that is not valid
        Unicode.
        """
        plain, spaced = (tuple(self._tokenizer.encode(space + word.lstrip(), begins=False)) for space in ("", " "))
        is_other = plain[:1] != spaced[:1] and len(plain) == len(spaced)
        return [plain, spaced] if is_other else [plain]

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, with the names of special tokens.

        Raises RequestRejected for a token that the tokenizer's vocabulary does not have.
        """
        vocabulary = self._tokenizer.vocabulary
        outside = next((token for token in tokens if not 0 <= token < vocabulary), None)
        if outside is not None:
            raise RequestRejected(f"tokens must be 0 to {vocabulary - 1}, not {outside}")
        return self._tokenizer.decode(tokens, has_special=True)

    def checked(self, tokens: Sequence[int], cut: Cut | None = None) -> list[int]:
        """Return tokens as a list, truncated by `cut`. Raises AdmissionRefused for more tokens than the context has."""
        if cut is not None:
            tokens = cut.of(list(tokens), self._context)
        if len(tokens) > self._context:
            # Write the number without separators, because clients that shorten a prompt parse it.
            raise _too_large(f"the prompt has {len(tokens)} tokens; the model's context has {self._context}")
        return list(tokens)

    def _check_bytes(self, size: int, label: str, cut: Cut | None) -> None:
        # If the prompt is truncated, a longer text may fit, so only the general limit applies.
        if cut is not None and size <= MAX_TEXT_BYTES:
            return
        if size > self.max_text_bytes:
            raise _too_large(
                f"{label} has {size:,} bytes of text; the model's context of {self._context:,} tokens has"
                f" {self.max_text_bytes:,} at most"
            )


def _too_large(detail: str) -> AdmissionRefused:
    return AdmissionRefused(AdmissionReason.TOO_LARGE, detail, None)


def _bytes_in(value: Any, depth: int) -> int:
    """Return the UTF-8 bytes of all texts in a JSON value, without the names of members."""
    if isinstance(value, str):
        return _text_bytes(value)
    if not isinstance(value, dict | list | tuple):
        return 0
    if not depth:
        raise RequestRejected(f"the chat is nested more than {MAX_CHAT_DEPTH} levels deep")
    return sum(_bytes_in(part, depth - 1) for part in (value.values() if isinstance(value, dict) else value))


def _text_bytes(text: str) -> int:
    # The tokenizer refuses unpaired surrogates later; here they need only a size.
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
