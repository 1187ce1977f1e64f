"""Splits PTX text into tokens (PTX ISA section 4, "Syntax"), and provides a cursor with one token of look-ahead."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from gpulease.daemon.drivers.interface import ImageRejected
from gpulease.daemon.ptx.limits import MAX_NUMBER_CHARACTERS, rejected


class Lexeme(NamedTuple):
    """A token.

    Attributes:
        kind: "word", "directive", "number", "real", "string" or "end"; for a symbol such as "{", the symbol itself.
        text: The token's text.
        start: Its position in the source text.
        line: Its line, from 1.
    """

    kind: str
    text: str
    start: int
    line: int


# Every alternative takes linear time, because none has nested repetitions. A comment that is not closed ends the scan.
# If the scan continued, it would search the rest of the text again at each "/*", and hostile text could make it
# quadratic.
_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r\n\f\v]+|//[^\n]*|/\*.*?\*/)
    |(?P<unclosed>/\*)
    |(?P<directive>\.(?:[A-Za-z_]|[1-3]d(?![\w$]))[\w$]*(?:::\w+)*)
    |(?P<real>0[fF][0-9a-fA-F]{8}(?![\w$])|0[dD][0-9a-fA-F]{16}(?![\w$])
        |\d+\.\d*(?:[eE][+-]?\d+)?(?![\w$])|\d+[eE][+-]?\d+(?![\w$]))
    |(?P<number>\d[\w$]*)
    |(?P<word>[A-Za-z][\w$]*|[_$%][\w$]*)
    |(?P<string>"[^"\n]*")
    |(?P<sign>[{}()\[\],;:|!@+\-<>=*&^~?/])""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)

_INTEGER = re.compile(r"(?:0[xX](?P<x>[0-9a-fA-F]+)|0[bB](?P<b>[01]+)|(?P<o>0[0-7]*)|(?P<d>[1-9]\d*))U?", re.ASCII)


class Source:
    def __init__(self, text: str) -> None:
        self.text = text

    def line_text(self, position: int) -> str:
        """Return the source line of a position, at most 200 characters before and after it."""
        start = self.text.rfind("\n", max(0, position - 200), position) + 1 or max(0, position - 200)
        end = self.text.find("\n", position, position + 200)
        return self.text[start : end if end >= 0 else position + 200]

    def problem(self, reason: str, at: Lexeme, *, kernel: str = "", hint: str = "") -> ImageRejected:
        """Return the error for a token that is refused, with its line and kernel."""
        return rejected(reason, line=at.line, text=self.line_text(at.start), kernel=kernel, hint=hint)

    def tokens(self, position: int = 0, line: int = 1) -> Iterator[Lexeme]:
        """Yield the tokens from a position on, then one of kind "end". Tokens are made one by one, to save memory."""
        length, match = len(self.text), _TOKEN.match
        while position < length:
            matched = match(self.text, position)
            # The text comes from a tenant, so refuse unknown characters.
            if matched is None or matched.lastgroup == "unclosed":
                at = Lexeme("?", self.text[position], position, line)
                raise self.problem("this comment never ends" if matched else "unexpected character", at)
            kind, word = matched.lastgroup or "", matched.group()
            if kind == "blank":
                line += word.count("\n")
            else:
                yield Lexeme(word if kind == "sign" else kind, word, position, line)
            position = matched.end()
        yield Lexeme("end", "", length, line)


def parse_integer(text: str) -> int | None:
    """Return the value of an integer literal modulo 2^64, as PTX defines it (section 4.5.1); None for other text."""
    value = parse_whole_integer(text)
    return None if value is None else value & (2**64 - 1)


def parse_whole_integer(text: str) -> int | None:
    """Return the full value of an integer literal, however large; None for other text."""
    if len(text) > MAX_NUMBER_CHARACTERS:
        return None
    matched = _INTEGER.fullmatch(text)
    if matched is None:
        return None
    for group, base in (("x", 16), ("b", 2), ("o", 8), ("d", 10)):
        if matched[group] is not None:
            return int(matched[group], base)
    return None


class Cursor:
    """Reads tokens one by one.

    Attributes:
        source: The text.
        peek: The next token.
        kernel: The name of the function that is being parsed, for error messages.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._tokens = source.tokens()
        self.peek = next(self._tokens)
        self.kernel = ""

    def take(self) -> Lexeme:
        """Take the next token and return it. At the end of the text, this returns the "end" token every time."""
        token = self.peek
        if token.kind != "end":
            self.peek = next(self._tokens)
        return token

    def go_back(self, token: Lexeme) -> None:
        """Move the cursor back to an earlier token, and scan the text again from there."""
        self._tokens = self.source.tokens(token.start, token.line)
        self.peek = next(self._tokens)

    def accept(self, kind: str) -> bool:
        """Take the next token if it is of this kind. Returns whether it was."""
        if self.peek.kind != kind:
            return False
        self.take()
        return True

    def expect(self, kind: str) -> Lexeme:
        """Take the next token and return it. Raises ImageRejected if it is of another kind."""
        if self.peek.kind != kind:
            raise self.problem(f"expected {kind!r}, found {self.peek.text[:60] or 'the end'!r}")
        return self.take()

    def directive(self) -> str | None:
        """Take a directive and return its name without the dot. For any other token, take nothing and return None."""
        return self.take().text[1:] if self.peek.kind == "directive" else None

    def integer(self) -> int:
        """Take an unsigned integer literal, which is a size or a count, and return its value.

        Raises ImageRejected if it does not fit 64 bits. Integers in operands are reduced modulo 2^64 instead.
        """
        token = self.expect("number")
        value = parse_whole_integer(token.text)
        if value is None:
            raise self.problem(f"expected a number, found {token.text[:60]!r}", token)
        if value >= 1 << 64:
            raise self.problem(f"{token.text[:60]} does not fit 64 bits", token)
        return value

    def skip_line(self, line: int) -> None:
        """Take the remaining tokens of a line. Some directives end at the end of their line."""
        while self.peek.line == line and self.peek.kind != "end":
            self.take()

    def skip_braces(self) -> None:
        """Take a balanced `{...}`. Raises ImageRejected if it is not closed."""
        self.expect("{")
        depth = 1
        while depth:
            token = self.take()
            if token.kind == "end":
                raise self.problem("'{' is never closed", token)
            depth += (token.kind == "{") - (token.kind == "}")

    def problem(self, reason: str, at: Lexeme | None = None, *, hint: str = "") -> ImageRejected:
        """Return the error for a token that is refused, by default the next one."""
        return self.source.problem(reason, at or self.peek, kernel=self.kernel, hint=hint)
