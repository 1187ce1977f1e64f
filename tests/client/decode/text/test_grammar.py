"""Grammars: what is refused when, whose masks wait for whom, and that a mask is the next token's."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from gpulease.client.decode import TINY_MODEL, open_model
from gpulease.client.decode.decode_errors import GrammarRefused
from gpulease.client.decode.text.grammar import (
    MASK_THREADS,
    MAX_GRAMMAR_BYTES,
    Grammars,
    check_grammar,
    choice_rule,
    closed,
    json_rule,
    regex_rule,
)

CHECKPOINT = open_model(TINY_MODEL)
TOKENIZER = CHECKPOINT.tokenizer()


def json_grammar(schema: dict[str, Any]) -> str:
    return f"start: {json_rule(schema)}"


DIGIT = json_grammar({"type": "integer", "minimum": 0, "maximum": 9})
AMBIGUOUS = json_grammar(
    {"anyOf": [{"type": "object", "properties": {"a": {}, f"b{i}": {"type": "integer"}}} for i in range(600)]}
)
"""Compiles, but its first step has more items than the limits allow."""


def played(part: Callable[[Grammars], Awaitable[None]]) -> None:
    async def tokenizer() -> Any:
        return TOKENIZER

    async def play() -> None:
        grammars = Grammars(tokenizer, CHECKPOINT.config.vocabulary, frozenset(CHECKPOINT.config.end_tokens))
        try:
            await part(grammars)
        finally:
            await grammars.stop()

    asyncio.run(play())


def allowed(mask: np.ndarray[Any, Any]) -> list[bytes]:
    tokens = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    return sorted(TOKENIZER.bytes_of(int(token)) for token in tokens)


def test_masks_follow_the_tokens_and_forks_do_not_share_them() -> None:
    async def part(grammars: Grammars) -> None:
        masks, other = await grammars.compile("ann", DIGIT), await grammars.compile("ann", DIGIT)
        assert len(masks.mask) == grammars.words
        assert allowed(masks.mask) == [b"%d" % digit for digit in range(10)]
        ready = asyncio.Event()
        masks.accept(TOKENIZER.encode("7", begins=False)[0], ready.set)
        assert not masks.is_ready
        await ready.wait()
        assert masks.is_ready
        # Nothing may follow but the end, which has no text.
        assert allowed(masks.mask) == [b""]
        assert len(allowed(other.mask)) == 10

    played(part)


@pytest.mark.parametrize(
    "grammar",
    ["start: missing", json_grammar({"type": "integer", "multipleOf": "x"}), f'start: "{"x" * MAX_GRAMMAR_BYTES}"'],
)
def test_grammars_that_are_wrong_are_refused_before_anything_is_computed(grammar: str) -> None:
    with pytest.raises(GrammarRefused):
        check_grammar(grammar)


@pytest.mark.parametrize(
    ("rule", "texts", "others"),
    [
        (regex_rule(r"\d{3}-[a-z]+"), ["555-ab"], ["555-", "55-ab", " 555-ab"]),
        (regex_rule(r"a/b|a\/c"), ["a/b", "a/c"], ["a", "ab"]),
        (regex_rule("a\nb\\\nc"), ["a\nb\nc"], ["anbnc", "a\\nb"]),
        (regex_rule(r"^yes$"), ["yes"], ["yess", "^yes$"]),
        (
            choice_rule(["a", "ab", 'c"/\n', "\x7f", "\u20ac\U0001f600"]),
            ["a", "ab", 'c"/\n', "\x7f", "\u20ac\U0001f600"],
            ["b"],
        ),
    ],
)
def test_regular_expressions_and_choices_match_whole_answers(rule: str, texts: list[str], others: list[str]) -> None:
    import llguidance

    check_grammar(f"start: {rule}")
    tokenizer = llguidance.LLTokenizer("byte")

    def is_matched(text: str) -> bool:
        matcher = llguidance.LLMatcher(tokenizer, f"start: {rule}", log_level=0)
        return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()

    assert [text for text in (*texts, *others) if is_matched(text)] == texts


@pytest.mark.parametrize("regex", ["(", "a(?=b)", "a\\", "["])
def test_regular_expressions_that_can_t_be_followed_are_refused(regex: str) -> None:
    with pytest.raises(GrammarRefused):
        check_grammar(f"start: {regex_rule(regex)}")


def test_a_grammar_that_needs_too_much_work_fails_alone_wherever_that_shows() -> None:
    async def part(grammars: Grammars) -> None:
        failed = asyncio.get_running_loop().create_future()
        try:
            masks = await grammars.compile("ann", AMBIGUOUS)
        except GrammarRefused:
            return
        masks.on_failed = failed.set_result
        masks.accept(TOKENIZER.encode("{", begins=False)[0], lambda: failed.set_exception(AssertionError("ready")))
        assert isinstance(await failed, GrammarRefused)
        assert not masks.is_ready
        # Another request of the same threads.
        assert (await grammars.compile("ann", DIGIT)).is_ready

    played(part)


def test_one_tenant_s_work_leaves_a_thread_to_the_others() -> None:
    async def part(grammars: Grammars) -> None:
        release = threading.Event()
        blocked = [grammars.run("ann", release.wait) for _ in range(3 * MASK_THREADS)]
        try:
            assert await asyncio.wait_for(grammars.run("bob", lambda: 5), 20) == 5
            assert not any(one.done() for one in blocked)
        finally:
            release.set()
        assert await asyncio.gather(*blocked) == [True] * len(blocked)

    played(part)


@pytest.mark.parametrize(
    ("schema", "closed_parts"),
    [
        ({"type": "object"}, 0),
        ({"properties": {"a": {"properties": {"b": {}}}}, "required": ["a"]}, 2),
        ({"properties": {"a": {}}, "additionalProperties": True}, 0),
        (
            {
                "$defs": {"A": {"properties": {}}},
                "anyOf": [{"$ref": "#/$defs/A", "description": "a"}, {"type": "null"}],
            },
            1,
        ),
        ({"type": "array", "items": {"properties": {"a": {}}}, "prefixItems": [True]}, 1),
        # A property may be called like a keyword.
        ({"properties": {"allOf": {"type": "integer"}, "anyOf": {}}}, 1),
        # What one part lists, the other would forbid.
        ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, 0),
        ({"oneOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, 0),
        ({"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]}, 0),
        ({"$defs": {"A": {"properties": {"a": {}}}}, "$ref": "#/$defs/A", "properties": {"b": {}}}, 0),
        ({"properties": {"a": {}}, "required": ["b"]}, 0),
        ({"properties": {}, "minProperties": 1}, 0),
    ],
)
def test_objects_have_the_members_that_they_list(schema: dict[str, Any], closed_parts: int) -> None:
    before = json.dumps(schema)
    assert json.dumps(closed(schema)).count('"additionalProperties": false') == closed_parts
    assert json.dumps(schema) == before, "the template may show the same schema"


def test_a_schema_of_any_depth_is_closed() -> None:
    schema: dict[str, Any] = {"properties": {"a": {}}}
    for _ in range(200):
        schema = {"properties": {"a": schema}}
    assert json.dumps(closed(schema)).count("additionalProperties") == 201
