"""A place in the token stream with one token of look-ahead, and the refusals that name it."""

from gpulease.daemon.drivers.cpu.ptx.lexer import Source, Token, parse_whole_integer
from gpulease.daemon.drivers.interface import ImageRejected


class Cursor:
    """Reads tokens one by one; `peek` is the next one."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._tokens = source.tokens()
        self.peek = next(self._tokens)
        # The function being read, for messages.
        self.kernel = ""

    def take(self) -> Token:
        """The next token, which is then behind the cursor."""
        token = self.peek
        if token.kind != "end":
            self.peek = next(self._tokens)
        return token

    def accept(self, kind: str) -> bool:
        """Take the next token if it is of that kind."""
        if self.peek.kind != kind:
            return False
        self.take()
        return True

    def expect(self, kind: str) -> Token:
        """Take the next token, which must be of that kind."""
        if self.peek.kind != kind:
            raise self.problem(f"expected {kind!r}, found {self.peek.text[:60] or 'the end'!r}")
        return self.take()

    def directive(self) -> str | None:
        """Take a directive and give its name without the dot, or None if none comes next."""
        return self.take().text[1:] if self.peek.kind == "directive" else None

    def integer(self) -> int:
        """Take an unsigned integer literal: a size, a count. Cut to 64 bits it would be another one."""
        token = self.expect("number")
        value = parse_whole_integer(token.text)
        if value is None:
            raise self.problem(f"{token.text[:60]!r} is no number", token)
        if value >= 1 << 64:
            raise self.problem(f"{token.text[:60]} does not fit 64 bits", token)
        return value

    def skip_line(self, line: int) -> None:
        """Take all that is left on a line: for directives that end with it."""
        while self.peek.line == line and self.peek.kind != "end":
            self.take()

    def skip_braces(self) -> None:
        """Take a balanced `{...}`: for debug sections."""
        self.expect("{")
        depth = 1
        while depth:
            token = self.take()
            if token.kind == "end":
                raise self.problem("'{' is never closed", token)
            depth += (token.kind == "{") - (token.kind == "}")

    def problem(self, reason: str, at: Token | None = None, *, hint: str = "") -> ImageRejected:
        """The error for a token, the next one unless told."""
        return self.source.problem(reason, at or self.peek, kernel=self.kernel, hint=hint)
