"""Formats of calls: the grammar accepts only what the family writes, and the parser reads it in any pieces."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease.client.decode import TINY_MODEL, open_model
from gpulease.client.decode.openai.tool_formats import (
    FORMATS,
    HERMES,
    LLAMA_3,
    MISTRAL,
    Tool,
    ToolCallParser,
    ToolFormat,
    format_of,
    tool_grammar,
)
from gpulease.client.decode.text.grammar import _library, _library_tokenizer, _limits, check_grammar

TOOLS = (
    Tool(
        "look",
        {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False},
    ),
    Tool(
        "say",
        {"$ref": "#/$defs/words", "$defs": {"words": {"type": "object", "properties": {"words": {"type": "string"}}}}},
    ),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(["look", "say"]), st.dictionaries(st.text(max_size=4), VALUES)), min_size=1, max_size=3
)


def written(form: ToolFormat, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Return what a model of the family writes."""
    texts = [form.head(name) + json.dumps(arguments, ensure_ascii=False) + "}" for name, arguments in calls]
    return form.trigger + form.first + form.between.join(texts) + form.last


@pytest.mark.parametrize("form", FORMATS, ids=[form.name for form in FORMATS])
@settings(max_examples=60, deadline=None)
@given(calls=CALLS, text=st.text(alphabet="ab <>[]\n", max_size=12), cuts=st.sets(st.integers(0, 300)))
def test_calls_are_read_in_any_pieces(
    form: ToolFormat, calls: list[tuple[str, dict[str, Any]]], text: str, cuts: set[int]
) -> None:
    before = text if form.trigger else ""
    whole = before + written(form, calls)
    parser, shown, names, arguments = ToolCallParser(form), "", list[str](), list[str]()
    places = [0, *sorted(cut for cut in cuts if cut < len(whole)), len(whole)]
    for begin, end in itertools.pairwise(places):
        piece, parts = parser.add(whole[begin:end])
        shown += piece
        for part in parts:
            if part.name:
                assert part.index == len(names)
                names.append(part.name)
                arguments.append("")
            arguments[part.index] += part.arguments
    assert shown + parser.end() == before
    assert [(name, json.loads(its)) for name, its in zip(names, arguments, strict=True)] == calls


@pytest.mark.parametrize("text", ["", "Hello", "<tool", "a < b", "[1, 2]", "\n<tool_cal>"])
@pytest.mark.parametrize("form", FORMATS, ids=[form.name for form in FORMATS])
def test_text_stays_text(form: ToolFormat, text: str) -> None:
    parser = ToolCallParser(form)
    shown = "".join(parser.add(letter)[0] for letter in text) + parser.end()
    assert (shown, parser.calls) == (text, 0)


def accepts(grammar: str, text: str) -> bool:
    """Return whether the grammar accepts the whole text, token by token, and may end there."""
    tokenizer = open_model(TINY_MODEL).tokenizer()
    library = _library_tokenizer(tokenizer, tokenizer.vocabulary, [0])
    matcher = _library().LLMatcher(library, grammar, log_level=0, limits=_limits())
    assert not matcher.is_error(), matcher.get_error()
    taken = all(matcher.consume_token(token) for token in tokenizer.encode(text, begins=False))
    return bool(taken and matcher.is_accepting())


@pytest.mark.parametrize("form", FORMATS, ids=[form.name for form in FORMATS])
def test_the_grammar_takes_what_the_parser_reads_and_valid_arguments_alone(form: ToolFormat) -> None:
    def grammar(**options: Any) -> str:
        given: dict[str, Any] = {"is_required": True, "is_parallel": True, "trigger_token": None, "answer": ""}
        text = tool_grammar(form, TOOLS, **given | options)
        check_grammar(text)
        return text

    one, two = written(form, [("look", {"x": 5})]), written(form, [("look", {"x": 5}), ("say", {"words": "a b"})])
    wrong = written(form, [("look", {"x": "5"})])
    for options in ({}, {"is_required": False}, {"is_required": False, "answer": '"none"'}):
        assert accepts(grammar(**options), one)
        assert accepts(grammar(**options), two)
        assert not accepts(grammar(**options), wrong)
        assert not accepts(grammar(**options), written(form, [("walk", {})]))
    assert not accepts(grammar(is_parallel=False), two)
    assert not accepts(grammar(), "Hello")
    assert accepts(grammar(is_required=False), "Hello, there is nothing to look at.")
    assert accepts(grammar(is_required=False, answer='"none"'), "none")
    assert not accepts(grammar(is_required=False, answer='"none"'), "Hello")


def test_a_template_shows_its_format() -> None:
    assert format_of("{% if tools %}<tool_call>{% endif %}") is HERMES
    assert format_of("{% if tools %}[TOOL_CALLS]{% endif %}") is MISTRAL
    assert format_of('{% if tools %}{"name": x, "parameters": y}{% endif %}') is LLAMA_3
    assert format_of("<tool_call> without any") is None
    assert format_of("{% if tools %}in no known way{% endif %}") is None
