"""The job that parses a request's body and tokenizes its prompts, in a text process.

The JSON is parsed there, too, because a tenant can send up to 4 MiB.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from gpulease.client.decode.decode_errors import GrammarRefused, RequestRejected
from gpulease.client.decode.decode_requests import SamplingParameters
from gpulease.client.decode.openai.api_errors import ApiError, invalid, prompt_parameter
from gpulease.client.decode.openai.completion_request import CompletionRequest, check_model, parse_request
from gpulease.client.decode.openai.tool_formats import format_of, tool_grammar
from gpulease.client.decode.text.grammar import check_grammar
from gpulease.client.decode.text.text_jobs import packed_tokens, unpacked_tokens

if TYPE_CHECKING:
    from gpulease.client.decode.text.prompt_reader import PromptReader


def read_completion(
    reader: "PromptReader", body: bytes, is_chat: bool, fresh_seed: int, names: list[str]
) -> dict[str, Any]:
    """Parse a body and tokenize its prompts. `completion_of` unpacks the result.

    Args:
        reader: Tokenizes the prompts.
        body: The body, JSON.
        is_chat: Whether the body is for `/v1/chat/completions`.
        fresh_seed: The seed to use if the caller sent none.
        names: The names of the served model.

    Raises the errors of the reader. An ApiError becomes the result's member `error`.
    """
    try:
        # Check the whole request before tokenizing its texts.
        request = parse_request(body, is_chat=is_chat, fresh_seed=fresh_seed)
        check_model(request.model, names)
        request = with_tokens(reader, with_grammar(reader, request))
    except ApiError as error:
        # An ApiError is the reply to the caller, not a failure of this process, so return its parts.
        return {"error": error.parts}
    with about(prompt_parameter(is_chat=is_chat)):
        prompts = read_prompts(reader, request)
    # The texts are no longer needed, so do not send them back.
    short = replace(request, prompts=(), messages=(), variables={}, cut=None, form=None, tools=(), bad_words=())
    return {"asked": asdict(short), "prompts": [packed_tokens(tokens) for tokens in prompts]}


def read_as_chat(
    reader: "PromptReader", chat: Mapping[str, Any], parameters: Mapping[str, str], fresh_seed: int, names: list[str]
) -> dict[str, Any]:
    """Parse a chat that was made from a body of another API, as `read_completion` does.

    Args:
        reader: Tokenizes the prompt.
        chat: The body of the chat.
        parameters: Maps a chat's parameters to their names in the other API, to translate errors.
        fresh_seed: The seed to use if the chat has none.
        names: The names of the served model.
    """
    try:
        body = json.dumps(chat).encode()
    except RecursionError:
        # The chat is nested deeper than the other API's body, which was still within the limit.
        return {"error": invalid("the body is nested too deeply", code="invalid_json").parts}
    try:
        answer = read_completion(reader, body, True, fresh_seed, names)
    except RequestRejected as error:
        error.parameter = parameters.get(error.parameter, error.parameter)
        raise
    if "error" in answer:
        status, code, message, param, retry_after_s = answer["error"]
        for name, other in parameters.items():
            # A message begins with the parameter's name. A name without an underscore may be an ordinary word elsewhere
            # in the message, so replace it only at the beginning.
            message = re.sub(rf"\b{name}\b" if "_" in name else rf"^{name}\b", other, message)
        return {"error": (status, code, message, parameters.get(param or "", param), retry_after_s)}
    return answer


@contextmanager
def about(parameter: str) -> Iterator[None]:
    """Set the parameter of a RequestRejected that the block raises, unless it has one."""
    try:
        yield
    except RequestRejected as error:
        error.parameter = error.parameter or parameter
        raise


def read_prompts(reader: "PromptReader", request: CompletionRequest) -> list[list[int]]:
    """Return the tokens of each of a request's prompts. Raises the reader's errors."""
    if request.is_chat:
        return [
            reader.read_chat(
                request.messages,
                request.variables,
                begins=request.begins,
                continues=request.continues,
                cut=request.cut,
            )
        ]
    return [
        reader.checked(prompt, request.cut)
        if isinstance(prompt, tuple)
        else reader.read_text(prompt, begins=request.begins is not False, cut=request.cut)
        for prompt in request.prompts
    ]


def with_tokens(reader: "PromptReader", request: CompletionRequest) -> CompletionRequest:
    """Return the request with its bad words, as tokens, in `sampling`. Raises ApiError if a word can't be forbidden."""
    if not request.bad_words:
        return request
    try:
        words = [sequence for word in request.bad_words for sequence in reader.read_word(word)]
        return replace(request, sampling=replace(request.sampling, bad_words=tuple(words)))
    except RequestRejected as error:
        raise invalid(error.message, "bad_words") from None


def with_grammar(reader: "PromptReader", request: CompletionRequest) -> CompletionRequest:
    """Return the request with the grammar, of its form or its tools, in `sampling`.

    Raises ApiError if the model has no known format of tool calls, or if the grammar is refused.
    """
    form, written = request.form, None
    if form is None and not request.tools:
        return request
    if request.tools:
        written = format_of(reader.template)
        if written is None:
            text = "the model's chat template has no format of tools that is known"
            raise invalid(text, "tools", "unsupported_parameter")
    try:
        if written is not None:
            grammar = tool_grammar(
                written,
                request.tools,
                is_required=request.must_call,
                is_parallel=request.is_parallel,
                trigger_token=reader.special_token(written.trigger),
                answer="" if form is None else form.rule(),
            )
        else:
            assert form is not None
            grammar = form.whole_grammar(reader.special_token)
        check_grammar(grammar)
    except GrammarRefused as error:
        raise invalid(error.message, "tools" if form is None else form.parameter, "grammar_refused") from None
    sampling = replace(request.sampling, grammar=grammar)
    return replace(request, sampling=sampling, tool_format=written.name if written else "")


def completion_of(answer: dict[str, Any]) -> tuple[CompletionRequest, list[tuple[int, ...]]]:
    """Return the request without its texts, and the tokens of each prompt.

    `answer` is the result of `read_completion`. Raises ApiError if the result is an error.
    """
    if "error" in answer:
        raise ApiError(*answer["error"])
    fields = answer["asked"]
    # msgpack has neither tuples nor dataclasses, so rebuild them.
    sampling = fields["sampling"]
    lists = {
        "logit_bias": tuple((token, bias) for token, bias in sampling["logit_bias"]),
        "stop_token_ids": tuple(sampling["stop_token_ids"]),
        "allowed_token_ids": tuple(sampling["allowed_token_ids"]),
        "bad_words": tuple(map(tuple, sampling["bad_words"])),
    }
    values = {"messages": (), "prompts": (), "tools": (), "bad_words": (), "stops": tuple(fields["stops"])}
    request = CompletionRequest(**fields | values | {"sampling": SamplingParameters(**sampling | lists)})
    return request, [unpacked_tokens(tokens) for tokens in answer["prompts"]]
