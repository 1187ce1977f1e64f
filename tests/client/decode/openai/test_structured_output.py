"""Answers by a schema and calls of tools, with OpenAI's own client: valid, or cut off by their length and called so."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from gpulease.client.decode import TINY_MODEL
from gpulease.client.decode.text import grammar
from helpers.daemon import Daemon
from helpers.decode.openai_rig import MODEL, OpenAiRig, openai_rig
from helpers.decode.text_jobs import PANICKING, panic
from helpers.decode.tiny_copies import HERMES_TEMPLATE

if TYPE_CHECKING:
    import openai

USER = [{"role": "user", "content": "Where?"}]
PLACE = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "side": {"enum": ["left", "right"]}},
    "required": ["x", "side"],
    "additionalProperties": False,
}
SHORT = {"type": "object", "properties": {"go": {"type": "boolean"}}, "required": ["go"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": PLACE}},
    {"type": "function", "function": {"name": "walk", "parameters": SHORT}},
]
SCHEMAS = {"look": PLACE, "walk": SHORT}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a template that renders tools."""
    folder = tmp_path_factory.mktemp("tiny")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.copy(Path(TINY_MODEL) / name, folder)
    settings = json.loads((Path(TINY_MODEL) / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": HERMES_TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def rig(shared_daemon: Daemon, model: Path) -> Iterator[OpenAiRig]:
    # Behind a front, as usual: the answers pass through both processes.
    with openai_rig(shared_daemon, wait_s=60.0, http_processes=1, model=model) as running:
        yield running


def chat(client: openai.OpenAI, **options: Any) -> Any:
    given: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 60, "temperature": 1, "seed": 3}
    return client.chat.completions.create(**given | options)


def by_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_is_valid_by_its_schema(client: openai.OpenAI, is_stream: bool) -> None:
    found = set()
    for seed in range(3):
        done = chat(client, seed=seed, response_format=by_schema(PLACE), stream=is_stream)
        if is_stream:
            chunks = [chunk.choices[0] for chunk in done]
            text, finish = "".join(chunk.delta.content or "" for chunk in chunks), chunks[-1].finish_reason
        else:
            text, finish = done.choices[0].message.content, done.choices[0].finish_reason
        assert finish == "stop"
        jsonschema.validate(json.loads(text), PLACE)
        found.add(text)
    assert len(found) > 1


def test_an_answer_is_one_of_the_choices_or_matches_the_expression(client: openai.OpenAI) -> None:
    # Import it here: every process of a run imports this file, and the client takes half a second.
    import openai

    kinds = ["billing / invoice", "technical", "other"]
    bodies: list[dict[str, Any]] = [{"structured_outputs": {"choice": kinds}}, {"guided_choice": kinds}]
    for body in bodies:
        answers = [chat(client, seed=seed, extra_body=body).choices[0] for seed in range(3)]
        assert {answer.message.content for answer in answers} <= set(kinds)
        assert {answer.finish_reason for answer in answers} == {"stop"}
    done = client.completions.create(
        model=MODEL,
        prompt="Version",
        max_tokens=40,
        seed=3,
        extra_body={"structured_outputs": {"regex": r"\d\.\d{2}/x"}},
    )
    assert re.fullmatch(r"\d\.\d{2}/x", done.choices[0].text)
    # As in vLLM's examples: the stop is part of what the expression matches.
    mail = {"guided_regex": r"\w{1,9}@\w{1,9}\.com\n"}
    (choice,) = client.completions.create(
        model=MODEL, prompt="Mail", max_tokens=60, seed=3, stop=["\n"], extra_body=mail
    ).choices
    assert re.fullmatch(r"\w{1,9}@\w{1,9}\.com", choice.text)
    assert choice.finish_reason == "stop"
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, extra_body={"guided_regex": "a(?=b)"})
    assert (refused.value.param, refused.value.code) == ("guided_regex", "grammar_refused")


def test_an_answer_has_the_grammar_in_ebnf_or_lark(client: openai.OpenAI) -> None:
    import openai

    ebnf = 'root ::= list\nlist ::= "[" (item ("," item)*)? "]"\nitem ::= [a-c]{1,2} | list\n'
    lark = 'start: list\nlist: "[" [item ("," item)*] "]"\nitem: WORD | list\nWORD: "a".."c"~1..2\n'
    bodies: list[dict[str, Any]] = [
        {"structured_outputs": {"grammar": lark}},
        {"grammar": ebnf},
        {"guided_grammar": ebnf},
    ]
    finishes = set()
    for seed, body in enumerate(bodies * 2):
        (choice,) = chat(client, seed=seed, max_tokens=60, extra_body=body).choices
        assert set(choice.message.content) <= set("[],abc")
        finishes.add(choice.finish_reason)
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(re.sub(r"([a-c]+)", r'"\1"', choice.message.content)), list)
    assert "stop" in finishes
    for name, text in (("grammar", 'root ::= "a" root'), ("ebnf", "root ::= ["), ("guided_grammar", "start: %json {}")):
        with pytest.raises(openai.BadRequestError) as refused:
            chat(client, extra_body={name: text})
        assert (refused.value.param, refused.value.code) == (name, "grammar_refused")
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, tools=TOOLS, extra_body={"grammar": ebnf})
    assert refused.value.param == "grammar"


