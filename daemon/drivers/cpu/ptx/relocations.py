"""Addresses in initialisers (PTX ISA section 5.4.4): `x`, `x+4`, `generic(x)+4` and `0xFF00(generic(x)+4)`."""

from gpulease.daemon.drivers.cpu.ptx.cursor import Cursor
from gpulease.daemon.drivers.cpu.ptx.lexer import Token, parse_integer
from gpulease.daemon.drivers.cpu.ptx.scalars import Scalar
from gpulease.daemon.drivers.cpu.ptx.syntax import Relocation

_POINTER_BYTES = 8


def parse_relocation(cursor: Cursor, first: Token, scalar: Scalar, offset: int) -> Relocation:
    """Take the rest of an address whose first token is taken; it fills one element of that type."""
    if first.kind != "word":
        return _parse_masked(cursor, first, scalar, offset)
    if scalar.is_float or scalar.size != _POINTER_BYTES:
        raise cursor.problem(f"an address does not fit a .{scalar.name}", first)
    symbol, addend = _parse_symbol(cursor, first)
    return Relocation(offset, _POINTER_BYTES, symbol, addend)


def _parse_masked(cursor: Cursor, first: Token, scalar: Scalar, offset: int) -> Relocation:
    """One byte of an address, which a mask picks out."""
    mask = parse_integer(first.text) if first.kind == "number" else None
    shifts = [shift for shift in range(0, 64, 8) if mask == 0xFF << shift]
    if not shifts or scalar.size != 1:
        raise cursor.problem("a mask picks one byte of an address for a .u8", first)
    cursor.expect("(")
    symbol, addend = _parse_symbol(cursor, cursor.expect("word"))
    cursor.expect(")")
    return Relocation(offset, 1, symbol, addend, shifts[0])


def _parse_symbol(cursor: Cursor, first: Token) -> tuple[str, int]:
    """Global and generic addresses are the same here, so `generic` says nothing."""
    name = first.text
    if name == "generic" and cursor.accept("("):
        name = cursor.expect("word").text
        addend = _parse_addend(cursor)
        cursor.expect(")")
        return name, addend + _parse_addend(cursor)
    return name, _parse_addend(cursor)


def _parse_addend(cursor: Cursor) -> int:
    if cursor.peek.kind not in ("+", "-"):
        return 0
    negative = cursor.take().kind == "-"
    value = cursor.integer()
    return -value if negative else value
