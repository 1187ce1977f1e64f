"""Anthropic's messages yield the same texts, calls and events as chats. The tests parse the events themselves."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from gpulease.client.decode import TINY_MODEL, open_model
from gpulease.client.decode.openai.answer_text import AnswerPiece
from gpulease.client.decode.openai.api_errors import ApiError
from gpulease.client.decode.openai.completion_intake import MAX_BODY_BYTES
from gpulease.client.decode.openai.completion_replies import TokenCounts
from gpulease.client.decode.openai.message_events import MessageEvents, error_body
from gpulease.client.decode.openai.message_request import PARAMETERS, chat_of, read_message
from gpulease.client.decode.openai.tool_formats import CallPart
from gpulease.client.decode.text.prompt_reader import PromptReader
from helpers.daemon import Daemon
from helpers.decode.openai_rig import MODEL, OpenAiRig, key_of, openai_rig
from helpers.decode.tiny_copies import HERMES_TEMPLATE

from .test_structured_output import PLACE, SHORT

USER = [{"role": "user", "content": "Where?"}]
TOOLS = [
    {"name": "look", "description": "See", "input_schema": PLACE},
    {"type": "custom", "name": "walk", "input_schema": SHORT, "cache_control": {"type": "ephemeral"}},
]
FORM = {"format": {"type": "json_schema", "schema": PLACE}}
OF_CHAT = [
    {"type": "function", "function": {"name": "look", "description": "See", "parameters": PLACE}},
    {"type": "function", "function": {"name": "walk", "parameters": SHORT}},
]


def called(**members: Any) -> dict[str, Any]:
    """Return an assistant's message with a call of a tool."""
    block = {"type": "tool_use", "id": "t1", "name": "look", "input": {"x": 1}} | members
    return {"role": "assistant", "content": [block]}


@pytest.fixture(scope="module")
def rig(shared_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAiRig]:
    """A server with a front, and the tiny model with a template that renders tools."""
    folder = shutil.copytree(TINY_MODEL, tmp_path_factory.mktemp("model") / "tiny")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": HERMES_TEMPLATE}))
    with openai_rig(shared_daemon, wait_s=60.0, http_processes=1, model=Path(folder)) as running:
        yield running


@pytest.fixture
def http(rig: OpenAiRig) -> Iterator[httpx.Client]:
    """An HTTP client with the headers of Anthropic's client."""
    headers = {"X-Api-Key": key_of("ann"), "Anthropic-Version": "2023-06-01"}
    with httpx.Client(base_url=rig.url, headers=headers, timeout=60) as caller:
        yield caller


def message(http: httpx.Client, **options: Any) -> Any:
    given: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 24, "temperature": 0}
    reply = http.post("/v1/messages", json=given | options)
    assert reply.status_code == 200, reply.text
    return reply.json()


def chat(http: httpx.Client, **options: Any) -> Any:
    given: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 24, "temperature": 0}
    return http.post("/v1/chat/completions", json=given | options).json()


def refused(http: httpx.Client, path: str = "/v1/messages", **options: Any) -> Any:
    reply = http.post(path, json={"messages": USER, "max_tokens": 4} | options)
    return reply.status_code, reply.json()


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream. Each must have its type as its name; comments are left out."""
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if lines:
            (name,) = (line.removeprefix("event: ") for line in lines if line.startswith("event: "))
            (data,) = (line.removeprefix("data: ") for line in lines if line.startswith("data: "))
            events.append(json.loads(data))
            assert events[-1]["type"] == name
    return events


def added_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that events compose, as a client would compose it."""
    first, *middle, delta, last = events
    assert (first["type"], delta["type"], last) == ("message_start", "message_delta", {"type": "message_stop"})
    whole: dict[str, Any] = first["message"]
    assert (whole["content"], whole["stop_reason"]) == ([], None)
    arguments = ""
    for event in middle:
        index = event["index"]
        if event["type"] == "content_block_start":
            assert index == len(whole["content"])
            whole["content"].append(event["content_block"])
            arguments = ""
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "text_delta":
            whole["content"][index]["text"] += event["delta"]["text"]
        elif event["type"] == "content_block_delta":
            arguments += event["delta"]["partial_json"]
        else:
            assert (event["type"], index) == ("content_block_stop", len(whole["content"]) - 1)
            if arguments:
                whole["content"][index]["input"] = json.loads(arguments)
    whole |= delta["delta"]
    whole["usage"] = delta["usage"]
    return whole


