"""Grammars in EBNF and Lark: which texts they have, what is refused, and that none is more work than is allowed."""

import re
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulease.client.decode import TINY_MODEL, open_model
from gpulease.client.decode.decode_errors import GrammarRefused, LibraryPanicked
from gpulease.client.decode.text import grammar
from gpulease.client.decode.text.grammar import check_grammar
from gpulease.client.decode.text.written_grammar import MAX_LEXEME, lark_of

JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space
ws ::= | " " | "\n" [ \t]{0,20}
"""
"""That of JSON, as llama.cpp has it."""

SQL = """
    root ::= select_statement
    select_statement ::= "SELECT " column " from " table " where " condition
    column ::= "col_1 " | "col_2 "
    table ::= "table_1 " | "table_2 "
    condition ::= column "= " number
    number ::= "1 " | "2 "
"""
"""That of vLLM's examples."""

LARK_SQL = """
?start: select_statement
?select_statement: "SELECT " column_list " FROM " table_name
?column_list: column_name ("," column_name)*
?table_name: identifier
?column_name: identifier
?identifier: /[a-zA-Z_][a-zA-Z0-9_]*/
"""

CALCULATOR = """
// A comment, and "another": one
start: expr
expr: term (("+" | "-") term)* -> sum
term: factor (("*" | "/") factor)~0..3
factor: NUMBER | "(" expr ")" | [SIGN] factor
SIGN: "-" | "a".."c"
%import common.NUMBER
%ignore / +/
"""


@cache
def tokenizer() -> Any:
    checkpoint = open_model(TINY_MODEL)
    ends = sorted(checkpoint.config.end_tokens)
    return grammar._library_tokenizer(checkpoint.tokenizer(), checkpoint.config.vocabulary, ends)


def has(written: str, text: str) -> bool:
    """Whether a grammar has a text, by the library and the tiny model's tokens."""
    lark = lark_of(written)
    check_grammar(lark)
    matcher = grammar._library().LLMatcher(tokenizer(), lark, log_level=0, limits=grammar._limits())
    tokens = open_model(TINY_MODEL).tokenizer().encode(text, begins=False)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("written", "texts", "others"),
    [
        (JSON, ['{"a": [1, 2.5e3, {"b": null}], "c\\u00e9": "x\\n"}', "{}"], ["[]", '{"a": 01}', "{'a': 1}"]),
        (SQL, ["SELECT col_1  from table_2  where col_2 = 1 "], ["SELECT col_3  from table_2  where col_2 = 1 "]),
        (LARK_SQL, ["SELECT a,b_2 FROM t"], ["SELECT a, FROM t", "select a FROM t"]),
        (CALCULATOR, ["1 + (b2*-3) - 4.5", "1*2*3*4"], ["1*2*3*4*5", "1 + (2", "d2"]),
        ('root ::= "a"* e\ne ::= ""', ["", "aaa"], ["b"]),
        ('root ::= x root | "."\nx ::= "a"? "b"?', [".", "abab."], ["ab"]),
        (r'root ::= [a\-\]z-] [^\n"] "\u00e9\U0001F600" .', ["-xé\U0001f600\n", "]]é\U0001f600."], ['aq"é', "b]é"]),
        ('start: "SeLect"i /x{2}y/i', ["selECTxXy"], ["selectxy"]),
        ('start: "a"\n  | item "B"\nitem: "[" "x".."z"\n', ["a", "[yB"], ["A", "[yb"]),
        ('root ::= ("a" | "b"){2,3} "c"{0}\n', ["ab", "bbb"], ["a", "abab", "abc"]),
        ('start: "a"~2 B~1..2\nB: "b"', ["aab", "aabb"], ["ab", "aabbb"]),
        # Texts that mean something in the library's Lark are texts here.
        (r'root ::= "%json {" "\"" "\\" "/" "\x7f" "<|end|>"', ['%json {"\\/\x7f<|end|>'], ["{}"]),
    ],
)  # fmt: skip
def test_a_grammar_has_its_texts_and_no_others(written: str, texts: list[str], others: list[str]) -> None:
    for text in texts:
        # A special token's name is not that token.
        assert has(written, text) or "<|" in text, text
    assert not [text for text in others if has(written, text)]


EXPRESSIONS = st.recursive(
    st.sampled_from([('"a"', "a"), ('"b"', "b"), ("[ab]", "[ab]"), ('"ab"', "ab"), ('""', "")]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda two: (f"{two[0][0]} {two[1][0]}", two[0][1] + two[1][1])),
        st.tuples(inner, inner).map(lambda two: (f"({two[0][0]} | {two[1][0]})", f"(?:{two[0][1]}|{two[1][1]})")),
        st.tuples(inner, st.sampled_from(["?", "*", "+", "{2}", "{1,2}", "{0,1}"])).map(
            lambda two: (f"({two[0][0]}){two[1]}", f"(?:{two[0][1]}){two[1]}")
        ),
    ),
    max_leaves=6,
)
"""An expression in EBNF, and the same as a regular expression."""


