"""Scenarios of other projects' clients: `python -m helpers.decode.foreign_clients PACKAGE URL` runs those of a package.

Each package runs in a separate process: clients keep connections and threads until their process ends, and their
imports take seconds and print warnings. The process writes requests to the server's operator, one line each, to stdout,
and reads a line from stdin as the reply to each.
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Final, Literal

import pytest
from pydantic import BaseModel, Field

from helpers.decode.openai_rig import MODEL, key_of

POSITIONS: Final = 768
TEXT: Final = "Where?"
SHORT_TOKENS: Final = 12
"""Length of an answer of which only the text counts. Answers in a form, which may be longer, end by themselves."""

LONG: Final = "hello " * 400

WALK: Final = {
    "name": "walk",
    "description": "Walk.",
    # Without additionalProperties, like the schemas that clients make from functions.
    "parameters": {"type": "object", "properties": {"go": {"type": "boolean"}}, "required": ["go"]},
}
TOOL: Final = {"type": "function", "function": WALK}


class Place(BaseModel):
    """A place."""

    x: int = Field(ge=0, le=99)
    side: Literal["left", "right"]


class Server:
    """The server as its callers see it, and requests to its operator.

    Attributes:
        url: The server's URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def order(self, text: str) -> None:
        """Let the test's process do something, and wait until it has done it."""
        print(text, flush=True)
        sys.stdin.readline()


SCENARIOS: Final[dict[str, list[Callable[[Server], None]]]] = {}


