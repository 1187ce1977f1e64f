"""The jobs of `/tokenize` and `/detokenize`. They run in a text process, because a tenant sends the bodies."""

from typing import TYPE_CHECKING, Any

from gpulease.client.decode.openai.api_errors import ApiError, invalid
from gpulease.client.decode.openai.completion_request import check_model, parse_begins, parse_chat_prompt, parse_object
from gpulease.client.decode.openai.prompt_job import about
from gpulease.client.decode.openai.request_parameters import DETOKENIZE, TOKENIZE, check_parameters
from gpulease.client.decode.text.text_jobs import packed_tokens, unpacked_tokens

if TYPE_CHECKING:
    from gpulease.client.decode.text.prompt_reader import PromptReader


def read_tokens(reader: "PromptReader", body: bytes, names: list[str]) -> dict[str, Any]:
    """Tokenize the prompt or the chat of a body. `tokens_of` unpacks the result."""
    try:
        parameters = parse_object(body)
        check_parameters(parameters, TOKENIZE)
        check_model(parameters.get("model") or "", names)
        begins = parse_begins(parameters)
        if parameters.get("messages") is not None:
            messages, variables, continues = parse_chat_prompt(parameters)
            with about("messages"):
                tokens = reader.read_chat(messages, variables, begins=begins, continues=continues)
            return {"tokens": packed_tokens(tokens)}
        prompt = parameters.get("prompt")
        if not isinstance(prompt, str):
            raise invalid("prompt must be a string", "prompt")
    except ApiError as error:
        return _packed(error)
    with about("prompt"):
        return {"tokens": packed_tokens(reader.read_text(prompt, begins=begins is not False))}


def tokens_of(answer: dict[str, Any]) -> list[int]:
    """Return the tokens in a result of `read_tokens`. Raises ApiError if the body was invalid."""
    if "error" in answer:
        raise ApiError(*answer["error"])
    return list(unpacked_tokens(answer["tokens"]))


def read_back(reader: "PromptReader", body: bytes, names: list[str]) -> dict[str, Any]:
    """Turn a body's tokens back into text. `text_of` unpacks the result."""
    try:
        parameters = parse_object(body)
        check_parameters(parameters, DETOKENIZE)
        check_model(parameters.get("model") or "", names)
        tokens = parameters.get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise invalid("tokens must be a list of integers", "tokens")
    except ApiError as error:
        return _packed(error)
    with about("tokens"):
        return {"text": reader.text_of(reader.checked(tokens))}


def text_of(answer: dict[str, Any]) -> str:
    """Return the text in a result of `read_back`. Raises ApiError if the body was invalid."""
    if "error" in answer:
        raise ApiError(*answer["error"])
    return str(answer["text"])


def _packed(error: ApiError) -> dict[str, Any]:
    # An ApiError is the reply to the caller, not a failure of this process.
    return {"error": [error.status, error.code, error.message, error.param, error.retry_after_s]}
