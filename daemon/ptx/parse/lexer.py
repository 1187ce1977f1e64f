"""PTX text to tokens (PTX ISA section 4, "Syntax"), and a cursor over them with one token of look-ahead."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from gpulease.daemon.drivers.interface import ImageRejected
from gpulease.daemon.ptx.limits import MAX_NUMBER_CHARACTERS, rejected


class Lexeme(NamedTuple):
    """A token with its kind: "word", "directive", "number", "real", "string", a sign itself, or "end"."""

    kind: str
    text: str
    start: int
    line: int


# Every alternative takes linear time: no nested repetition, and an unclosed comment ends the scan instead of being
# searched for again at each "/*", so hostile text can't make the scan quadratic.
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
        """Word the refusal of a token, with its line and kernel."""
        return rejected(reason, line=at.line, text=self.line_text(at.start), kernel=kernel, hint=hint)

    def tokens(self, position: int = 0, line: int = 1) -> Iterator[Lexeme]:
        """Yield the tokens from a position on, then one of kind "end". Memory does not grow with the text."""
        length, match = len(self.text), _TOKEN.match
        while position < length:
            matched = match(self.text, position)
            # The text is a tenant's: an unknown character ends the scan with a refusal.
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
    """Parse an integer literal cut to 64 bits as PTX does (section 4.5.1), or return None if the text is not one."""
    value = parse_whole_integer(text)
    return None if value is None else value & (2**64 - 1)


def parse_whole_integer(text: str) -> int | None:
    """Parse an integer literal as written, however large, or return None if the text is not one."""
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
    """Reads tokens one by one; `peek` is the next one."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._tokens = source.tokens()
        self.peek = next(self._tokens)
        # The function being read, for messages.
        self.kernel = ""

    def take(self) -> Lexeme:
        """Take and return the next token. At the end of the text it is "end" every time."""
        token = self.peek
        if token.kind != "end":
            self.peek = next(self._tokens)
        return token

    def go_back(self, token: Lexeme) -> None:
        """Move the cursor back to a token that was taken before; scanning restarts there."""
        self._tokens = self.source.tokens(token.start, token.line)
        self.peek = next(self._tokens)

    def accept(self, kind: str) -> bool:
        """Take the next token if it is of this kind; say whether it was."""
        if self.peek.kind != kind:
            return False
        self.take()
        return True

    def expect(self, kind: str) -> Lexeme:
        """Take the next token. Raises ImageRejected if it is of another kind."""
        if self.peek.kind != kind:
            raise self.problem(f"expected {kind!r}, found {self.peek.text[:60] or 'the end'!r}")
        return self.take()

    def directive(self) -> str | None:
        """Take a directive and return its name without the dot; take nothing and return None for any other token."""
        return self.take().text[1:] if self.peek.kind == "directive" else None

    def integer(self) -> int:
        """Take an unsigned integer literal: a size or a count. Beyond 64 bits it is refused, not cut like operands."""
        token = self.expect("number")
        value = parse_whole_integer(token.text)
        if value is None:
            raise self.problem(f"expected a number, found {token.text[:60]!r}", token)
        if value >= 1 << 64:
            raise self.problem(f"{token.text[:60]} does not fit 64 bits", token)
        return value

    def skip_line(self, line: int) -> None:
        """Take the remaining tokens of a line: some directives end with it."""
        while self.peek.line == line and self.peek.kind != "end":
            self.take()

    def skip_braces(self) -> None:
        """Take a balanced `{...}`: debug sections, and the bodies of refused functions."""
        self.expect("{")
        depth = 1
        while depth:
            token = self.take()
            if token.kind == "end":
                raise self.problem("'{' is never closed", token)
            depth += (token.kind == "{") - (token.kind == "}")

    def problem(self, reason: str, at: Lexeme | None = None, *, hint: str = "") -> ImageRejected:
        """Word the refusal of a token, by default the next one."""
        return self.source.problem(reason, at or self.peek, kernel=self.kernel, hint=hint)
