"""The job that parses a request's body in a text process: JSON of up to 4 MiB is also a tenant's text."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from gpulease.client.decode.decode_requests import SamplingParameters
from gpulease.client.decode.openai.api_errors import ApiError
from gpulease.client.decode.openai.completion_request import CompletionRequest, check_model, parse_request
from gpulease.client.decode.text.text_jobs import packed_tokens, unpacked_tokens

if TYPE_CHECKING:
    from gpulease.client.decode.text.prompt_reader import PromptReader


def read_completion(reader: "PromptReader", body: bytes, is_chat: bool, fresh_seed: int, model: str) -> dict[str, Any]:
    """Parse a body and tokenize its prompt. `completion_of` unpacks the answer.

    Args:
        reader: Tokenizes the prompt.
        body: The bytes of the body, JSON.
        is_chat: Whether it is a chat's.
        fresh_seed: The seed to use if the caller sent none.
        model: The model that is served.
    """
    try:
        # Check everything about the request before its texts are tokenized.
        asked = parse_request(body, is_chat=is_chat, fresh_seed=fresh_seed)
        check_model(asked.model, model)
    except ApiError as error:
        # An ApiError is a reply, not a failure of the worker: send its parts back.
        return {"error": [error.status, error.code, error.message, error.param, error.retry_after_s]}
    if isinstance(asked.prompt, tuple):
        tokens = reader.checked(asked.prompt)
    elif is_chat:
        tokens = reader.read_chat(asked.messages, {})
    else:
        tokens = reader.read_text(asked.prompt)
    # Only the tokens are needed from here on, so the texts are not sent back.
    return {"asked": asdict(replace(asked, prompt="", messages=())), "tokens": packed_tokens(tokens)}


def completion_of(answer: dict[str, Any]) -> tuple[CompletionRequest, tuple[int, ...]]:
    """Return the request without its texts, and the prompt's tokens. Raises ApiError for an invalid request."""
    if "error" in answer:
        raise ApiError(*answer["error"])
    asked = answer["asked"]
    # msgpack has no tuples and no dataclasses, so rebuild them.
    sampling = SamplingParameters(**asked["sampling"])
    made = {"messages": (), "stops": tuple(asked["stops"]), "sampling": sampling}
    return CompletionRequest(**asked | made), unpacked_tokens(answer["tokens"])
