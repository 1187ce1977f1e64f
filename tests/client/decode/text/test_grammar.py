"""Grammars: what is refused when, whose masks wait for whom, and that a mask is the next token's."""

import asyncio
import json
import re
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gpulease.client.decode import TINY_MODEL, open_model
from gpulease.client.decode.decode_errors import GrammarRefused, LibraryPanicked
from gpulease.client.decode.decode_log import DecodeLog
from gpulease.client.decode.text import grammar as grammar_module
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
from helpers.decode.text_jobs import PANICKING_LARK, fail, panic

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
        grammars = Grammars(
            tokenizer, CHECKPOINT.config.vocabulary, frozenset(CHECKPOINT.config.end_tokens), DecodeLog()
        )
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


NESTED: dict[str, Any] = {"$ref": "#/$defs/n"}
EXPLODING = [
    f"start: {regex_rule('a{1001}{1001}{1001}')}",
    f"start: {regex_rule('(?:(a{1,300}){300}|b){2}')}",
    f"start: {regex_rule('a{100001,}')}",
    f"start: {regex_rule('a{9' + '9' * 5000 + '}')}",
    f"start: {regex_rule('([]{}]{1001}x[[:alpha:](]{3}){100}')}",
    f"start: {regex_rule('(a{60000}|b{60000})')}",
    f"start: {regex_rule('(?x)#[' + chr(10) + 'a{1001}{1001}')}",
    f'start: called | answer\ncalled: "a"\nanswer: {regex_rule("a{1001}{1001}")}',
    json_grammar({"pattern": "^a{1001}{1001}$"}),
    json_grammar({"$ref": "#/examples/0", "examples": [{"type": "string", "pattern": "a{1001}{1001}"}]}),
    json_grammar({"patternProperties": {"^a{1001}{1001}$": {}}}),
    json_grammar({"prefixItems": [{"pattern": "a{30000}b"}, {"pattern": "a{40000}b"}, {"pattern": "a{40000}c"}]}),
    json_grammar({"type": "string", "minLength": 10**6, "pattern": "^a*$"}),
    json_grammar({"type": "integer", "multipleOf": 1_000_003}),
    # The library takes a divisor's absolute value.
    json_grammar({"type": "integer", "multipleOf": -1_000_003}),
    json_grammar({"type": "number", "multipleOf": 1.000003}),
    json_grammar({"allOf": [{"type": "integer", "multipleOf": divisor} for divisor in (101, 103, 107, 109)]}),
    json_grammar({"prefixItems": [{"type": "integer", "multipleOf": 86400, "maximum": n} for n in (10**9, 10**10)]}),
    json_grammar({"enum": [f"entry {number}" for number in range(10_000)]}),
    f"start: {regex_rule('(?=a{9})b')}",
]
BOUNDED = [
    f"start: {regex_rule('[0-9]{1,300}')}",
    f"start: {regex_rule(r'([[:word:]]{1,64} ){1,50}')}",
    f"start: {regex_rule(r'(?P<x>[^]{}]{2,1000}){3}|[a-f0-9]{8}(-[a-f0-9]{4}){3}-[a-f0-9]{12}')}",
    f"start: {regex_rule(r'([0-9]{1,3}[.]){3}[0-9]{1,3}')}",
    f"start: {regex_rule(r'(.|b)*a{0}(a|b){30}')}",
    f"start: {regex_rule(r'[^{](a|){100}|.{1,90000}')}",
    f"start: {regex_rule(chr(92) + 'p{L}{1,1000}' + chr(92) + 'u{1F600}?')}",
    json_grammar({"type": "string", "minLength": 1000, "maxLength": 10**9}),
    json_grammar({"type": "array", "minItems": 10**6, "items": {"type": "array", "maxItems": 10**9}}),
    json_grammar({"enum": [f"entry {number}" for number in range(3000)]}),
    json_grammar({"$defs": {"n": {"properties": {"a": NESTED, "b": {"items": NESTED}}}}} | NESTED),
    json_grammar({"properties": {name: {"type": "number", "multipleOf": 0.01} for name in ("a", "b", "c")}}),
    json_grammar({"type": "integer", "multipleOf": 86400, "minimum": 3, "maximum": 10**17 - 1}),
    json_grammar({"type": "integer", "multipleOf": 10**4}),
]


@pytest.mark.parametrize("grammar", EXPLODING, ids=range(len(EXPLODING)))
def test_grammars_whose_work_the_library_does_not_bound_are_refused(grammar: str) -> None:
    with pytest.raises(GrammarRefused):
        check_grammar(grammar)


@pytest.mark.parametrize("grammar", BOUNDED, ids=range(len(BOUNDED)))
def test_sensible_grammars_are_taken_and_have_a_first_mask_within_the_limits(grammar: str) -> None:
    async def part(grammars: Grammars) -> None:
        check_grammar(grammar)
        assert (await grammars.compile("ann", grammar)).mask.any()

    played(part)