def test_an_answer_has_its_tags_in_their_form(client: openai.OpenAI) -> None:
    import openai

    # A letter that the model writes often.
    tags = {"triggers": ["e"], "structures": [{"begin": "e=", "schema": PLACE, "end": ";"}]}
    form = {"type": "structural_tag", **tags}
    found = 0
    for seed, body in enumerate(
        ({"response_format": form}, {"structured_outputs": {"structural_tag": json.dumps(form)}})
    ):
        (choice,) = chat(client, seed=seed, max_tokens=120, extra_body=body).choices
        free, *tagged = choice.message.content.split("e=")
        assert "e" not in free.removesuffix("e")
        for number, rest in enumerate(tagged, 1):
            value, is_whole, free = rest.partition(";")
            if not is_whole:
                # The last one may be cut off.
                assert (choice.finish_reason, number) == ("length", len(tagged))
                break
            jsonschema.validate(json.loads(value), PLACE)
            assert "e" not in free.removesuffix("e")
            found += 1
    assert found
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, tools=TOOLS, extra_body={"structural_tag": tags})
    assert refused.value.param == "structural_tag"


def test_an_answer_that_does_not_fit_says_so(client: openai.OpenAI) -> None:
    """Every finish reason is one of the two, and `stop` means that the answer is valid."""
    schema = {"type": "array", "items": {"type": "string"}}
    finishes = set()
    for seed in range(8):
        done = chat(client, seed=seed, response_format=by_schema(schema), max_tokens=4 + 3 * seed)
        finishes.add(done.choices[0].finish_reason)
        if done.choices[0].finish_reason == "stop":
            jsonschema.validate(json.loads(done.choices[0].message.content), schema)
    assert "length" in finishes
    assert finishes <= {"length", "stop"}


def test_json_objects_and_completions_have_forms_too(client: openai.OpenAI) -> None:
    done = chat(client, response_format={"type": "json_object"}, max_tokens=80, temperature=0)
    assert done.choices[0].finish_reason != "stop" or isinstance(json.loads(done.choices[0].message.content), dict)
    assert done.choices[0].message.content.startswith("{")
    extra = {"response_format": by_schema({"enum": ["yes", "no"]})}
    answer = client.completions.create(model=MODEL, prompt="Is it?", max_tokens=20, extra_body=extra).choices[0]
    assert (answer.text in ('"yes"', '"no"'), answer.finish_reason) == (True, "stop")


def test_forms_are_the_same_in_any_company_and_after_a_loss(rig: OpenAiRig, client: openai.OpenAI) -> None:
    asked = {"response_format": by_schema(PLACE), "n": 3, "logprobs": True}

    def answers() -> list[Any]:
        return [(one.message.content, one.logprobs) for one in chat(client, **asked).choices]

    alone = answers()
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(chat, client, seed=seed, max_tokens=30) for seed in (5, 6)]
        again = pool.submit(answers)
        region = rig.do(lambda: rig.decoder.regions.pools["ann"].region)
        rig.wait_for(region.revoke("because"))
        assert again.result(60) == alone
        assert all(other.result(60) for other in others)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_a_required_call_is_valid_by_the_tool_s_schema(client: openai.OpenAI, choice: Any) -> None:
    asked = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 110}
    for seed in range(2):
        (answer,) = chat(client, seed=seed, **asked).choices
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
        (call,) = answer.message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
        assert choice == "required" or call.function.name == "look"
        assert call.id
        assert call.type == "function"


def test_streamed_calls_are_those_of_the_whole(client: openai.OpenAI) -> None:
    asked = {"tools": TOOLS, "tool_choice": "required", "seed": 11, "max_tokens": 90}
    whole = chat(client, **asked).choices[0]
    names, arguments, finish = dict[int, str](), dict[int, str](), None
    for chunk in chat(client, stream=True, **asked):
        (choice,) = chunk.choices
        finish = choice.finish_reason or finish
        for part in choice.delta.tool_calls or []:
            if part.function.name:
                assert part.id
                names[part.index], arguments[part.index] = part.function.name, ""
            arguments[part.index] += part.function.arguments
    calls = whole.message.tool_calls
    assert [(names[at], arguments[at]) for at in names] == [
        (one.function.name, one.function.arguments) for one in calls
    ]
    assert finish == whole.finish_reason


def test_tools_may_be_left_alone(client: openai.OpenAI) -> None:
    """With "auto", the answer is text or a valid call; with "none", the prompt does not even contain the tools."""
    for seed in range(3):
        (answer,) = chat(client, seed=seed, tools=TOOLS, max_tokens=40).choices
        for call in answer.message.tool_calls or []:
            if answer.finish_reason != "length":
                jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    plain, none = chat(client), chat(client, tools=TOOLS, tool_choice="none")
    assert none.choices[0].message.content == plain.choices[0].message.content
    assert none.usage == plain.usage