def test_a_text_is_that_of_the_chat(http: httpx.Client) -> None:
    same = chat(http)
    whole = message(http, metadata={"user_id": "a"}, thinking={"type": "disabled"})
    assert whole["content"] == [{"type": "text", "text": same["choices"][0]["message"]["content"]}]
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", MODEL)
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("max_tokens", None)
    assert whole["id"].startswith("msg_")
    usage = whole["usage"]
    read = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert (read, usage["output_tokens"]) == (same["usage"]["prompt_tokens"], same["usage"]["completion_tokens"])
    assert "seed" in whole["gpulease"]


def test_a_stream_s_events_add_up_to_the_whole(http: httpx.Client) -> None:
    whole = message(http)
    body = {"model": MODEL, "messages": USER, "max_tokens": 24, "temperature": 0, "stream": True}
    streamed = added_up(events_of(http.post("/v1/messages", json=body).text))
    for name in ("content", "stop_reason", "stop_sequence", "model", "role", "type"):
        assert streamed[name] == whole[name], name
    assert streamed["usage"]["output_tokens"] == 24


def test_tools_are_called_as_in_the_chat(http: httpx.Client) -> None:
    options: dict[str, Any] = {"max_tokens": 120, "seed": 3, "temperature": 1}
    for choice, same in (
        ({"type": "any", "disable_parallel_tool_use": True}, {"tool_choice": "required", "parallel_tool_calls": False}),
        ({"type": "tool", "name": "walk"}, {"tool_choice": {"type": "function", "function": {"name": "walk"}}}),
    ):
        body = {"messages": USER, "max_tokens": 120, "temperature": 0, "tools": TOOLS, "tool_choice": choice}
        whole = message(http, **body)
        asked = chat(http, **options | {"temperature": 0, "tools": OF_CHAT} | same)["choices"][0]
        (call,) = asked["message"]["tool_calls"]
        (block,) = whole["content"]
        assert (block["type"], block["name"]) == ("tool_use", call["function"]["name"])
        assert block["input"] == json.loads(call["function"]["arguments"])
        jsonschema.validate(block["input"], {"look": PLACE, "walk": SHORT}[block["name"]])
        assert (whole["stop_reason"], asked["finish_reason"]) == ("tool_use", "tool_calls")
        streamed = added_up(events_of(http.post("/v1/messages", json=body | {"stream": True}).text))
        calls = [{name: one[name] for name in ("type", "name", "input")} for one in streamed["content"]]
        assert calls == [{name: block[name] for name in ("type", "name", "input")}]
        assert streamed["stop_reason"] == "tool_use"


def test_an_answer_has_the_form_that_the_message_gives(http: httpx.Client) -> None:
    whole = message(http, max_tokens=80, output_config=FORM, speed="standard")
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": PLACE}}
    same = chat(http, max_tokens=80, response_format=form)["choices"][0]["message"]["content"]
    assert [block["text"] for block in whole["content"]] == [same]
    jsonschema.validate(json.loads(same), PLACE)
    counted = http.post("/v1/messages/count_tokens", json={"messages": USER, "output_config": FORM})
    assert counted.status_code == 200


def test_a_stop_is_named_and_an_assistant_s_last_message_is_continued(http: httpx.Client) -> None:
    text = message(http)["content"][0]["text"]
    stop = text[4:7]
    stopped = message(http, stop_sequences=["never", stop])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", stop)
    assert stopped["content"][0]["text"] == text[: text.index(stop)]
    begun = [*USER, {"role": "assistant", "content": text[:4]}]
    same = chat(http, messages=begun, continue_final_message=True)
    assert message(http, messages=begun)["content"][0]["text"] == same["choices"][0]["message"]["content"]


