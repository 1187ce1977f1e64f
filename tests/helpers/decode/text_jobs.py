"""Jobs for text processes that exist only for tests, and grammars at which llguidance panics."""

import os
import signal
from typing import Any, Final

from gpulease.client.decode.text.grammar import check_grammar

PANICKING: Final = 'root ::= other "" | other\nother ::= "a" "ab"\n'
"""A grammar in EBNF at which llguidance 1.9.1 panics: two alternatives of a lexeme are equal."""

PANICKING_LARK: Final = 'start: T0\nT0: ((T1 "") | T1)\nT1: ("a" "ab")'
"""The same grammar in Lark."""


def panic(*_: Any) -> dict[str, Any]:
    """Make a Rust library panic, in a call in which it does not catch panics."""
    import llguidance

    llguidance.LLMatcher.validate_grammar(PANICKING_LARK)
    raise AssertionError("the library has become better: find another grammar")


def check(_: Any, grammar: str) -> dict[str, Any]:
    """Check a grammar, as the job of a request does."""
    check_grammar(grammar)
    return {}


def crash(_: Any) -> dict[str, Any]:
    """End the process, as a crash of a library would."""
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def fail(_: Any) -> dict[str, Any]:
    raise ZeroDivisionError("a fault")