def scenario(package: str, *arguments: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds a function to a package's scenarios: once, or once for each argument."""

    def add(act: Callable[..., None]) -> Callable[..., None]:
        plays = SCENARIOS.setdefault(package, [])
        for argument in arguments:
            plays.append(partial(act, argument))
        if not arguments:
            plays.append(act)
        return act

    return add


# --- langchain ---


def langchain(server: Server, tenant: str = "ann", **options: Any) -> Any:
    given = {"model": MODEL, "max_tokens": 80, "temperature": 0, "max_retries": 0} | options
    return import_module("langchain_openai").ChatOpenAI(base_url=f"{server.url}/v1", api_key=key_of(tenant), **given)


@scenario("langchain_openai")
def langchain_chats_and_streams(server: Server) -> None:
    chat = langchain(server, max_tokens=SHORT_TOKENS)
    whole = chat.invoke(TEXT)
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(part.content for part in chat.stream(TEXT)) == whole.content
    *_, last = (part.usage_metadata for part in chat.stream(TEXT, stream_usage=True) if part.usage_metadata)
    assert last["total_tokens"] == whole.usage_metadata["total_tokens"]
    assert [answer.content for answer in chat.batch([TEXT, TEXT])] == [whole.content] * 2

    async def streamed() -> str:
        other = langchain(server, max_tokens=SHORT_TOKENS)
        assert (await other.ainvoke(TEXT)).content == whole.content
        return "".join([part.content async for part in other.astream(TEXT)])

    assert asyncio.run(streamed()) == whole.content
    message = import_module("langchain_core.messages").HumanMessage(TEXT)
    scored = langchain(server, n=2, logprobs=True, top_logprobs=3, max_tokens=3).generate([[message]])
    first, _ = scored.generations[0]
    assert [len(one["top_logprobs"]) for one in first.message.response_metadata["logprobs"]["content"]] == [3] * 3


@scenario("langchain_openai", False, True)
def langchain_calls_tools_and_sends_their_results(is_of_responses: bool, server: Server) -> None:
    chat = langchain(server, use_responses_api=is_of_responses)
    messages = import_module("langchain_core.messages")

    for choice in ("walk", "any"):
        (call,) = chat.bind_tools([TOOL], tool_choice=choice, parallel_tool_calls=False).invoke(TEXT).tool_calls
        assert (call["name"], type(call["args"]["go"]), len(call["args"])) == ("walk", bool, 1)
    first: Any = None
    for part in chat.bind_tools([TOOL], tool_choice="walk").stream(TEXT):
        first = part if first is None else first + part
    assert first.tool_calls[0]["args"].keys() == {"go"}
    talk = [messages.SystemMessage("s"), messages.HumanMessage([{"type": "text", "text": TEXT}]), first]
    talk.append(messages.ToolMessage("done", tool_call_id=first.tool_calls[0]["id"]))
    short = langchain(server, use_responses_api=is_of_responses, max_tokens=SHORT_TOKENS)
    assert short.bind_tools([TOOL]).invoke(talk).text


@scenario("langchain_openai", "json_schema", "function_calling")
def langchain_has_structured_output(method: str, server: Server) -> None:
    chat = langchain(server)
    assert isinstance(chat.with_structured_output(Place, method=method).invoke(TEXT), Place)
    *_, last = chat.with_structured_output(Place, method=method).stream(TEXT)
    assert isinstance(last, Place)
    found = chat.with_structured_output(Place.model_json_schema(), method=method).invoke(TEXT)
    assert Place.model_validate(found)


@scenario("langchain_openai")
def langchain_uses_responses_without_a_store(server: Server) -> None:
    given: dict[str, Any] = {"use_responses_api": True, "store": False, "include": ["reasoning.encrypted_content"]}
    short, chat = langchain(server, max_tokens=SHORT_TOKENS, **given), langchain(server, **given)
    first = short.invoke(TEXT)
    assert short.invoke([("user", TEXT), first, ("user", "And?")]).text
    assert isinstance(chat.with_structured_output(Place, method="json_schema").invoke(TEXT), Place)


@scenario("langchain_openai")
def langchain_completes_and_embeds(server: Server) -> None:
    module = import_module("langchain_openai")
    given = {"model": MODEL, "base_url": f"{server.url}/v1", "api_key": key_of("ann"), "max_retries": 0}
    done = module.OpenAI(**given, n=2, best_of=3, max_tokens=4).generate(["Changed in", "An"])
    assert [len(texts) for texts in done.generations] == [2, 2]
    # By default the client splits texts with OpenAI's own tokenizer, which does not match this model.
    vectors = module.OpenAIEmbeddings(**given, check_embedding_ctx_length=False).embed_documents(["a", "b"])
    assert [len(vector) for vector in vectors] == [128, 128]


@scenario("langchain_openai")
def langchain_s_errors_are_openai_s(server: Server) -> None:
    langchain(server)
    import openai

    with pytest.raises(openai.AuthenticationError):
        langchain(server, "nobody").invoke(TEXT)
    with pytest.raises(openai.NotFoundError):
        langchain(server, model="another").invoke(TEXT)
    with pytest.raises(openai.BadRequestError, match=r"maximum context length is 768 tokens.* \d{4} tokens") as long:
        langchain(server).invoke(LONG)
    assert long.value.code == "context_length_exceeded"
    server.order("suspend")
    with pytest.raises(openai.InternalServerError):
        langchain(server).invoke(TEXT)
    server.order("resume")


@scenario("langchain_openai")
def langchain_tries_again_after_a_503_and_a_429(server: Server) -> None:
    chat = langchain(server, max_retries=4)
    server.order("suspend")
    server.order("resume soon")
    assert chat.invoke(TEXT).content
    # Bob may have one request in progress and none waiting.
    assert all(answer.content for answer in langchain(server, "bob", max_retries=4, max_tokens=8).batch([TEXT, TEXT]))


# --- instructor ---


def instructed(server: Server, mode: str, *, is_async: bool = False) -> Any:
    instructor = import_module("instructor")
    import openai

    kind = openai.AsyncOpenAI if is_async else openai.OpenAI
    client = kind(base_url=f"{server.url}/v1", api_key=key_of("ann"), max_retries=0)
    return instructor.from_openai(client, mode=getattr(instructor.Mode, mode))


INSTRUCTED: Final[dict[str, Any]] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": TEXT}],
    "max_tokens": 80,
    "temperature": 0,
}