@given(EXPRESSIONS, EXPRESSIONS, st.text("ab", max_size=6))
def test_texts_of_a_regular_grammar_are_those_of_its_expression(
    first: tuple[str, str], second: tuple[str, str], text: str
) -> None:
    written = f"root ::= other {first[0]} | other\nother ::= {second[0]}\n"
    expected = re.fullmatch(f"(?:{second[1]})(?:{first[1]}|)", text) is not None
    # The library fails at some of these grammars, such as `PANICKING`.
    with suppress(LibraryPanicked):
        assert has(written, text) is expected


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("", "must define start"),
        ("hello", "the definition of a rule must be here"),
        ('other ::= "a"', "must define root"),
        ("root ::= other", "must define 'other'"),
        ('root ::= "a"\nroot ::= "b"', "defined twice"),
        ('root ::= ("a"', "group must end"),
        ('root ::= "a', "not supported"),
        (r'root ::= "\q"', "escape"),
        (r'root ::= "\ud800"', "surrogates"),
        ("root ::= [z-a]", "range"),
        ('root ::= "a"{3,2}', "fewer"),
        (f'root ::= "a"{{{10**9}}}', "repetitions must be at most"),
        ('start: %json {"type": "object"}', "not supported"),
        ("start: A\n%llguidance {}", "not supported"),
        ("start: <|end|>", "not supported"),
        ("start: <[5]>", "not supported"),
        ("start: @other", "not supported"),
        ('start[temperature=2]: "a"', "definition"),
        ('start: a[max_tokens=3]\na: /.*/', "not supported"),
        ("start: A & B", "not supported"),
        ("start: /a/x", "flags"),
        ("start: A\nA: b\nb: /c/", "must not refer to rules"),
        ('start: A\nA: "a" A | "b"', "must not refer to itself"),
        ("%import os.path\nstart: A", "not supported"),
        ("start: /(?=a)b/", "look"),
    ],
)  # fmt: skip
def test_what_is_not_such_a_grammar_is_refused_with_its_place(written: str, said: str) -> None:
    with pytest.raises(GrammarRefused, match=re.escape(said)):
        check_grammar(lark_of(written))


def doubled(count: int, first: str) -> str:
    return f"root ::= r{count}\nr0 ::= {first}\n" + "\n".join(f"r{n + 1} ::= r{n} r{n}" for n in range(count))


def powers(count: int, base: int) -> str:
    """Terminals of Lark, from A0: each is the next one `base` times."""
    return "\n".join(f"A{n}:" + f" A{n + 1}" * base for n in range(count)) + f'\nA{count}: "a"'


@pytest.mark.parametrize(
    ("written", "said"),
    [
        # Each of these kept a thread busy for minutes, or without an end.
        (doubled(30, '"a"'), "written out"),
        ('root ::= "a" root', "has no text that ends"),
        ('root ::= "a" other\nother ::= root "b"', "has no text that ends"),
        ('root ::= x\nx ::= "(" x "%s" | "y"' % ("q" * 5000), "no longest one"),
        ('start: x\nx: "(" x /q{5000}/ | "y"', "no longest one"),
        ('start: x\nx: "(" x A | "y"\nA: B{100}\nB: "c"{100}', "no longest one"),
        ('root ::= "a"{1000}{1000}', "written out"),
        ("root ::= " + "(" * 10_000, "groups are in one another"),
        ("\n".join(f'r{n} ::= "a"' for n in range(600)), "more than 512"),
        ("root ::= " + '"a" ' * 20_000, "must have at most"),
        ('root ::= "a"{' + " " * 60_000, "not supported"),
        ('root ::= "a"' + "?" * 60_000, "right behind one another"),
        ("root ::= " + "(" * 64 + '"a"' + ")?*+?" * 64, "nested"),
        ("start: A0 NUMBER\n%import common.NUMBER\n" + powers(400, 20), "written out"),
        ("start: /a{" + " " * 60_000 + "/", "regex"),
    ],
)  # fmt: skip
def test_a_grammar_that_would_be_too_much_work_is_refused(written: str, said: str) -> None:
    with pytest.raises(GrammarRefused, match=said):
        check_grammar(lark_of(written))


def test_what_is_bounded_otherwise_is_taken() -> None:
    """A long literal in a grammar with a longest text; many short ones, repetitions and alternatives in any."""
    for written in (
        f'root ::= "{"q" * 5000}" [a-z]{{1,50}}',
        'root ::= x{1000}\nx ::= "a" | "(" x ")"',
        doubled(30, '"a" | "(" r0 ")"'),
        'start: x\nx: "(" x ")" | /[a-z]{0,500}(' + "|".join(f"word{n}" for n in range(300)) + ")/",
        f'root ::= "(" root ")" | "{"q" * MAX_LEXEME}"',
    ):
        check_grammar(lark_of(written))


@given(st.text(st.sampled_from('ab"[](){}|*+?:=-/\\%~.^ \n1,'), max_size=40), st.sampled_from(["root ::= ", "start: "]))
def test_any_text_is_taken_or_refused(text: str, begin: str) -> None:
    with suppress(GrammarRefused, LibraryPanicked):
        # Only regular expressions, which are passed on as they are, can be wrong for the library.
        lark = lark_of(begin + text)
        if "/" not in text:
            check_grammar(lark)
            return
        with suppress(GrammarRefused):
            check_grammar(lark)
