"""Prefixes that an operator shares by name, and how their texts become tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Final

from gpulease.client.decode.decode_errors import ModelRejected, RequestRejected
from gpulease.client.decode.decode_requests import SharedPrefix
from gpulease.client.decode.text.prompt_reader import PromptReader

if TYPE_CHECKING:
    from gpulease.client.decode.text.tokenizer import Tokenizer

_USERS: Final = ("0", "Hello")
"""Two different users' messages. The common beginning of their prompts is the beginning of all chats with the same
system message, except perhaps for its last token, which a message's first character may change. In that case the
token's block is computed with the prompt.
"""


@dataclass(frozen=True, slots=True)
class NamedPrefix:
    """A prefix from the operator's settings: a text, a system message or tokens.

    Attributes:
        name: Its name.
        text: The text with which prompts of completions begin; "" if the prefix is not a text.
        system: The system message with which chats begin; "" if the prefix is not a system message.
        token_ids: The tokens; () if the prefix is not given as tokens.
    """

    name: str
    text: str = ""
    system: str = ""
    token_ids: tuple[int, ...] = ()


def shared_prefixes(prefixes: Iterable[NamedPrefix], tokenizer: "Tokenizer", context: int) -> tuple[SharedPrefix, ...]:
    """Return the prefixes with their tokens, read like prompts for a model with `context` positions.

    Raises ModelRejected, which names the prefix, for a prefix that is too short or too long, or that the model's
    template refuses.
    """
    reader = PromptReader(tokenizer, context)
    shared = []
    for prefix in prefixes:
        try:
            shared.append(SharedPrefix(prefix.name, tuple(_tokens(prefix, reader))))
        except ValueError as error:
            raise ModelRejected(str(error)) from None
        except RequestRejected as error:
            raise ModelRejected(f"prefix {prefix.name}: {error}") from None
    return tuple(shared)


def _tokens(prefix: NamedPrefix, reader: PromptReader) -> Sequence[int]:
    if prefix.text:
        return reader.read_text(prefix.text)
    if not prefix.system:
        return prefix.token_ids
    # The template decides where it puts the message, so read two chats, and keep their common beginning.
    one, other = (
        reader.read_chat([{"role": "system", "content": prefix.system}, {"role": "user", "content": user}], {})
        for user in _USERS
    )
    return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]