@scenario("instructor", "TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "JSON_O1", "RESPONSES_TOOLS")
def instructor_returns_models(mode: str, server: Server) -> None:
    made = instructed(server, mode).chat.completions.create(response_model=Place, max_retries=0, **INSTRUCTED)
    assert isinstance(made, Place)


@scenario("instructor")
def instructor_streams_asks_again_and_waits(server: Server) -> None:
    completions = instructed(server, "TOOLS").chat.completions
    *_, last = completions.create_partial(response_model=Place, max_retries=0, **INSTRUCTED)
    assert isinstance(last.x, int)

    class Never(Place):
        @classmethod
        def model_validate_json(cls, *_: Any, **__: Any) -> Any:
            raise ValueError("never")

    # instructor sends the model's answer again, with the reason why it failed. Each of these requests must be accepted.
    with pytest.raises(Exception, match="never") as failed:
        completions.create(response_model=Never, max_retries=2, **INSTRUCTED)
    assert "InstructorRetryException" in type(failed.value).__name__

    async def made() -> Any:
        waiting = instructed(server, "TOOLS", is_async=True).chat.completions
        return await waiting.create(response_model=Place, max_retries=0, **INSTRUCTED)

    assert isinstance(asyncio.run(made()), Place)


# --- litellm ---


def asked_of(server: Server, **options: Any) -> dict[str, Any]:
    return {
        "model": f"openai/{MODEL}",
        "api_base": f"{server.url}/v1",
        "api_key": key_of("ann"),
        "messages": [{"role": "user", "content": TEXT}],
        "max_tokens": 80,
        "temperature": 0,
        "max_retries": 0,
    } | options


@scenario("litellm")
def litellm_chats_streams_and_scores(server: Server) -> None:
    litellm = import_module("litellm")
    whole = litellm.completion(**asked_of(server)).choices[0].message.content
    chunks = list(litellm.completion(**asked_of(server), stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    assert chunks[-1].usage.completion_tokens > 0

    async def streamed() -> str:
        parts = await litellm.acompletion(**asked_of(server), stream=True)
        return "".join([part.choices[0].delta.content or "" async for part in parts if part.choices])

    assert asyncio.run(streamed()) == whole
    scored = litellm.completion(**asked_of(server, max_tokens=3), n=2, logprobs=True, top_logprobs=2)
    assert [len(choice.logprobs.content) for choice in scored.choices] == [3, 3]


@scenario("litellm")
def litellm_calls_tools_and_sends_their_results(server: Server) -> None:
    litellm = import_module("litellm")
    named = {"type": "function", "function": {"name": "walk"}}
    message = litellm.completion(**asked_of(server), tools=[TOOL], tool_choice=named).choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments).keys() == {"go"}
    chunks = list(litellm.completion(**asked_of(server), tools=[TOOL], tool_choice=named, stream=True))
    whole = litellm.stream_chunk_builder(chunks).choices[0]
    assert (whole.finish_reason, whole.message.tool_calls[0].function.name) == ("tool_calls", "walk")
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "name": "walk", "content": "done"}
    talk = [{"role": "user", "content": TEXT}, message, result]
    assert litellm.completion(**asked_of(server, messages=talk), tools=[TOOL]).choices[0].message.content


@scenario("litellm")
def litellm_s_other_apis(server: Server) -> None:
    litellm = import_module("litellm")
    formed = litellm.completion(**asked_of(server), response_format=Place).choices[0].message.content
    assert Place.model_validate_json(formed)
    where = {"api_base": f"{server.url}/v1", "api_key": key_of("ann")}
    text = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", prompt="Changed in", max_tokens=5, logprobs=2, echo=True, **where
    )
    assert text.choices[0].text.startswith("Changed in")
    assert len(litellm.embedding(model=f"openai/{MODEL}", input=["a", "b"], **where).data) == 2
    assert litellm.responses(model=f"openai/{MODEL}", input=TEXT, max_output_tokens=16, **where).output
    # Anthropic's API, which litellm translates to the Responses API.
    asked = asked_of(server, max_tokens=20) | {"temperature": 1}
    del asked["max_retries"]
    assert asyncio.run(litellm.anthropic.messages.acreate(**asked))["content"][0]["text"]


