"""Replies of `/v1/messages`: the events of a stream, the complete message, and errors."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from gpulease.client.decode.openai.answer_text import AnswerPiece
from gpulease.client.decode.openai.api_errors import EXTENSION, ApiError
from gpulease.client.decode.openai.completion_replies import TokenCounts
from gpulease.client.decode.openai.tool_formats import CallPart

_REASONS: Final[Mapping[str, str]] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""Maps each finish reason of an answer to Anthropic's `stop_reason`."""

_ERROR_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Maps HTTP statuses to Anthropic's error types."""

Event = dict[str, Any]


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the body of an error: Anthropic's members and, as on other paths, `param` and `code`."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    members = {"type": kind, "message": error.message, "param": error.param, "code": error.code}
    return {"type": "error", "error": members}


class MessageEvents:
    """Turns an answer's pieces into a message's events. Each text and each call is a block of the message's content.

    Attributes:
        content: The complete blocks.
    """

    def __init__(self, request_id: str, model: str, prompt_tokens: int, seed: int | None) -> None:
        """Begin a message.

        Args:
            request_id: The request's id. The ids in the reply are derived from it.
            model: The model's name.
            prompt_tokens: Number of tokens of the prompt.
            seed: The seed of the sampling; None if the caller chose it.
        """
        self.content: list[dict[str, Any]] = []
        self._id, self._model, self._prompt_tokens, self._seed = request_id, model, prompt_tokens, seed
        # The incomplete block, and for a call the text of its arguments so far. None between blocks.
        self._block: dict[str, Any] | None = None
        self._arguments = ""
        self._index = 0
        # White space that belongs to no block yet. It is dropped if a call follows, and put before the text if text
        # follows.
        self._blanks = ""
        self._replays: int | None = None
        self._stop: str | None = None

    def begin(self) -> Iterator[Event]:
        """Yield the first events of a stream."""
        counts = TokenCounts(self._prompt_tokens, 0, 0)
        yield {"type": "message_start", "message": self._message(None, counts)}

    def add(self, piece: AnswerPiece) -> Iterator[Event]:
        """Add a piece of the answer. Yield its events."""
        self._replays = self._replays if piece.replays is None else piece.replays
        self._stop = piece.stop or None
        if piece.text:
            yield from self._add_text(piece.text)
        for part in piece.calls:
            yield from self._add_call(part)

    def end(self, finish: str, counts: TokenCounts) -> Iterator[Event]:
        """End the message with the finish reason of its answer. Yield the last events."""
        if not self.content and (self._block is None or self._blanks):
            # An answer without calls has a text block, even if the text is empty.
            yield from self._open_text()
        yield from self._close()
        message = self._message(finish, counts)
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        extension = {EXTENSION: message[EXTENSION]} if EXTENSION in message else {}
        yield {"type": "message_delta", "delta": delta, "usage": message["usage"], **extension}
        yield {"type": "message_stop"}

    def whole(self, finish: str, counts: TokenCounts) -> dict[str, Any]:
        """End the message. Return it, for a reply that is not a stream."""
        for _ in self.end(finish, counts):
            pass
        return self._message(finish, counts)

    def fail(self, error: ApiError) -> Event:
        """Return the last event of a stream that ends with an error."""
        return error_body(error) | {EXTENSION: error.event_body()[EXTENSION]}

    # --- blocks ---

    def _add_text(self, text: str) -> Iterator[Event]:
        if self._block is None or self._block["type"] != "text":
            self._blanks += text
            if self._blanks.strip():
                yield from self._close()
                yield from self._open_text()
            return
        yield from self._grow_text(text)

    def _open_text(self) -> Iterator[Event]:
        yield self._open({"type": "text", "text": ""})
        text, self._blanks = self._blanks, ""
        if text:
            yield from self._grow_text(text)

    def _grow_text(self, text: str) -> Iterator[Event]:
        assert self._block is not None
        self._block["text"] += text
        yield self._delta({"type": "text_delta", "text": text})

    def _add_call(self, part: CallPart) -> Iterator[Event]:
        if part.name:
            # White space before a call is not a text block.
            self._blanks = ""
            yield from self._close()
            call_id = f"toolu_{self._id}_{part.index}"
            yield self._open({"type": "tool_use", "id": call_id, "name": part.name, "input": {}})
        if part.arguments:
            self._arguments += part.arguments
            yield self._delta({"type": "input_json_delta", "partial_json": part.arguments})

    def _open(self, block: dict[str, Any]) -> Event:
        self._block, self._arguments = dict(block), ""
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> Iterator[Event]:
        """End the incomplete block, if there is one."""
        block, self._block = self._block, None
        if block is None:
            return
        yield {"type": "content_block_stop", "index": self._index}
        self._index += 1
        if block["type"] == "tool_use":
            try:
                block["input"] = json.loads(self._arguments)
            except (ValueError, RecursionError):
                # A call that was cut off is not valid JSON. Leave it out of the message: stop_reason gives the reason.
                return
        self.content.append(block)

    def _message(self, finish: str | None, counts: TokenCounts) -> dict[str, Any]:
        reason = None if finish is None else _REASONS[finish]
        extension = {} if self._seed is None else {"seed": self._seed}
        extension |= {} if self._replays is None else {"replays": self._replays}
        return {
            "id": f"msg_{self._id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(self.content),
            "stop_reason": "stop_sequence" if self._stop is not None and reason == "end_turn" else reason,
            "stop_sequence": self._stop,
            "usage": {
                # As in Anthropic's API, `input_tokens` does not include the reused tokens.
                "input_tokens": counts.prompt - counts.cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": counts.cached,
                "output_tokens": counts.completion,
            },
        } | ({EXTENSION: extension} if extension else {})
