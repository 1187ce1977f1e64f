"""Operands of instructions (PTX ISA section 6)."""

from gpulease.daemon.drivers.cpu.limits import MAX_OPERANDS
from gpulease.daemon.drivers.cpu.ptx.cursor import Cursor
from gpulease.daemon.drivers.cpu.ptx.declarations import parse_real
from gpulease.daemon.drivers.cpu.ptx.lexer import Token, parse_integer
from gpulease.daemon.drivers.cpu.ptx.scopes import TooManyRegisters
from gpulease.daemon.drivers.cpu.ptx.syntax import (
    Address,
    Integer,
    Negated,
    Operand,
    Pair,
    Real,
    Register,
    Sink,
    Special,
    Symbol,
    Target,
    Variable,
    Vector,
)

# Stands for a label that is looked up when its function is complete.
UNRESOLVED = -1

# PTX ISA section 4.5.4: the one predefined constant.
_PREDEFINED = {"WARP_SZ": 32}


class OperandParser:
    """Reads operands; a subclass says what a name means where the cursor stands."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor

    def find(self, name: str) -> Register | Variable | None:
        """What a name means here."""
        raise NotImplementedError

    def parse_operands(self) -> tuple[Operand, ...]:
        """Take operands up to and with the semicolon."""
        cursor = self.cursor
        operands: list[Operand] = []
        while not cursor.accept(";"):
            if operands:
                cursor.expect(",")
            if len(operands) >= MAX_OPERANDS:
                raise cursor.problem(f"more than {MAX_OPERANDS} operands")
            operands.append(self._parse_operand())
        return tuple(operands)

    def _parse_operand(self) -> Operand:
        cursor = self.cursor
        match cursor.peek.kind:
            case "[":
                return self._parse_address()
            case "{":
                return self._parse_vector()
            case "!":
                cursor.take()
                return Negated(self._parse_register())
            case _:
                first = self._parse_single()
                if not cursor.accept("|"):
                    return first
                return Pair(first, self._parse_single())

    def _parse_single(self) -> Operand:
        """Take one name or number."""
        cursor = self.cursor
        negative = cursor.accept("-")
        token = cursor.take()
        if token.kind in ("number", "real"):
            return self._parse_number(token, negative)
        if token.kind != "word" or negative:
            raise cursor.problem(f"{token.text[:60] or 'the end'!r} is no operand this driver supports", token)
        if token.text == "_":
            return Sink()
        if token.text in _PREDEFINED:
            return Integer(_PREDEFINED[token.text])
        return self._parse_name(token)

    def _parse_name(self, token: Token) -> Operand:
        meaning = self._find(token)
        if isinstance(meaning, Register):
            if self.cursor.peek.kind == "directive":
                raise self.cursor.problem("parts of vector registers are not supported", token)
            return meaning
        if isinstance(meaning, Variable):
            return Symbol(meaning, self._parse_offset())
        if token.text[0] == "%":
            return Special(token.text + (self.cursor.take().text if self.cursor.peek.kind == "directive" else ""))
        return Target(token.text, UNRESOLVED)

    def _parse_number(self, token: Token, negative: bool) -> Integer | Real:
        if token.kind == "real":
            real = parse_real(token.text)
            if real is not None and not negative:
                return Real(*real)
        else:
            value = parse_integer(token.text)
            if value is not None:
                return Integer((-value if negative else value) & (2**64 - 1))
        raise self.cursor.problem(f"{token.text[:60]!r} is no number this driver supports", token)

    def _parse_offset(self) -> int:
        """Take `+4`, `-4` or `+-4`, or nothing: 0."""
        cursor = self.cursor
        if cursor.peek.kind not in ("+", "-"):
            return 0
        negative = cursor.take().kind == "-"
        if cursor.accept("-"):
            negative = not negative
        at = cursor.peek
        value = cursor.integer()
        if value >= 2**32:
            raise cursor.problem("an offset has at most 32 bits", at)
        return -value if negative else value

    def _parse_address(self) -> Address:
        """Take `[name]`, `[name+4]` or `[4096]` (PTX ISA section 6.4.1)."""
        cursor = self.cursor
        cursor.expect("[")
        base: Register | Variable | Integer
        if cursor.peek.kind == "number":
            base = Integer(cursor.integer())
        else:
            token = cursor.expect("word")
            meaning = self._find(token)
            if meaning is None:
                raise cursor.problem(f"unknown name {token.text[:60]}", token)
            base = meaning
        offset = self._parse_offset()
        cursor.expect("]")
        return Address(base, offset)

    def _parse_vector(self) -> Vector:
        cursor = self.cursor
        cursor.expect("{")
        elements = [self._parse_single()]
        while cursor.accept(","):
            if len(elements) >= MAX_OPERANDS:
                raise cursor.problem(f"more than {MAX_OPERANDS} elements")
            elements.append(self._parse_single())
        cursor.expect("}")
        return Vector(tuple(elements))

    def _parse_register(self) -> Register:
        token = self.cursor.expect("word")
        meaning = self._find(token)
        if not isinstance(meaning, Register):
            raise self.cursor.problem(f"unknown register {token.text[:60]}", token)
        return meaning

    def _find(self, token: Token) -> Register | Variable | None:
        try:
            return self.find(token.text)
        except TooManyRegisters as error:
            raise self.cursor.problem(str(error), token) from None