@scenario("litellm")
def litellm_maps_errors_and_tries_again(server: Server) -> None:
    litellm = import_module("litellm")
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**asked_of(server, api_key="bad"))
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**asked_of(server, model="openai/another"))
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**asked_of(server, messages=[{"role": "user", "content": LONG}]))
    server.order("suspend")
    server.order("resume soon")
    assert litellm.completion(**asked_of(server, max_retries=4)).choices[0].message.content


# --- anthropic ---


def anthropic(server: Server, tenant: str = "ann", **options: Any) -> Any:
    given = {"base_url": server.url, "api_key": key_of(tenant), "max_retries": 0} | options
    return import_module("anthropic").Anthropic(**given)


def said_to(**options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": TEXT}]
    # Later versions of the client have no parameter for the temperature.
    return {"model": MODEL, "max_tokens": 60, "extra_body": {"temperature": 0}, "messages": messages} | options


@scenario("anthropic")
def anthropic_s_messages_and_streams(server: Server) -> None:
    client = anthropic(server)
    whole = client.messages.create(**said_to(system="Be brief.", stop_sequences=["never"]))
    (block,) = whole.content
    assert (whole.role, block.type, whole.stop_reason) == ("assistant", "text", "max_tokens")
    assert whole._request_id
    with client.messages.stream(**said_to(system="Be brief.", stop_sequences=["never"])) as stream:
        assert "".join(stream.text_stream) == block.text
        last = stream.get_final_message()
    assert ([part.text for part in last.content], last.stop_reason) == ([block.text], whole.stop_reason)
    counted = client.messages.count_tokens(model=MODEL, system="Be brief.", messages=said_to()["messages"])
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens

    async def other() -> Any:
        client = import_module("anthropic").AsyncAnthropic(base_url=server.url, api_key=key_of("ann"))
        return await client.messages.create(**said_to(system="Be brief."))

    assert asyncio.run(other()).content == whole.content
    # Several consecutive turns may have the same role, as in Anthropic's API.
    turns = [{"role": "user", "content": "And?"}, {"role": "user", "content": [{"type": "text", "text": TEXT}]}]
    assert client.messages.create(**said_to(messages=turns)).content


@scenario("anthropic")
def anthropic_calls_tools_and_sends_their_results(server: Server) -> None:
    client = anthropic(server)
    tool = {"name": "walk", "description": "Walk.", "input_schema": WALK["parameters"]}
    asked = said_to(tools=[tool], tool_choice={"type": "tool", "name": "walk"})
    whole = client.messages.create(**asked)
    (call,) = whole.content
    assert (call.type, call.name, call.input.keys(), whole.stop_reason) == ("tool_use", "walk", {"go"}, "tool_use")
    with client.messages.stream(**asked) as stream:
        (streamed,) = stream.get_final_message().content
    assert (streamed.name, streamed.input) == (call.name, call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "done"}
    # The client sends the content that it has received back unchanged.
    talk = [*asked["messages"], {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**said_to(messages=talk, tools=[tool])).content


@scenario("anthropic")
def anthropic_parses_structured_output(server: Server) -> None:
    parsed = anthropic(server).messages.parse(**said_to(), output_format=Place)
    assert isinstance(parsed.parsed_output, Place)


@scenario("anthropic")
def anthropic_s_errors_are_its_own(server: Server) -> None:
    module = import_module("anthropic")
    with pytest.raises(module.AuthenticationError):
        anthropic(server, "nobody").messages.create(**said_to())
    with pytest.raises(module.NotFoundError):
        anthropic(server).messages.create(**said_to(model="another"))
    with pytest.raises(module.BadRequestError, match=r"stop_sequences .* at most 16") as refused:
        anthropic(server).messages.create(**said_to(stop_sequences=["a"] * 17))
    assert refused.value.request_id
    server.order("suspend")
    with pytest.raises(module.InternalServerError):
        anthropic(server).messages.create(**said_to())
    server.order("resume soon")
    assert anthropic(server, max_retries=4).messages.create(**said_to()).content


# --- llama-index ---


def llama_index(server: Server, **options: Any) -> Any:
    given = {"model": MODEL, "max_tokens": 80, "temperature": 0, "max_retries": 0, "context_window": POSITIONS}
    given |= {"is_chat_model": True, "is_function_calling_model": True} | options
    module = import_module("llama_index.llms.openai_like")
    return module.OpenAILike(api_base=f"{server.url}/v1", **{"api_key": key_of("ann")} | given)


@scenario("llama_index")
def llama_index_completes_chats_and_streams(server: Server) -> None:
    llm = llama_index(server)
    whole = llm.complete(TEXT).text
    *_, last = llm.stream_complete(TEXT)
    assert last.text == whole
    text = llama_index(server, is_chat_model=False)
    *_, last = text.stream_complete("Changed in")
    assert last.text == text.complete("Changed in").text

    async def streamed() -> str:
        return "".join([part.delta async for part in await llama_index(server).astream_complete(TEXT)])

    assert asyncio.run(streamed()) == whole
    message = import_module("llama_index.core.llms").ChatMessage(role="user", content=TEXT)
    scored = llama_index(server, max_tokens=3, logprobs=True, top_logprobs=2).chat([message])
    assert len(scored.logprobs) == 3


@scenario("llama_index")
def llama_index_calls_tools_and_fills_models(server: Server) -> None:
    llm = llama_index(server)
    tools = import_module("llama_index.core.tools")

    def walk(go: bool) -> str:
        """Walk."""
        return f"walked {go}"

    tool = tools.FunctionTool.from_defaults(walk)
    assert str(llm.predict_and_call([tool], user_msg=TEXT, tool_required=True)).startswith("walked ")
    *_, last = llm.stream_chat_with_tools([tool], user_msg=TEXT, tool_required=True)
    assert llm.get_tool_calls_from_response(last)[0].tool_kwargs.keys() == {"go"}
    assert isinstance(llm.as_structured_llm(Place).complete(TEXT).raw, Place)
    formed = llama_index(server, is_function_calling_model=False, should_use_structured_outputs=True)
    assert isinstance(formed.as_structured_llm(Place).complete(TEXT).raw, Place)


@scenario("llama_index")
def llama_index_embeds(server: Server) -> None:
    module = import_module("llama_index.embeddings.openai_like")
    embedding = module.OpenAILikeEmbedding(model_name=MODEL, api_base=f"{server.url}/v1", api_key=key_of("ann"))
    assert [len(vector) for vector in embedding.get_text_embedding_batch(["a", "b"])] == [128, 128]


@scenario("llama_index")
def llama_index_s_errors_are_openai_s(server: Server) -> None:
    llama_index(server)
    import openai

    with pytest.raises(openai.AuthenticationError):
        llama_index(server, api_key="bad").complete(TEXT)
    with pytest.raises(openai.NotFoundError):
        llama_index(server, model="another").complete(TEXT)
    with pytest.raises(openai.BadRequestError, match="maximum context length is 768 tokens"):
        llama_index(server).complete(LONG)


def play(package: str, url: str) -> None:
    """Run a package's scenarios, and print failures to stderr."""
    server = Server(url)
    for act in SCENARIOS[package]:
        try:
            act(server)
        except Exception:
            traceback.print_exc()
        else:
            server.order("played")


if __name__ == "__main__":
    play(*sys.argv[1:])
