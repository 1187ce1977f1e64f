"""The job that parses a request's body in a text process: JSON of up to 4 MiB is also a tenant's text."""

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
    """Parse a body and tokenize its prompts. `completion_of` unpacks the answer.

    Args:
        reader: Tokenizes the prompts.
        body: The bytes of the body, JSON.
        is_chat: Whether it is a chat's.
        fresh_seed: The seed to use if the caller sent none.
        names: The names of the model that is served.
    """
    try:
        # Check everything about the request before its texts are tokenized.
        request = parse_request(body, is_chat=is_chat, fresh_seed=fresh_seed)
        check_model(request.model, names)
        request = with_tokens(reader, with_grammar(reader, request))
    except ApiError as error:
        # An ApiError is a reply, not a failure of the worker: send its parts back.
        return {"error": error.parts}
    with about(prompt_parameter(is_chat=is_chat)):
        prompts = read_prompts(reader, request)
    # Only the tokens are needed from here on, so the texts are not sent back.
    short = replace(request, prompts=(), messages=(), variables={}, cut=None, form=None, tools=(), bad_words=())
    return {"asked": asdict(short), "prompts": [packed_tokens(tokens) for tokens in prompts]}


def read_as_chat(
    reader: "PromptReader", chat: Mapping[str, Any], parameters: Mapping[str, str], fresh_seed: int, names: list[str]
) -> dict[str, Any]:
    """Read the chat that a body of another API means, as `read_completion` does.

    Args:
        reader: Tokenizes the prompt.
        chat: The body of the chat.
        parameters: What errors of the chat are about: names of the other API, by those of chats.
        fresh_seed: The seed to use if the chat has none.
        names: The names of the model that is served.
    """
    try:
        body = json.dumps(chat).encode()
    except RecursionError:
        # The chat is nested deeper than the body that it was made of, which could just be read.
        return {"error": invalid("the body is nested too deeply", code="invalid_json").parts}
    try:
        answer = read_completion(reader, body, True, fresh_seed, names)
    except RequestRejected as error:
        error.parameter = parameters.get(error.parameter, error.parameter)
        raise
    if "error" in answer:
        status, code, message, param, retry_after_s = answer["error"]
        for name, other in parameters.items():
            # Errors begin with their parameter. Elsewhere, a name without an underline may be a word of the text.
            message = re.sub(rf"\b{name}\b" if "_" in name else rf"^{name}\b", other, message)
        return {"error": (status, code, message, parameters.get(param or "", param), retry_after_s)}
    return answer


@contextmanager
def about(parameter: str) -> Iterator[None]:
    """Name the parameter in errors of the block that name none."""
    try:
        yield
    except RequestRejected as error:
        error.parameter = error.parameter or parameter
        raise


def read_prompts(reader: "PromptReader", request: CompletionRequest) -> list[list[int]]:
    """Return the tokens of each of a request's prompts. Raises the errors of the reader."""
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
    """Return a request with its bad words as tokens. Raises ApiError if those can't be followed."""
    if not request.bad_words:
        return request
    try:
        words = [sequence for word in request.bad_words for sequence in reader.read_word(word)]
        return replace(request, sampling=replace(request.sampling, bad_words=tuple(words)))
    except RequestRejected as error:
        raise invalid(error.message, "bad_words") from None


def with_grammar(reader: "PromptReader", request: CompletionRequest) -> CompletionRequest:
    """Return a request with the grammar of its form or its tools. Raises ApiError if that can't be followed."""
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
    """Return the request without its texts, and each prompt's tokens. Raises ApiError for an invalid request."""
    if "error" in answer:
        raise ApiError(*answer["error"])
    fields = answer["asked"]
    # msgpack has no tuples and no dataclasses, so rebuild them.
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