def test_tokens_are_counted_as_they_are_read(http: httpx.Client) -> None:
    body: dict[str, Any] = {"messages": USER, "system": [{"type": "text", "text": "Be brief."}], "tools": TOOLS}
    counted = http.post("/v1/messages/count_tokens", json=body).json()
    usage = message(http, **body, max_tokens=1)["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    status, error = refused(http, "/v1/messages/count_tokens")
    assert (status, error["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize(
    ("options", "status", "kind", "param"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 500}, 400, "invalid_request_error", "messages"),
        ({"model": "another"}, 404, "not_found_error", "model"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences"),
        ({"stop_sequences": ["a"], "tools": TOOLS}, 400, "invalid_request_error", "stop_sequences"),
        ({"tool_choice": {"type": "all"}, "tools": TOOLS}, 400, "invalid_request_error", "tool_choice"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "invalid_request_error", "tools"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, 400, "invalid_request_error", "thinking"),
        ({"max_token": 5}, 400, "invalid_request_error", "max_token"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "system", "content": "a"}]}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error", "messages"),
        ({"system": 5}, 400, "invalid_request_error", "system"),
        ({"system": [{"type": "text", "text": "a", "x": 1}]}, 400, "invalid_request_error", "system"),
        ({"messages": [USER[0] | {"name": "ann"}]}, 400, "invalid_request_error", "messages"),
        ({"messages": [*USER, called(caller={"type": "x"})]}, 400, "invalid_request_error", "messages"),
        ({"messages": [*USER, called(id=None), *USER]}, 400, "invalid_request_error", "messages"),
        ({"messages": [*USER, called(input="{}"), *USER]}, 400, "invalid_request_error", "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            400,
            "invalid_request_error",
            "messages",
        ),
        ({"tool_choice": {"type": "auto", "x": 1}, "tools": TOOLS}, 400, "invalid_request_error", "tool_choice"),
    ],
)
def test_what_is_not_supported_is_refused_by_name_in_anthropic_s_form(
    http: httpx.Client, options: dict[str, Any], status: int, kind: str, param: str
) -> None:
    found, body = refused(http, **options)
    assert (found, body["type"]) == (status, "error")
    assert (body["error"]["type"], body["error"]["param"]) == (kind, param)
    assert body["error"]["message"]


def test_a_body_that_is_nested_too_deeply_is_refused(http: httpx.Client) -> None:
    # These depths are around the largest that can be parsed: the chat made of a message has more levels than the
    # message.
    text = json.dumps({"max_tokens": 4, "messages": [*USER, called(input="DEEP"), *USER]})
    for depth in range(940, 1000):
        reply = http.post("/v1/messages", content=text.replace('"DEEP"', '{"a":' * depth + "1" + "}" * depth))
        assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error"), depth


def test_what_no_endpoint_sees_is_refused_in_the_form_of_its_path(http: httpx.Client) -> None:
    for method, path, status, kind in (
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
    ):
        reply = http.request(method, path)
        assert (reply.status_code, reply.json()["type"], reply.json()["error"]["type"]) == (status, "error", kind)
    large = http.post("/v1/messages", content=b" " * (MAX_BODY_BYTES + 1))
    assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
    other = http.post("/v1/messages", headers={"Host": "elsewhere.example"})
    assert (other.status_code, other.json()["type"]) == (421, "error")
    assert "type" not in http.get("/v1/messages_of").json()