def test_calls_and_their_answers_are_messages_of_the_template(client: openai.OpenAI) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"x": 1, "side": "left"}'}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "Nothing."},
    ]
    assert chat(client, messages=messages, max_tokens=2).usage.prompt_tokens > chat(client).usage.prompt_tokens


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"response_format": by_schema({"type": "integer", "multipleOf": "x"})}, "response_format"),
        (
            {"response_format": by_schema({"not": {"type": "string"}, "type": "array", "uniqueItems": True})},
            "response_format",
        ),
        ({"response_format": by_schema({"enum": ["x" * 70_000]})}, "response_format"),
        ({"response_format": by_schema(PLACE), "stop": ["a"]}, "stop"),
        ({"tools": TOOLS, "extra_body": {"min_tokens": 3}}, "min_tokens"),
    ],
)
def test_forms_that_can_t_be_kept_are_refused_by_name(client: openai.OpenAI, options: Any, param: str) -> None:
    import openai

    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, **options)
    assert refused.value.param == param


def test_a_schema_that_explodes_is_refused_in_bounded_time_while_others_are_served(
    rig: OpenAiRig, client: openai.OpenAI
) -> None:
    import openai

    many = [
        {"type": "object", "properties": {"a": {"type": "string"}, f"b{i}": {"type": "integer"}}} for i in range(400)
    ]
    nested = [{"anyOf": [{"type": "object", "properties": {f"p{i}_{j}": {}}} for j in range(8)]} for i in range(8)]
    with ThreadPoolExecutor(1) as pool, rig.client("bob") as other:
        for schema in ({"anyOf": many}, {"allOf": nested}):
            served = pool.submit(chat, other, max_tokens=10)
            began = time.monotonic()
            with pytest.raises(openai.BadRequestError):
                chat(client, response_format=by_schema(schema))
            assert time.monotonic() - began < 20
            assert served.result(60).choices[0].finish_reason
    assert rig.do(lambda: rig.decoder.scheduler.tenants["ann"].is_idle)


def test_a_panic_of_the_grammar_s_library_costs_its_own_request_alone(
    shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It panics in the check, and in the mask of a step that also has other sequences."""
    import openai

    with (
        openai_rig(shared_daemon, wait_s=60.0, http_processes=1) as rig,
        rig.client() as client,
        rig.client("bob") as other,
        ThreadPoolExecutor(1) as pool,
    ):
        expected = chat(other, max_tokens=30).choices[0].message.content
        served = pool.submit(chat, other, max_tokens=30)
        with pytest.raises(openai.BadRequestError, match="made a library of the server fail") as refused:
            chat(client, extra_body={"grammar": PANICKING})
        assert refused.value.code == "text_not_read"
        assert served.result(60).choices[0].message.content == expected

        computed = grammar._next_mask
        calls = count(1)

        def next_mask(*arguments: Any) -> Any:
            return panic() if next(calls) == 3 else computed(*arguments)

        monkeypatch.setattr(grammar, "_next_mask", next_mask)
        served = pool.submit(chat, other, max_tokens=30)
        with pytest.raises(openai.BadRequestError, match="the library that computes masks failed") as refused:
            chat(client, response_format=by_schema(PLACE))
        assert refused.value.code == "grammar_refused"
        assert served.result(60).choices[0].message.content == expected
        # The panic at the third token ended the request and returned its blocks.
        assert rig.do(lambda: rig.decoder.scheduler.tenants["ann"].is_idle)
        answer = chat(client, response_format=by_schema(PLACE)).choices[0].message.content
        jsonschema.validate(json.loads(answer), PLACE)


def test_a_model_without_tools_in_its_template_refuses_them(shared_daemon: Daemon) -> None:
    import openai

    with (
        openai_rig(shared_daemon, wait_s=60.0) as plain,
        plain.client() as client,
        pytest.raises(openai.BadRequestError) as refused,
    ):
        chat(client, tools=TOOLS)
    assert refused.value.param == "tools"


def test_a_named_tool_is_called_once_with_the_members_it_lists(client: openai.OpenAI) -> None:
    """Clients use the single call as the answer, and a tool's schema rarely forbids other members."""
    schema = {name: value for name, value in PLACE.items() if name != "additionalProperties"}
    asked = {"tools": [{"type": "function", "function": {"name": "look", "parameters": schema}}]}
    for seed in range(3):
        choice = {"type": "function", "function": {"name": "look"}}
        done = chat(client, **asked, tool_choice=choice, seed=seed, max_tokens=120).choices[0]
        (call,) = done.message.tool_calls
        assert done.finish_reason == "tool_calls"
        jsonschema.validate(json.loads(call.function.arguments), PLACE)
