"""`/v1/embeddings`: vectors of texts, for models whose files specify the pooling.

Each input is a separate prompt. The bits of its vector do not depend on other requests in the same steps. A vector has
length 1.
"""

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from gpulease.client.decode.openai.api_errors import CLOSED_REQUEST, ApiError, invalid
from gpulease.client.decode.openai.completion_request import check_model, parse_cut, parse_object
from gpulease.client.decode.openai.prompt_job import about
from gpulease.client.decode.openai.request_parameters import EMBEDDINGS, check_parameters
from gpulease.client.decode.text.text_jobs import packed_tokens, unpacked_tokens
from gpulease.client.texts import quoted

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gpulease.client.decode.supervisor.generation import Generation
    from gpulease.client.decode.text.prompt_reader import PromptReader

MAX_INPUTS: Final = 2048
"""Maximum number of inputs of one request, as in OpenAI's API."""

FORMATS: Final = ("float", "base64")


def read_inputs(reader: "PromptReader", body: bytes, names: list[str]) -> dict[str, Any]:
    """Check a body and tokenize its inputs, in a text process. `inputs_of` unpacks the result."""
    try:
        parameters = parse_object(body)
        check_parameters(parameters, EMBEDDINGS)
        check_model(parameters.get("model") or "", names)
        written = parameters.get("encoding_format") or "float"
        if written not in FORMATS:
            raise invalid(f"encoding_format must be float or base64, not {quoted(str(written))}", "encoding_format")
        dimensions = parameters.get("dimensions")
        if dimensions is not None and type(dimensions) is not int:
            raise invalid("dimensions must be an integer", "dimensions")
        prompts, cut = _inputs(parameters.get("input")), parse_cut(parameters, 1)
    except ApiError as error:
        return {"error": error.parts}
    with about("input"):
        tokens = [
            reader.checked(one, cut) if isinstance(one, list) else reader.read_text(one, cut=cut) for one in prompts
        ]
    answer = {"inputs": [packed_tokens(one) for one in tokens], "is_base64": written == "base64"}
    return answer | {"dimensions": dimensions}


def inputs_of(answer: dict[str, Any], width: int) -> tuple[list[tuple[int, ...]], bool]:
    """Return the tokens of each input, and whether the vectors are sent as base64.

    `answer` is the result of `read_inputs`. Raises ApiError if the body was invalid, or if its `dimensions` are not the
    model's `width`.
    """
    if "error" in answer:
        raise ApiError(*answer["error"])
    if answer["dimensions"] not in (None, width):
        text = f"dimensions = {answer['dimensions']} is not supported; leave it out, or send {width}"
        raise invalid(text, "dimensions", "unsupported_parameter")
    return [unpacked_tokens(packed) for packed in answer["inputs"]], bool(answer["is_base64"])


def _inputs(value: Any) -> list[Any]:
    """Return a body's inputs: texts, or lists of tokens."""
    # A list of tokens is one input. A list of texts or of lists of tokens has several inputs.
    is_one = isinstance(value, str) or (isinstance(value, list) and bool(value) and type(value[0]) is int)
    inputs = [value] if is_one else value
    if not isinstance(inputs, list) or not 0 < len(inputs) <= MAX_INPUTS:
        raise invalid(f"input must be a string, a list of tokens, or a list of up to {MAX_INPUTS} of those", "input")
    for prompt in inputs:
        is_tokens = isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)
        if not prompt or not (isinstance(prompt, str) or is_tokens):
            raise invalid("each input must be a string or a list of tokens, and not empty", "input")
    return inputs


async def vector_of(generation: "Generation") -> "NDArray[np.float32]":
    """Wait for the vector of an input. Raises the generation's errors, and ApiError if it was cancelled."""
    async for _ in generation:
        # One token is emitted after the last row. Ignore it.
        pass
    if generation.pooled is None or generation.pooled.count < len(generation.request.token_ids):
        raise ApiError(CLOSED_REQUEST, "closed", "The request was cancelled before its vectors were complete.")
    return generation.pooled.vector()


def embeddings_reply(
    vectors: Sequence["NDArray[np.float32]"], tokens: int, model: str, *, is_base64: bool
) -> dict[str, Any]:
    """Return the body of the reply: the vectors in the order of the inputs. `tokens` is the total number of tokens."""
    data = [
        {
            "object": "embedding",
            "index": index,
            # f32, little-endian, as OpenAI's clients decode it.
            "embedding": base64.b64encode(vector.astype("<f4").tobytes()).decode() if is_base64 else vector.tolist(),
        }
        for index, vector in enumerate(vectors)
    ]
    return {
        "object": "list",
        "data": data,
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