def test_the_request_s_id_is_also_where_anthropic_s_clients_look_for_it(http: httpx.Client) -> None:
    body = {"messages": USER, "max_tokens": 2}
    replies = [
        http.post("/v1/messages", json=body, headers={"X-Request-Id": "mine"}),
        http.post("/v1/messages", json=body | {"stream": True}, headers={"X-Request-Id": "mine"}),
        http.post("/v1/messages/count_tokens", json={"messages": USER}, headers={"X-Request-Id": "mine"}),
        http.post("/v1/messages", json={}, headers={"X-Request-Id": "mine"}),
        http.get("/v1/messages", headers={"X-Request-Id": "mine"}),
    ]
    assert [reply.status_code for reply in replies] == [200, 200, 200, 400, 405]
    for reply in replies:
        assert (reply.headers["Request-Id"], reply.headers["X-Request-Id"]) == ("mine", "mine")
    assert "Request-Id" not in http.get("/v1/models").headers


def test_a_key_is_needed_in_either_header(rig: OpenAiRig, http: httpx.Client) -> None:
    with httpx.Client(base_url=rig.url) as anyone:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            status, body = refused(anyone, path)
            assert (status, body["type"], body["error"]["type"]) == (401, "error", "authentication_error")
        # If both headers are present, only Authorization counts.
        wrong = {"Authorization": "Bearer x", "X-Api-Key": key_of("ann")}
        assert anyone.post("/v1/messages", json={}, headers=wrong).status_code == 401
    assert http.get("/v1/models").status_code == 200


# --- without a server ---


def test_messages_become_those_of_a_chat() -> None:
    written = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "a", "cache_control": {}}, {"type": "text", "text": "b"}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "c"},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"x": 1}},
                {"type": "tool_use", "id": "t2", "name": "walk", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "r"}]},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
                {"type": "text", "text": "d"},
            ],
        },
    ]
    calls = [
        {"id": "t1", "type": "function", "function": {"name": "look", "arguments": {"x": 1}}},
        {"id": "t2", "type": "function", "function": {"name": "walk", "arguments": {}}},
    ]
    found = chat_of({"messages": written, "system": "s", "max_tokens": 5, "stop_sequences": ["x"]})
    assert found == {
        "max_tokens": 5,
        "stop": ["x"],
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "ab"},
            {"role": "assistant", "content": "c", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "t1", "content": "r"},
            {"role": "tool", "tool_call_id": "t2", "content": ""},
            {"role": "user", "content": "d"},
        ],
    }


