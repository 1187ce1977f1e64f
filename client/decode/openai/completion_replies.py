"""Replies of `/v1/completions` and `/v1/chat/completions`: complete ones, and the events of a stream."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpulease.client.decode.openai.answer_text import AnswerPiece, TokenText
from gpulease.client.decode.openai.api_errors import EXTENSION
from gpulease.client.decode.openai.tool_formats import CallPart
from gpulease.client.http.event_stream import event

DONE: Final = event("[DONE]")
"""The last event of a stream, which OpenAI's clients wait for."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The tokens of one request.

    Attributes:
        prompt: Those of its prompts.
        completion: Those of its answers.
        cached: Those of its prompts that were not computed, because the tenant's region had them.
    """

    prompt: int
    completion: int
    cached: int


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """The members that all objects of one reply share.

    Attributes:
        request_id: The request's id.
        model: The model's name.
        created: Seconds since 1970.
        is_chat: Whether it answers a chat.
        has_logprobs: Whether the caller requested log-probabilities.
        ranks: How many of the likeliest tokens it requested with each.
        has_usage: Whether a stream ends with the token counts.
        seed: The seed that the server chose; None if the caller did.
    """

    request_id: str
    model: str
    created: int
    is_chat: bool
    has_logprobs: bool
    ranks: int
    has_usage: bool
    seed: int | None

    def whole(self, answers: Sequence[AnswerPiece], counts: TokenCounts) -> dict[str, Any]:
        """Return the body of a reply that is not a stream, with each whole answer as one piece."""
        choices = [self._choice(index, piece) for index, piece in enumerate(answers)]
        body = self._object(choices, is_chunk=False) | {"usage": usage(counts)}
        if self.is_chat and answers[0].prompt_logprobs is not None:
            # All answers have the chat as their prompt. Completions may have several prompts.
            body["prompt_logprobs"] = answers[0].prompt_logprobs
        replays = max((piece.replays for piece in answers if piece.replays is not None), default=None)
        return body | self._extension(replays, is_first=True)

    def _choice(self, index: int, piece: AnswerPiece) -> dict[str, Any]:
        logprobs = self._logprobs(piece.tokens)
        choice: dict[str, Any] = {"index": index, "finish_reason": piece.finish, "logprobs": logprobs}
        if self.is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
            if piece.calls:
                # Next to calls, an answer without text has no content.
                message["content"] = piece.text.strip() or None
                message["tool_calls"] = self._whole_calls(index, piece)
            choice["message"] = message
        else:
            choice["text"] = piece.text
            if piece.prompt_logprobs is not None:
                choice["prompt_logprobs"] = piece.prompt_logprobs
        return choice

    def chunk(self, piece: AnswerPiece, index: int = 0, *, is_first: bool) -> dict[str, Any]:
        """Return the stream's object for a piece of an answer; `is_first` if it begins that answer."""
        choice: dict[str, Any] = {"index": index, "finish_reason": piece.finish or None}
        # Only the first chunk of a chat has the role, even if its content is still empty.
        choice["logprobs"] = self._logprobs(piece.tokens) if piece.tokens else None
        if self.is_chat:
            role = {"role": "assistant"} if is_first else {}
            choice["delta"] = role | ({"content": piece.text} if piece.text or is_first else {})
            if piece.calls:
                choice["delta"]["tool_calls"] = [self._call_delta(index, part) for part in piece.calls]
        else:
            choice["text"] = piece.text
        return self._object([choice], is_chunk=True) | self._extension(piece.replays, is_first=is_first)

    def _call_id(self, index: int, call: int) -> str:
        return f"call_{self.request_id}_{index}_{call}"

    def _whole_calls(self, index: int, piece: AnswerPiece) -> list[dict[str, Any]]:
        """Return an answer's calls, put together from their pieces."""
        names, arguments = dict[int, str](), defaultdict[int, str](str)
        for part in piece.calls:
            names.setdefault(part.index, part.name)
            arguments[part.index] += part.arguments
        return [
            {
                "id": self._call_id(index, call),
                "type": "function",
                "function": {"name": name, "arguments": arguments[call]},
            }
            for call, name in names.items()
        ]

    def _call_delta(self, index: int, part: CallPart) -> dict[str, Any]:
        delta: dict[str, Any] = {"index": part.index, "function": {"arguments": part.arguments}}
        if part.name:
            # The first piece of a call; only this piece has the call's id and name.
            delta |= {"id": self._call_id(index, part.index), "type": "function"}
            delta["function"]["name"] = part.name
        return delta

    def usage_chunk(self, counts: TokenCounts) -> dict[str, Any]:
        """Return the stream's last object, which has the token counts and no choice."""
        return self._object([], is_chunk=True) | {"usage": usage(counts)}

    def _object(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        # The names of OpenAI's object types; completions have one name for both.
        kind = ("chat.completion.chunk" if is_chunk else "chat.completion") if self.is_chat else "text_completion"
        name = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.request_id}"
        body = {"id": name, "object": kind, "created": self.created, "model": self.model, "choices": choices}
        # OpenAI sends `usage: null` in all chunks before the one that has it.
        return body | ({"usage": None} if is_chunk and self.has_usage else {})

    def _extension(self, replays: int | None, *, is_first: bool) -> dict[str, Any]:
        members = {} if self.seed is None or not is_first else {"seed": self.seed}
        members |= {} if replays is None else {"replays": replays}
        return {EXTENSION: members} if members else {}

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any] | None:
        if not self.has_logprobs:
            return None
        # A token may be part of a character: its text then has U+FFFD, and a chat's `bytes` are exact.
        texts = [token.data.decode(errors="replace") for token in tokens]
        if not self.is_chat:
            return {
                "tokens": texts,
                "token_logprobs": [token.log_probability for token in tokens],
                "top_logprobs": [_top_logprobs(token, self.ranks) for token in tokens] if self.ranks else None,
                "text_offset": [token.begin for token in tokens],
            }
        # Chats and completions have different shapes for the same data.
        entries = [
            {
                "token": text,
                "logprob": token.log_probability,
                "bytes": list(token.data),
                "top_logprobs": [
                    {"token": data.decode(errors="replace"), "logprob": log, "bytes": list(data)}
                    for data, log in token.ranks[: self.ranks]
                ],
            }
            for text, token in zip(texts, tokens, strict=True)
        ]
        return {"content": entries, "refusal": None}


def _top_logprobs(token: TokenText, ranks: int) -> dict[str, float] | None:
    """Return the `ranks` likeliest tokens by their texts, and the token itself, as completions have them."""
    if token.log_probability is None:
        return None
    # Several tokens may have the same text, such as parts of characters: the likeliest one counts.
    logprobs: dict[str, float] = {}
    for data, log in (*token.ranks[:ranks], (token.data, token.log_probability)):
        logprobs.setdefault(data.decode(errors="replace"), log)
    return logprobs


def usage(counts: TokenCounts) -> dict[str, Any]:
    """Return the member `usage`: the token counts of prompt, completion and both."""
    return {
        "prompt_tokens": counts.prompt,
        "completion_tokens": counts.completion,
        "total_tokens": counts.prompt + counts.completion,
        "prompt_tokens_details": {"cached_tokens": counts.cached},
    }
