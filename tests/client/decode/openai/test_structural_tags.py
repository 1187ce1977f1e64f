"""Structural tags: the grammar accepts only text with whole tags, in each of the forms in which they are written."""

import json
from typing import Any

import pytest

from gpulease.client.decode.openai.api_errors import ApiError
from gpulease.client.decode.openai.structural_tags import structural_tags
from gpulease.client.decode.text.grammar import check_grammar

from .test_tool_formats import accepts

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
ADD = {"begin": "<f=add>", "schema": SCHEMA, "end": "</f>"}
GO = {"begin": "[go", "schema": {"type": "boolean"}, "end": "]"}
STRUCTURES: dict[str, Any] = {"triggers": ["<f=", "[go"], "structures": [ADD, ADD | {"begin": "<f=sub>"}, GO]}
TAGS = [
    {"type": "tag", "begin": "<r>", "content": {"type": "regex", "pattern": "[ab]{2}"}, "end": "</r>"},
    {"begin": "<rc>", "content": {"type": "const_string", "value": "7"}, "end": ""},
    {"begin": "<rj>", "content": {"type": "json_schema", "json_schema": {"type": "null"}}, "end": "."},
]


def grammar(value: Any, special: dict[str, int] | None = None) -> str:
    text = structural_tags("structural_tag", value, "structural_tag").grammar((special or {}).get)
    check_grammar(text)
    return text


@pytest.mark.parametrize("value", [STRUCTURES, json.dumps(STRUCTURES), STRUCTURES | {"type": "structural_tag"}])
def test_text_is_free_outside_of_tags(value: Any) -> None:
    text = grammar(value)
    tag = '<f=add>{"x": 1}</f>'
    for whole in ("", "a <f and [g", f"a {tag}", f"{tag}{tag} b", '[gotrue] <f=sub>{"x":2}</f>'):
        assert accepts(text, whole), whole
    for part in ("<f=", "<f=mul>", '<f=add>{"x": "a"}</f>', "[go]", tag[:-1], "a <f= b"):
        assert not accepts(text, part), part


@pytest.mark.parametrize("is_required", [False, True])
@pytest.mark.parametrize("is_single", [False, True])
def test_a_format_says_how_many_tags_there_are(is_required: bool, is_single: bool) -> None:
    counts = {"at_least_one": is_required, "stop_after_first": is_single}
    text = grammar({"format": {"type": "triggered_tags", "triggers": ["<r"], "tags": TAGS, **counts}})
    assert all(accepts(text, f"a {tag}") for tag in ("<r>ab</r>", "<rc>7", "<rj>null."))
    assert not any(accepts(text, tag) for tag in ("<r>abc</r>", "<rc>8", "<rj>0."))
    assert accepts(text, "a") is not is_required
    assert accepts(text, "<r>ab</r> b<rc>7") is not is_single


def test_a_trigger_that_is_a_special_token_is_that_token() -> None:
    text = grammar(STRUCTURES, {"[go": 3})
    assert "TEXT? <[3]> (tag_2)" in text
    # The tag's name as text does not begin a tag.
    assert accepts(text, "[go")


def of_format(**members: Any) -> dict[str, Any]:
    return {"format": {"type": "triggered_tags", "triggers": ["<r"], "tags": TAGS} | members}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("{", "structural_tag must be an object, or a string with its JSON"),
        (5, "structural_tag must be an object, or a string with its JSON, not 5"),
        ({"format": {"type": "sequence"}}, "structural_tag.format must have the type triggered_tags, not 'sequence'"),
        (of_format(excludes=["x"]), "structural_tag.format.'excludes' is not supported"),
        (of_format(at_least_one=1), "structural_tag.format.at_least_one must be true or false"),
        (of_format(tags=[]), "structural_tag.format.tags must be a list of 1 to 128 objects"),
        (
            of_format(tags=[TAGS[0] | {"content": {"type": "any_text"}}]),
            "structural_tag.format.tags[0].content must have the type json_schema, regex or const_string, not 'any",
        ),
        (STRUCTURES | {"triggers": []}, "structural_tag.triggers must be a list of 1 to 128 strings"),
        (STRUCTURES | {"triggers": ["<f=", "<f", "[go"]}, "structural_tag.triggers[1] is part of another trigger"),
        (STRUCTURES | {"triggers": ["<f="]}, "structural_tag.structures[2].begin must begin with one of the triggers"),
        (STRUCTURES | {"triggers": ["<f=", "[go", "!"]}, "structural_tag.triggers: no tag begins with '!'"),
        (STRUCTURES | {"structures": [ADD | {"x": 1}]}, "structural_tag.structures[0].'x' is not supported"),
        (STRUCTURES | {"structures": [ADD | {"schema": 1}]}, "structural_tag.structures[0] must have a JSON Schema"),
        (STRUCTURES | {"structures": [ADD | {"end": None}]}, "structural_tag.structures[0].end must be a string"),
        (STRUCTURES | {"structures": [ADD | {"begin": "\ud800"}]}, "structural_tag.structures[0].begin must be a str"),
    ],
)
def test_what_is_wrong_is_refused_by_name(value: Any, text: str) -> None:
    with pytest.raises(ApiError) as refused:
        structural_tags("structural_tag", value, "structured_outputs")
    assert refused.value.message.startswith(text)
    assert (refused.value.status, refused.value.param) == (400, "structured_outputs")
