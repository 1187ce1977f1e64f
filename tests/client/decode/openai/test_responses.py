"""The Responses API's texts and functions, with OpenAI's own client, unchanged; its answers are those of chats."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from gpulease.client.decode import TINY_MODEL
from gpulease.client.decode.openai.answer_text import AnswerPiece
from gpulease.client.decode.openai.api_errors import ApiError
from gpulease.client.decode.openai.completion_replies import TokenCounts
from gpulease.client.decode.openai.response_events import ResponseEvents
from gpulease.client.decode.openai.response_request import chat_of
from gpulease.client.decode.openai.tool_formats import CallPart
from helpers.daemon import Daemon
from helpers.decode.openai_rig import MODEL, OpenAiRig, openai_rig
from helpers.decode.tiny_copies import HERMES_TEMPLATE

from .test_structured_output import PLACE, SHORT

if TYPE_CHECKING:
    import openai

FUNCTIONS = [
    {"type": "function", "name": "look", "description": "See", "parameters": PLACE, "strict": True},
    {"type": "function", "name": "walk", "parameters": SHORT, "strict": True},
]
OF_CHAT = [
    {"type": "function", "function": {"name": "look", "description": "See", "parameters": PLACE}},
    {"type": "function", "function": {"name": "walk", "parameters": SHORT}},
]


@pytest.fixture(scope="module")
def rig(shared_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAiRig]:
    """A server behind a front, with the tiny model and a template that renders tools."""
    folder = shutil.copytree(TINY_MODEL, tmp_path_factory.mktemp("model") / "tiny")
    said = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(said | {"chat_template": HERMES_TEMPLATE}))
    with openai_rig(shared_daemon, wait_s=60.0, http_processes=1, model=Path(folder)) as running:
        yield running


def respond(client: openai.OpenAI, **options: Any) -> Any:
    given: dict[str, Any] = {"model": MODEL, "input": "Where?", "max_output_tokens": 24, "temperature": 0}
    return client.responses.create(**given | options)


def chat(client: openai.OpenAI, **options: Any) -> Any:
    messages = [{"role": "user", "content": "Where?"}]
    given: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 24, "temperature": 0}
    return client.chat.completions.create(**given | options)


def test_a_text_is_that_of_the_chat(client: openai.OpenAI) -> None:
    same = chat(client)
    response = respond(client, metadata={"a": "b"}, instructions=None, store=True)
    assert response.output_text == same.choices[0].message.content
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.object, response.model, response.store, response.metadata) == (
        "response",
        MODEL,
        False,
        {"a": "b"},
    )
    assert response.id.startswith("resp_")
    [message] = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "incomplete")
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens) == (same.usage.prompt_tokens, 24)
    assert usage.total_tokens == usage.input_tokens + 24
    assert usage.input_tokens_details.cached_tokens <= usage.input_tokens


def test_a_seed_that_the_server_chose_gives_the_chat_s_tokens(client: openai.OpenAI) -> None:
    response = respond(client, temperature=1.2, top_p=0.9)
    seed = response.model_extra["gpulease"]["seed"]
    assert chat(client, temperature=1.2, top_p=0.9, seed=seed).choices[0].message.content == response.output_text


def test_a_conversation_is_sent_as_items(client: openai.OpenAI) -> None:
    items = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "input_text", "text": "Wh"}, {"type": "input_text", "text": "ere?"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}], "id": "m"},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"x": 3}'},
        {"type": "function_call_output", "call_id": "c1", "output": "nothing"},
        {"role": "user", "content": "And now?"},
    ]
    messages = [
        {"role": "system", "content": "Speak."},
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Where?"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"x": 3}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "nothing"},
        {"role": "user", "content": "And now?"},
    ]
    response = respond(client, input=items, instructions="Speak.")
    assert response.output_text == chat(client, messages=messages).choices[0].message.content


def test_forms(client: openai.OpenAI) -> None:
    written = {"format": {"type": "json_schema", "name": "place", "schema": PLACE, "strict": True}}
    response = respond(client, text=written, max_output_tokens=60, temperature=1)
    assert response.status == "completed"
    jsonschema.validate(json.loads(response.output_text), PLACE)
    assert response.text.format.type == "json_schema"
    written = {"format": {"type": "json_object"}}
    assert respond(client, text=written).output_text.startswith("{")
    # The client's own method for parsed answers, which makes the schema.
    parsed = respond(client, text={"format": {"type": "text"}})
    assert parsed.output_text == respond(client).output_text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "walk"}])
def test_calls_are_those_of_the_chat_and_valid(client: openai.OpenAI, choice: Any) -> None:
    options: dict[str, Any] = {"parallel_tool_calls": False}
    response = respond(client, tools=FUNCTIONS[1:], tool_choice=choice, max_output_tokens=60, **options)
    of_chat = {"type": "function", "function": {"name": "walk"}} if isinstance(choice, dict) else choice
    same = chat(client, tools=OF_CHAT[1:], tool_choice=of_chat, max_tokens=60, **options)
    calls = same.choices[0].message.tool_calls
    assert response.status == "completed"
    assert [item.type for item in response.output] == ["function_call"] * len(calls)
    for item, call in zip(response.output, calls, strict=True):
        assert (item.name, item.arguments) == (call.function.name, call.function.arguments)
        jsonschema.validate(json.loads(item.arguments), {"look": PLACE, "walk": SHORT}[item.name])
    assert len({item.call_id for item in response.output}) == len(calls)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tools": FUNCTIONS, "tool_choice": "required", "max_output_tokens": 120},
        {"text": {"format": {"type": "json_object"}}},
    ],
    ids=["text", "calls", "json"],
)
def test_a_stream_adds_up_to_the_whole(client: openai.OpenAI, options: dict[str, Any]) -> None:
    whole = respond(client, **options)
    events = list(respond(client, stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{whole.status}"
    last = events[-1].response
    assert last.output_text == whole.output_text
    assert [item.type for item in last.output] == [item.type for item in whole.output]
    deltas = [event.delta for event in events if event.type.endswith(".delta")]
    assert len(deltas) > 1
    grown = "".join(deltas)
    assert grown == whole.output_text or grown == "".join(item.arguments for item in whole.output)
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    assert added == [event.item.id for event in events if event.type == "response.output_item.done"]
    assert added == [item.id for item in last.output]


def test_the_client_s_own_accumulation_of_a_stream_is_the_whole(client: openai.OpenAI) -> None:
    written = {"format": {"type": "json_schema", "name": "short", "schema": SHORT, "strict": True}}
    options: dict[str, Any] = {"text": written, "max_output_tokens": 60}
    with client.responses.stream(model=MODEL, input="Where?", temperature=0, **options) as stream:
        final = stream.get_final_response()
    assert (final.status, final.output_text) == ("completed", respond(client, **options).output_text)


def test_events_have_names(rig: OpenAiRig) -> None:
    with rig.http() as http:
        body = {"input": "Where?", "max_output_tokens": 2, "stream": True}
        text = http.post("/v1/responses", json=body).text
    names = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    data = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    assert names == [event["type"] for event in data]
    assert names[0] == "response.created"


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({"input": ""}, "input", "not empty"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "'item_reference' is not supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input_text"),
        ({"input": [{"role": "judge", "content": "a"}]}, "input", "'judge'"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
        ({"input": "a", "conversation": "c"}, "conversation", "not supported"),
        ({"input": "a", "background": True}, "background", "send null or false"),
        ({"input": "a", "reasoning": {"effort": "high"}}, "reasoning", "not supported"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools", "no tools of its own"),
        ({"input": "a", "text": {"verbosity": "low"}}, "text", "a format alone"),
        ({"input": "a", "text": {"format": {"type": "xml"}}}, "text", "json_schema"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", ""),
        ({"input": "a", "instructions": 3}, "instructions", "a string"),
        ({"input": "\ud800"}, "input", "can't be cut"),
        ({"input": "a", "messages": []}, "messages", "not a known parameter"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(rig: OpenAiRig, body: dict[str, Any], param: str, told: str) -> None:
    with rig.http() as http:
        reply = http.post("/v1/responses", content=json.dumps(body))
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert told in error["message"]


def test_a_key_is_needed(rig: OpenAiRig) -> None:
    with rig.http() as http:
        assert http.post("/v1/responses", json={"input": "a"}, headers={"Authorization": ""}).status_code == 401
        assert http.get("/v1/responses/resp_1").status_code == 404


# --- Events, without a server. ---


def grown() -> ResponseEvents:
    return ResponseEvents("r", "m", 7, {}, None)


COUNTS = TokenCounts(5, 3, 0)


def test_a_text_before_calls_is_an_item_of_its_own_and_blanks_are_none() -> None:
    for text, kinds in [("So:", ["message", "function_call"]), (" \n", ["function_call"])]:
        events = grown()
        list(events.add(AnswerPiece(text)))
        list(events.add(AnswerPiece(calls=[CallPart(0, "look", ""), CallPart(0, "", "{}")])))
        whole = events.whole("tool_calls", COUNTS)
        assert [item["type"] for item in whole["output"]] == kinds
        assert whole["output"][-1]["arguments"] == "{}"
    events = grown()
    list(events.add(AnswerPiece(" ")))
    assert events.whole("stop", COUNTS)["output"][0]["content"][0]["text"] == " "
    assert grown().whole("stop", COUNTS)["output"][0]["content"][0]["text"] == ""


def test_a_stream_that_fails_ends_with_an_error_in_its_order() -> None:
    events = grown()
    count = len([*events.begin(), *events.add(AnswerPiece("a"))])
    error = events.fail(ApiError(503, "engine_unavailable", "Send it again.", None, 1.0))
    assert (error["type"], error["sequence_number"], error["code"]) == ("error", count, "engine_unavailable")
    assert error["gpulease"] == {"status": 503, "retry_after": 1}


def test_calls_without_a_text_before_them_are_a_message_of_the_assistant() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    chat_body = chat_of({"input": [{"role": "user", "content": "a"}, call, call]})
    assert chat_body["messages"][1]["content"] == ""
    assert len(chat_body["messages"][1]["tool_calls"]) == 2
