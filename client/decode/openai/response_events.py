"""Replies of `/v1/responses`: the events of a stream, and the complete response."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from gpulease.client.decode.openai.answer_text import AnswerPiece
from gpulease.client.decode.openai.api_errors import EXTENSION, ApiError
from gpulease.client.decode.openai.completion_replies import TokenCounts
from gpulease.client.decode.openai.tool_formats import CallPart

_DEFAULTS: Final[Mapping[str, Any]] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "user": None,
}
"""The values that the reply has for parameters that the request leaves out."""

COMPLETED: Final = "completed"
INCOMPLETE: Final = "incomplete"

Event = dict[str, Any]


class ResponseEvents:
    """Turns the pieces of one answer into events of one response. Each text and each call is an item of its output.

    Attributes:
        output: The complete items.
    """

    def __init__(
        self, request_id: str, model: str, created: int, parameters: Mapping[str, Any], seed: int | None
    ) -> None:
        """Begin a response.

        Args:
            request_id: The request's id. The ids in the reply are derived from it.
            model: The model's name.
            created: Seconds since 1970.
            parameters: The request's parameters that the reply repeats (`response_request.ECHOED`).
            seed: The seed of the sampling; None if the caller chose it.
        """
        self.output: list[dict[str, Any]] = []
        self._id, self._model, self._created, self._parameters, self._seed = (
            request_id,
            model,
            created,
            parameters,
            seed,
        )
        self._number = 0
        # The incomplete item; None between items.
        self._item: dict[str, Any] | None = None
        # White space that belongs to no item yet. It is dropped if a call follows, and put before the text if text
        # follows.
        self._blanks = ""
        self._replays: int | None = None

    def begin(self) -> Iterator[Event]:
        """Yield the first events of a stream."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress"))

    def add(self, piece: AnswerPiece) -> Iterator[Event]:
        """Add a piece of the answer. Yield its events."""
        self._replays = self._replays if piece.replays is None else piece.replays
        if piece.text:
            yield from self._add_text(piece.text)
        for part in piece.calls:
            yield from self._add_call(part)

    def end(self, finish: str, counts: TokenCounts) -> Iterator[Event]:
        """End the response with the finish reason of its answer. Yield the last events."""
        if not self.output and (self._item is None or self._blanks):
            # An answer without calls has a text item, even if the text is empty.
            yield from self._open_text()
        status = INCOMPLETE if finish == "length" else COMPLETED
        yield from self._close(status)
        yield self._event(f"response.{status}", response=self._response(status, counts))

    def whole(self, finish: str, counts: TokenCounts) -> dict[str, Any]:
        """End the response. Return it, for a reply that is not a stream."""
        *_, last = self.end(finish, counts)
        response: dict[str, Any] = last["response"]
        return response

    def fail(self, error: ApiError) -> Event:
        """Return the last event of a stream that ends with an error."""
        error_body = {"code": error.code, "message": error.message, "param": error.param}
        return self._event("error", **error_body, **{EXTENSION: error.event_body()[EXTENSION]})

    # --- items ---

    def _add_text(self, text: str) -> Iterator[Event]:
        if self._item is None or self._item["type"] != "message":
            self._blanks += text
            if not self._blanks.strip():
                return
            yield from self._close(COMPLETED)
            yield from self._open_text()
            return
        yield from self._grow_text(text)

    def _open_text(self) -> Iterator[Event]:
        item = {"id": self._item_id("msg"), "type": "message", "status": "in_progress", "role": "assistant"}
        self._item = item | {"content": []}
        yield self._event("response.output_item.added", output_index=len(self.output), item=self._item)
        part = _text_part("")
        yield self._event("response.content_part.added", **self._place(content_index=0), part=part)
        self._item = item | {"content": [dict(part)]}
        text, self._blanks = self._blanks, ""
        if text:
            yield from self._grow_text(text)

    def _grow_text(self, text: str) -> Iterator[Event]:
        assert self._item is not None
        self._item["content"][0]["text"] += text
        place = self._place(content_index=0)
        yield self._event("response.output_text.delta", **place, delta=text, logprobs=[])

    def _add_call(self, part: CallPart) -> Iterator[Event]:
        if part.name:
            # White space before a call is not a text item.
            self._blanks = ""
            yield from self._close(COMPLETED)
            self._item = {
                "id": self._item_id("fc"),
                "type": "function_call",
                "status": "in_progress",
                "call_id": f"call_{self._id}_{part.index}",
                "name": part.name,
                "arguments": "",
            }
            yield self._event("response.output_item.added", output_index=len(self.output), item=dict(self._item))
        if part.arguments and self._item is not None:
            self._item["arguments"] += part.arguments
            yield self._event("response.function_call_arguments.delta", **self._place(), delta=part.arguments)

    def _close(self, status: str) -> Iterator[Event]:
        """End the incomplete item, if there is one."""
        if self._item is None:
            return
        item, place = self._item, self._place()
        if item["type"] == "message":
            part, place = item["content"][0], self._place(content_index=0)
            yield self._event("response.output_text.done", **place, text=part["text"], logprobs=[])
            yield self._event("response.content_part.done", **place, part=part)
        else:
            arguments, name = item["arguments"], item["name"]
            yield self._event("response.function_call_arguments.done", **place, arguments=arguments, name=name)
        item["status"] = status
        yield self._event("response.output_item.done", output_index=len(self.output), item=item)
        self.output.append(item)
        self._item = None

    # --- parts of events ---

    def _event(self, kind: str, **members: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **members}

    def _place(self, **members: int) -> dict[str, Any]:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self.output), **members}

    def _item_id(self, kind: str) -> str:
        return f"{kind}_{self._id}_{len(self.output)}"

    def _response(self, status: str, counts: TokenCounts | None = None) -> dict[str, Any]:
        reason = {"reason": "max_output_tokens"} if status == INCOMPLETE else None
        members = {name: self._parameters.get(name, default) for name, default in _DEFAULTS.items()}
        extension = {} if self._seed is None else {"seed": self._seed}
        extension |= {} if self._replays is None else {"replays": self._replays}
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": reason,
            "model": self._model,
            "output": list(self.output),
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            # The server stores no response, whatever the request says.
            "store": False,
            "truncation": "disabled",
            "usage": None if counts is None else _usage(counts),
            **members,
        } | ({EXTENSION: extension} if extension else {})


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(counts: TokenCounts) -> dict[str, Any]:
    return {
        "input_tokens": counts.prompt,
        "input_tokens_details": {"cached_tokens": counts.cached},
        "output_tokens": counts.completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts.prompt + counts.completion,
    }