@pytest.mark.parametrize("divisor", ["x", True])
def test_a_divisor_that_is_wrong_is_refused(divisor: object) -> None:
    with pytest.raises(GrammarRefused, match="JSON schema's multipleOf must be"):
        check_grammar(json_grammar({"type": "integer", "multipleOf": divisor}))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": {}}, 'has keywords that are not supported: "not"'),
        (
            {"type": "string", "minLength": 5, "maxLength": 2},
            "allows no value: minLength (5) is greater than maxLength",
        ),
        ({"$ref": "#/definitions/x"}, "has no #/definitions/x, to which a $ref refers"),
        ({"$ref": "http://x/y"}, "refers to http://x/y, outside of itself"),
        ({"type": "string", "format": "zz"}, "has a format that is not supported: zz"),
        ({"type": "foo"}, "has an unknown type: foo"),
        ({"type": "string", "minLength": "x"}, "minLength must be "),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"enum": 5}, "enum must be an array"),
    ],
)
def test_a_schema_is_refused_in_words_of_its_author(schema: dict[str, Any], words: str) -> None:
    with pytest.raises(GrammarRefused, match=re.escape(words)) as raised:
        check_grammar(json_grammar(schema))
    assert "the schema or grammar can't be followed: the JSON schema" in str(raised.value)
    assert not any(inner in str(raised.value) for inner in ("%llguidance", "%json", "failed to compile", "start:"))


@pytest.mark.parametrize(
    "schema",
    [{"$ref": "#"}, {"anyOf": [{"$ref": "#"}]}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}],
    ids=["itself", "in a list", "a name"],
)
def test_a_schema_that_leads_back_to_itself_matches_no_text(schema: dict[str, Any]) -> None:
    async def part(grammars: Grammars) -> None:
        with pytest.raises(GrammarRefused, match=r"no text can match it, .* because a \$ref leads back to itself"):
            await grammars.compile("ann", json_grammar(schema))

    played(part)


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


def test_a_grammar_has_its_time_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "MAX_COMPILE_S", -1.0)
    with pytest.raises(GrammarRefused, match="CPU time to compile"):
        check_grammar(DIGIT)


def test_a_grammar_at_which_the_library_panics_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(LibraryPanicked, match=r"^panic: called `Option::unwrap\(\)` on a `None` value$"):
        check_grammar(PANICKING_LARK)

    async def part(grammars: Grammars) -> None:
        with pytest.raises(GrammarRefused, match="the library that computes masks failed") as raised:
            await grammars.compile("ann", PANICKING_LARK)
        assert "unwrap" not in raised.value.message
        assert (await grammars.compile("ann", DIGIT)).is_ready

    played(part)
    (line,) = caplog.messages
    assert line.startswith("grammar_failed tenant=ann cause=")
    assert "unwrap" in line


@pytest.mark.parametrize("method", ["consume_token", "compute_bitmask"])
@pytest.mark.parametrize("fault", [panic, fail])
def test_a_fault_in_a_step_s_mask_ends_its_sequence_and_no_other(
    method: str, fault: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the library raises, the sequence ends: one whose mask never comes would keep its blocks."""

    async def part(grammars: Grammars) -> None:
        masks, other = await grammars.compile("ann", DIGIT), await grammars.compile("bob", DIGIT)
        failed, ready = asyncio.get_running_loop().create_future(), asyncio.Event()
        masks.on_failed = failed.set_result
        faulty = SimpleNamespace(consume_token=bool, compute_bitmask=panic, is_error=lambda: False)
        setattr(faulty, method, fault)
        masks._matcher, (token,) = faulty, TOKENIZER.encode("7", begins=False)
        masks.accept(token, lambda: failed.set_exception(AssertionError("ready")))
        other.accept(token, ready.set)
        assert isinstance(await failed, GrammarRefused)
        await ready.wait()
        assert allowed(other.mask) == [b""]
        # The copies share what may be broken, so the tenant's next request gets another one.
        fresh = await grammars.compile("ann", DIGIT)
        fresh.accept(token, ready.set)
        assert ("ann", DIGIT) in grammars._compiled

    played(part)
    assert len([line for line in caplog.messages if line.startswith("grammar_failed")]) == 1


def test_a_panic_while_a_text_is_tokenized_has_a_type(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = CHECKPOINT.tokenizer()
    monkeypatch.setattr(tokenizer, "_loaded", SimpleNamespace(encode=lambda *_, **__: panic()))
    with pytest.raises(LibraryPanicked, match="PanicException"):
        tokenizer.encode("a")


def test_a_vocabulary_at_which_the_library_panics_refuses_requests_and_is_tried_again() -> None:
    tokenizer = CHECKPOINT.tokenizer()

    async def loaded() -> Any:
        return tokenizer

    async def play() -> None:
        grammars = Grammars(loaded, CHECKPOINT.config.vocabulary, frozenset({1}), DecodeLog())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tokenizer, "bytes_of", panic)
            for _ in range(2):
                with pytest.raises(LibraryPanicked, match="PanicException"):
                    await grammars.compile("ann", DIGIT)
        assert (await grammars.compile("ann", DIGIT)).is_ready
        await grammars.stop()

    asyncio.run(play())


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