def test_consecutive_turns_of_one_role_are_one() -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": "d"},
        {"role": "assistant", "content": called()["content"]},
        {"role": "assistant", "content": called(id="t2", name="walk")["content"]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "r"}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t2", "content": "s"}]},
        {"role": "user", "content": "e"},
        {"role": "user", "content": ""},
        {"role": "user", "content": "f"},
    ]
    user, assistant, *results, last = chat_of({"messages": turns, "max_tokens": 5})["messages"]
    assert user == {"role": "user", "content": "a\n\nbc"}
    assert (assistant["role"], assistant["content"]) == ("assistant", "d")
    assert [call["id"] for call in assistant["tool_calls"]] == ["t1", "t2"]
    assert [(result["role"], result["tool_call_id"]) for result in results] == [("tool", "t1"), ("tool", "t2")]
    assert last == {"role": "user", "content": "e\n\nf"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stop_sequences": ["a"] * 17}, "stop_sequences must be a string or a list of at most 16 strings"),
        ({"stop_sequences": [""]}, "stop_sequences ''; each must be"),
        ({"stop_sequences": ["a"], "tools": TOOLS}, "stop_sequences can't be combined with tools"),
        ({"tools": [{"name": "look"}]}, "tools[0]: input_schema must be a JSON Schema"),
        ({"tools": TOOLS[:1] * 129}, "tools must be a list of at most 128 tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "run"}}, "tool_choice: name 'run' must be that of"),
        ({"messages": [*USER, called(name=None), *USER]}, "messages[1]: name must be a string"),
        ({"messages": [*USER, called()]}, "messages end with a tool_use; send its tool_result"),
        (
            {"messages": [*USER, called(), {"role": "assistant", "content": "x"}]},
            "messages[2]: a text after a tool_use",
        ),
        ({"messages": [*USER, *[called()] * 129, *USER]}, "messages[129]: a turn has at most 128 blocks"),
        ({"max_tokens": 0}, "max_tokens = 0; send 1 or more"),
        ({"output_config": {"effort": "high"}}, "output_config: 'effort' is not supported"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format must have the type json_schema"),
        ({"output_config": FORM, "stop_sequences": ["a"]}, "stop_sequences can't be combined with output_config"),
        ({"speed": "fast"}, "speed"),
        ({"inference_geo": "eu"}, "inference_geo"),
    ],
)
def test_errors_use_the_words_of_the_messages(options: dict[str, Any], text: str) -> None:
    reader = PromptReader(open_model(TINY_MODEL).tokenizer(), 160)
    body = {"messages": USER, "max_tokens": 4} | options
    (_, _, message, param, _) = read_message(reader, json.dumps(body).encode(), True, 1, [MODEL])["error"]
    assert message.startswith(text), message
    assert param == re.match(r"\w+", text)[0]  # type: ignore[index]


def test_a_text_and_calls_are_blocks_one_behind_the_other() -> None:
    events = MessageEvents("r", "m", 9, None)
    pieces = [
        AnswerPiece(" "),
        AnswerPiece("Let me look."),
        AnswerPiece("\n", calls=[CallPart(0, "look", "")]),
        AnswerPiece("", calls=[CallPart(0, "", '{"x"'), CallPart(0, "", ": 1}"), CallPart(1, "walk", "{}")]),
        AnswerPiece("", replays=2, finish="tool_calls"),
    ]
    sent = [*events.begin(), *(event for piece in pieces for event in events.add(piece))]
    sent += events.end("tool_calls", TokenCounts(9, 7, 4))
    whole = added_up(sent)
    assert whole["content"] == [
        {"type": "text", "text": " Let me look.\n"},
        {"type": "tool_use", "id": "toolu_r_0", "name": "look", "input": {"x": 1}},
        {"type": "tool_use", "id": "toolu_r_1", "name": "walk", "input": {}},
    ]
    assert events.content == whole["content"]
    assert (whole["stop_reason"], whole["usage"]["input_tokens"]) == ("tool_use", 5)
    assert (whole["usage"]["cache_read_input_tokens"], whole["usage"]["output_tokens"]) == (4, 7)
    assert sent[-2]["gpulease"] == {"replays": 2}


def test_a_call_that_is_cut_off_is_left_out_of_the_whole() -> None:
    events = MessageEvents("r", "m", 9, 5)
    list(events.add(AnswerPiece("", calls=[CallPart(0, "look", '{"x": ')], finish="length")))
    whole = events.whole("length", TokenCounts(9, 7, 0))
    assert (whole["content"], whole["stop_reason"], whole["gpulease"]) == ([], "max_tokens", {"seed": 5})


def test_an_answer_without_text_has_an_empty_one() -> None:
    events = MessageEvents("r", "m", 9, None)
    whole = added_up([*events.begin(), *events.add(AnswerPiece(" ")), *events.end("stop", TokenCounts(9, 1, 0))])
    assert (whole["content"], whole["stop_reason"]) == ([{"type": "text", "text": " "}], "end_turn")


def test_a_failure_in_a_stream_is_an_event() -> None:
    error = ApiError(503, "pool_exhausted", "No room.", None, 2.0)
    assert MessageEvents("r", "m", 9, None).fail(error) == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "No room.", "param": None, "code": "pool_exhausted"},
        "gpulease": {"status": 503, "retry_after": 2},
    }
    assert error_body(ApiError(500, "x", "y"))["error"]["type"] == "api_error"
    assert error_body(ApiError(422, "x", "y"))["error"]["type"] == "invalid_request_error"


def test_each_parameter_is_used_ignored_or_refused() -> None:
    for name, parameter in PARAMETERS.items():
        assert (parameter.is_used, parameter.is_ignored).count(True) <= 1, name
