"""Reads a request's body in a process that reads texts: JSON is a tenant's text as well, and up to 4 MiB of it."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from gpulease.client.decode.decode_requests import SamplingParameters
from gpulease.client.decode.openai.api_errors import ApiError
from gpulease.client.decode.openai.completion_request import CompletionRequest, check_model, parse_request
from gpulease.client.decode.text.text_jobs import packed_tokens, unpacked_tokens

if TYPE_CHECKING:
    from gpulease.client.decode.text.prompt_reader import PromptReader


def read_completion(reader: "PromptReader", body: bytes, is_chat: bool, fresh_seed: int, model: str) -> dict[str, Any]:
    """Read a body, and its prompt's tokens. `completion_of` makes of the answer what it says.

    Args:
        reader: Reads the prompt.
        body: JSON.
        is_chat: Whether it is a chat's.
        fresh_seed: The seed to take where the caller names none.
        model: The model that is served.
    """
    try:
        asked = parse_request(body, is_chat=is_chat, fresh_seed=fresh_seed)
        check_model(asked.model, model)
    except ApiError as error:
        return {"error": [error.status, error.code, error.message, error.param, error.retry_after_s]}
    if isinstance(asked.prompt, tuple):
        tokens = reader.checked(asked.prompt)
    elif is_chat:
        tokens = reader.read_chat(asked.messages, {})
    else:
        tokens = reader.read_text(asked.prompt)
    # The texts have done their work.
    return {"asked": asdict(replace(asked, prompt="", messages=())), "tokens": packed_tokens(tokens)}


def completion_of(answer: dict[str, Any]) -> tuple[CompletionRequest, tuple[int, ...]]:
    """Return the request without its texts, and the prompt's tokens. Raises ApiError for one that can't be taken."""
    if "error" in answer:
        raise ApiError(*answer["error"])
    asked = answer["asked"]
    sampling = SamplingParameters(**asked["sampling"])
    made = {"messages": (), "stops": tuple(asked["stops"]), "sampling": sampling}
    return CompletionRequest(**asked | made), unpacked_tokens(answer["tokens"])
