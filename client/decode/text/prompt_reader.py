"""Makes tokens of a tenant's texts, chats and token lists; what can't fit into the model's context is refused first.

It runs in processes of its own (text_processes.py): a tokenizer holds the interpreter's lock for seconds, and a chat
template is a program.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from gpulease.client.decode.decode_errors import AdmissionRefused, RequestRejected
from gpulease.client.decode.decode_requests import AdmissionReason
from gpulease.client.decode.text.tokenizer import Tokenizer

MAX_TEXT_BYTES: Final = 16 << 20
"""Longest text or chat, in bytes of UTF-8, whatever the model: larger ones fill memory on their way."""

MAX_CHAT_DEPTH: Final = 32
"""Levels of lists and objects in a message. Stops a nested one from ending the interpreter by its depth."""


class PromptReader:
    """Reads prompts for one model.

    Attributes:
        max_text_bytes: The longest text that is cut into tokens, and the most that a chat's texts have together: more
            bytes can't be the model's context of tokens (text_bound.py). A template may leave parts of messages out;
            they count all the same, because it works on them.
    """

    def __init__(self, tokenizer: Tokenizer, context: int) -> None:
        """Args: context: Positions of a sequence."""
        most = tokenizer.most_bytes_per_token
        self.max_text_bytes = MAX_TEXT_BYTES if most is None else min(MAX_TEXT_BYTES, context * most)
        self._tokenizer, self._context = tokenizer, context

    def read_text(self, text: str, *, begins: bool = True) -> list[int]:
        """Cut a text into tokens, the begin token before them if it `begins`.

        Raises AdmissionRefused for one that can't fit, RequestRejected for one that is not UTF-8.
        """
        self._check_bytes(_text_bytes(text), "the prompt")
        return self.checked(self._tokenizer.encode(text, begins=begins))

    def read_chat(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> list[int]:
        """Put a chat into the model's template, and cut that into tokens.

        Raises AdmissionRefused for one that can't fit, RequestRejected for one that the template does not take.
        """
        texts = [[value for name, value in message.items() if name != "role"] for message in messages]
        self._check_bytes(_bytes_in([texts, variables], MAX_CHAT_DEPTH), "the chat")
        tokenizer = self._tokenizer
        return self.read_text(tokenizer.render_chat(messages, variables), begins=tokenizer.chat_begins)

    def checked(self, tokens: Sequence[int]) -> list[int]:
        """Return tokens as a list. Raises AdmissionRefused for more than the context has."""
        if len(tokens) > self._context:
            raise _too_large(f"the prompt has {len(tokens):,} tokens; the model's context has {self._context:,}")
        return list(tokens)

    def _check_bytes(self, size: int, what: str) -> None:
        if size > self.max_text_bytes:
            raise _too_large(
                f"{what} has {size:,} bytes of text; the model's context of {self._context:,} tokens has"
                f" {self.max_text_bytes:,} at most"
            )


def _too_large(detail: str) -> AdmissionRefused:
    return AdmissionRefused(AdmissionReason.TOO_LARGE, detail, None)


def _bytes_in(value: Any, depth: int) -> int:
    """The bytes of all texts in a value of JSON's kinds; the names of members are none."""
    if isinstance(value, str):
        return _text_bytes(value)
    if not isinstance(value, dict | list | tuple):
        return 0
    if not depth:
        raise RequestRejected(f"the chat is nested more than {MAX_CHAT_DEPTH} levels deep")
    return sum(_bytes_in(part, depth - 1) for part in (value.values() if isinstance(value, dict) else value))


def _text_bytes(text: str) -> int:
    # Half of a surrogate pair is the tokenizer's to refuse.
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
