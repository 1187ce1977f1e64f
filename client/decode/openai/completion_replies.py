"""Replies of `/v1/completions` and `/v1/chat/completions`: complete replies, and the objects of a stream."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpulease.client.decode.openai.answer_text import AnswerPiece, TokenText
from gpulease.client.decode.openai.api_errors import EXTENSION
from gpulease.client.decode.openai.tool_formats import CallPart
from gpulease.client.http.event_stream import event

DONE: Final = event("[DONE]")
"""The last event of a stream. OpenAI's clients wait for it."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The numbers of tokens of one request.

    Attributes:
        prompt: Tokens of all prompts.
        completion: Tokens of all answers.
        cached: Tokens of prompts that are in reused blocks.
    """

    prompt: int
    completion: int
    cached: int


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """Makes the JSON objects of one reply, which share these members.

    Attributes:
        request_id: The request's id.
        model: The model's name.
        created: When the reply began, in seconds since 1970.
        is_chat: Whether the request is a chat.
        has_logprobs: Whether the caller requested log-probabilities.
        ranks: For how many of the likeliest tokens at each position the caller requested log-probabilities.
        has_usage: Whether a stream ends with the token counts.
        seed: The seed that the server chose; None if the caller chose it.
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
        """Return the body of a reply that is not a stream. Each piece is a complete answer."""
        choices = [self._choice(index, piece) for index, piece in enumerate(answers)]
        body = self._object(choices, is_chunk=False) | {"usage": usage(counts)}
        if self.is_chat and answers[0].prompt_logprobs is not None:
            # All answers to a chat have the same prompt. Completions may have several prompts, so there each choice has
            # its log-probabilities.
            body["prompt_logprobs"] = answers[0].prompt_logprobs
        replays = max((piece.replays for piece in answers if piece.replays is not None), default=None)
        return body | self._extension(replays, is_first=True)

    def _choice(self, index: int, piece: AnswerPiece) -> dict[str, Any]:
        logprobs = self._logprobs(piece.tokens)
        choice: dict[str, Any] = {"index": index, "finish_reason": piece.finish, "logprobs": logprobs}
        if self.is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
            if piece.calls:
                # As in OpenAI's API, content is null if the answer has calls and no text.
                message["content"] = piece.text.strip() or None
                message["tool_calls"] = self._whole_calls(index, piece)
            choice["message"] = message
        else:
            choice["text"] = piece.text
            if piece.prompt_logprobs is not None:
                choice["prompt_logprobs"] = piece.prompt_logprobs
        return choice

    def chunk(self, piece: AnswerPiece, index: int = 0, *, is_first: bool) -> dict[str, Any]:
        """Return the stream's object for a piece of an answer. `is_first` marks the answer's first piece."""
        choice: dict[str, Any] = {"index": index, "finish_reason": piece.finish or None}
        # The first chunk of a chat's answer has the role and the content, even if the content is empty.
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
        """Return an answer's complete calls, joined from their pieces."""
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
            # Only the first piece of a call has the call's id and name.
            delta |= {"id": self._call_id(index, part.index), "type": "function"}
            delta["function"]["name"] = part.name
        return delta

    def usage_chunk(self, counts: TokenCounts) -> dict[str, Any]:
        """Return the stream's last object, which has the token counts and no choice."""
        return self._object([], is_chunk=True) | {"usage": usage(counts)}

    def _object(self, choices: list[dict[str, Any]], *, is_chunk: bool) -> dict[str, Any]:
        # OpenAI's names of object types. Completions have the same name for complete replies and chunks.
        kind = ("chat.completion.chunk" if is_chunk else "chat.completion") if self.is_chat else "text_completion"
        name = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.request_id}"
        body = {"id": name, "object": kind, "created": self.created, "model": self.model, "choices": choices}
        # As in OpenAI's API, chunks before the one with the token counts have `usage: null`.
        return body | ({"usage": None} if is_chunk and self.has_usage else {})

    def _extension(self, replays: int | None, *, is_first: bool) -> dict[str, Any]:
        members = {} if self.seed is None or not is_first else {"seed": self.seed}
        members |= {} if replays is None else {"replays": replays}
        return {EXTENSION: members} if members else {}

    def _logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any] | None:
        if not self.has_logprobs:
            return None
        # A token may be part of a character. Then its text has U+FFFD, and in chats `bytes` has the exact bytes.
        texts = [token.data.decode(errors="replace") for token in tokens]
        if not self.is_chat:
            return {
                "tokens": texts,
                "token_logprobs": [token.log_probability for token in tokens],
                "top_logprobs": [_top_logprobs(token, self.ranks) for token in tokens] if self.ranks else None,
                "text_offset": [token.begin for token in tokens],
            }
        # OpenAI's API has the same data in another format for chats.
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
    """Return the log-probabilities of the `ranks` likeliest tokens and of the token itself, by text.

    This is the format of completions. Returns None for a prompt's first token.
    """
    if token.log_probability is None:
        return None
    # Several tokens may have the same text, such as U+FFFD. Keep the likeliest one.
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
