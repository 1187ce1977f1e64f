"""Parses declarations of parameters and variables with their initialisers (PTX ISA section 5.4), and parameter lists.

An initialiser may contain addresses (section 5.4.4): `x`, `x+4`, `generic(x)+4` and `0xFF00(generic(x)+4)`. Kernels,
functions and prototypes have parameter lists (sections 5.1.6 and 11.3).
"""

import struct

from gpulease.daemon.ptx.limits import MAX_INITIALISERS, MAX_PARAMETER_BYTES
from gpulease.daemon.ptx.parse.lexer import Cursor, Lexeme, parse_integer
from gpulease.daemon.ptx.parse.syntax import PREDICATE, SCALARS, DeclaredVariable, Relocation, Scalar, Space

_POINTER_BYTES = 8


def parse_relocation(cursor: Cursor, first: Lexeme, scalar: Scalar, offset: int) -> Relocation:
    """Parse an address, which initialises one element of type `scalar`. `first` is its first token, already taken."""
    # In `0xFF00(x)`, the number before the parenthesis is a mask.
    if first.kind != "word":
        return _parse_masked(cursor, first, scalar, offset)
    # An address without a mask needs an element of 64 bits that is not a float.
    if scalar.is_float or scalar.size != _POINTER_BYTES:
        raise cursor.problem(f"an address does not fit a .{scalar.name}", first)
    symbol, addend = _parse_symbol(cursor, first)
    return Relocation(offset, _POINTER_BYTES, symbol, addend)


def _parse_masked(cursor: Cursor, first: Lexeme, scalar: Scalar, offset: int) -> Relocation:
    """Parse one byte of an address, selected by a mask such as 0xFF00."""
    mask = parse_integer(first.text) if first.kind == "number" else None
    shifts = [shift for shift in range(0, 64, 8) if mask == 0xFF << shift]
    if not shifts or scalar.size != 1:
        raise cursor.problem("a mask picks one byte of an address for a .u8", first)
    cursor.expect("(")
    symbol, addend = _parse_symbol(cursor, cursor.expect("word"))
    cursor.expect(")")
    return Relocation(offset, 1, symbol, addend, shifts[0])


def _parse_symbol(cursor: Cursor, first: Lexeme) -> tuple[str, int]:
    """Parse `x+4` or `generic(x)+4`. Global and generic addresses are equal here, so `generic` changes nothing."""
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


_OPAQUE = frozenset({"texref", "samplerref", "surfref"})
"""Handles of textures and surfaces (PTX ISA section 5.3). A kernel that uses one is refused; other kernels run."""

# Device memory is allocated in multiples of 256 bytes, so a larger alignment could not be guaranteed.
MAX_ALIGNMENT = 256

# Maximum size of a variable: more than the memory of any card. The limit keeps sums of offsets far below 2^64.
MAX_VARIABLE_BYTES = 1 << 40

_VECTOR_LENGTHS = {"v2": 2, "v4": 4}


def round_up(value: int, alignment: int) -> int:
    """Return the next multiple of `alignment`, a power of two."""
    return (value + alignment - 1) & -alignment


def parse_scalar(cursor: Cursor) -> Scalar:
    at = cursor.peek
    name = cursor.directive()
    scalar = SCALARS.get(name or "")
    if scalar is None:
        raise cursor.problem(f"the type must be one that this driver supports, not {at.text[:60]!r}", at)
    return scalar


def parse_alignment(cursor: Cursor) -> int:
    at = cursor.peek
    alignment = cursor.integer()
    if alignment < 1 or alignment > MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.problem(f"the alignment must be a power of two up to {MAX_ALIGNMENT}, not {alignment}", at)
    return alignment


def parse_parameter(cursor: Cursor, offset: int, space: Space = Space.PARAM) -> DeclaredVariable:
    """Parse one parameter or result. It is placed at the first aligned offset from `offset` on (section 5.1.6)."""
    at = cursor.peek
    if cursor.directive() != "param":
        raise cursor.problem("expected a .param", at)
    return _parse_variable(cursor, space, offset)


def parse_variable(cursor: Cursor, space: Space, *, is_extern: bool = False) -> DeclaredVariable:
    """Parse the declaration after .global, .const, .shared or .local, up to its semicolon."""
    variable = _parse_variable(cursor, space, 0, is_extern=is_extern)
    cursor.expect(";")
    return variable


def _parse_variable(cursor: Cursor, space: Space, offset: int, *, is_extern: bool = False) -> DeclaredVariable:
    # Step 1: parse attributes, name and lengths. A vector counts as one element and is aligned to its whole size.
    alignment, lanes, scalar = _parse_attributes(cursor)
    name = cursor.expect("word")
    lengths = _parse_lengths(cursor)
    natural = scalar.size * lanes
    size = natural
    for length in lengths:
        size *= length or 0
    if size > MAX_VARIABLE_BYTES:
        raise cursor.problem(f"{name.text[:60]} has {size} bytes", name)
    # Step 2: refuse variables without a definition in this image. Only dynamic shared memory may have no size.
    is_dynamic = space is Space.SHARED and is_extern
    if (None in lengths or is_extern) and not is_dynamic and cursor.peek.kind != "=":
        raise cursor.problem(f"{name.text[:60]} is declared here but defined nowhere", name)
    initial = b""
    relocations: tuple[Relocation, ...] = ()
    # Step 3: parse the initialiser. If the first length of an array is left out, the initialiser determines it.
    if cursor.peek.kind == "=":
        initial, relocations = _parse_initialiser(cursor, space, scalar)
        if None in lengths:
            size = len(initial)
        if len(initial) > size:
            raise cursor.problem(f"{name.text[:60]} has {size} bytes but {len(initial)} to start with", name)
        if len(lengths) > 1:
            raise cursor.problem("initialisers of arrays of arrays are not supported", name)
    # Step 4: an explicit .align replaces the natural alignment.
    alignment = max(alignment, natural if not alignment else 1)
    return DeclaredVariable(
        name.text, space, size, alignment, round_up(offset, alignment), initial, is_dynamic, relocations
    )


def _parse_attributes(cursor: Cursor) -> tuple[int, int, Scalar]:
    """Parse alignment, vector length and type, in nvcc's order. `.ptr` and the words after it are ignored."""
    alignment, lanes, scalar = 0, 1, None
    while cursor.peek.kind == "directive":
        at = cursor.take()
        name = at.text[1:]
        if name == "align":
            # After the type, .align belongs to .ptr: it is the alignment of the memory to which the parameter points.
            parsed = parse_alignment(cursor)
            alignment = alignment if scalar else parsed
        elif name in _VECTOR_LENGTHS:
            lanes = _VECTOR_LENGTHS[name]
        # A handle of a texture or surface has 64 bits.
        elif name in _OPAQUE and scalar is None:
            scalar = SCALARS["b64"]
        elif name in SCALARS and scalar is None and SCALARS[name] != PREDICATE:
            scalar = SCALARS[name]
        elif not (scalar and name in ("ptr", "global", "const", "shared", "local")):
            raise cursor.problem(f"{at.text[:60]!r} is not supported in a declaration", at)
    if scalar is None:
        raise cursor.problem("expected a type")
    return alignment, lanes, scalar


def _parse_lengths(cursor: Cursor) -> list[int | None]:
    lengths: list[int | None] = []
    while cursor.accept("["):
        # `x[]` is an array with the length of its initialiser, or it is dynamic shared memory.
        if lengths and cursor.peek.kind == "]":
            raise cursor.problem("only the first length of an array may be left out")
        lengths.append(None if cursor.peek.kind == "]" else cursor.integer())
        cursor.expect("]")
        if len(lengths) > 8:
            raise cursor.problem("more than 8 dimensions")
    return lengths


def _parse_initialiser(cursor: Cursor, space: Space, scalar: Scalar) -> tuple[bytes, tuple[Relocation, ...]]:
    """Parse `= 1` or `= {1, x+4, generic(y)}` (PTX ISA section 5.4.4)."""
    if space not in (Space.GLOBAL, Space.CONST):
        raise cursor.problem(f"a .{space.value} variable can't be initialised")
    cursor.expect("=")
    # Collect the bytes in `parts`. Addresses are known only when the image is loaded, so their bytes are zeros here.
    relocations: list[Relocation] = []
    if not cursor.accept("{"):
        return _parse_initial(cursor, scalar, 0, relocations), tuple(relocations)
    parts: list[bytes] = []
    while not cursor.accept("}"):
        if parts:
            cursor.expect(",")
        if len(parts) >= MAX_INITIALISERS:
            raise cursor.problem(f"more than {MAX_INITIALISERS} initialisers")
        parts.append(_parse_initial(cursor, scalar, len(parts) * scalar.size, relocations))
    return b"".join(parts), tuple(relocations)


def _parse_initial(cursor: Cursor, scalar: Scalar, offset: int, relocations: list[Relocation]) -> bytes:
    negative = cursor.accept("-")
    token = cursor.take()
    if not negative and (token.kind == "word" or cursor.peek.kind == "("):
        relocations.append(parse_relocation(cursor, token, scalar, offset))
        return bytes(scalar.size)
    pattern = _number_pattern(token, scalar, negative)
    if pattern is None:
        raise cursor.problem(f"{token.text[:60]!r} can't initialise a .{scalar.name}", token)
    return pattern.to_bytes(scalar.size, "little")


def _number_pattern(token: Lexeme, scalar: Scalar, negative: bool) -> int | None:
    """Return the bits of a literal as one element of a type; None if the literal does not fit the type."""
    if token.kind == "number" and not scalar.is_float:
        value = parse_integer(token.text)
        return None if value is None else (-value if negative else value) & (2**scalar.bits - 1)
    if token.kind != "real" or negative or not scalar.is_float:
        return None
    # Literals with `0f` and `0d` give the exact bits. A decimal literal is a double, which is rounded to the type.
    real = parse_real(token.text)
    if real is None:
        return None
    pattern, bits = real
    if bits == scalar.bits:
        return pattern
    return decimal_pattern(pattern, scalar.bits) if bits == 0 else None


def parse_real(text: str) -> tuple[int, int] | None:
    """Parse a real literal (section 4.5.2). Returns its bits and their number; None if the literal is too long.

    For a decimal literal, the bits are those of a double, and their number is returned as 0.
    """
    if text[:2] in ("0f", "0F"):
        return int(text[2:], 16), 32
    if text[:2] in ("0d", "0D"):
        return int(text[2:], 16), 64
    # Limit the length, because float() takes time in proportion to the square of the number of digits.
    if len(text) > 64:
        return None
    return int.from_bytes(struct.pack("<d", float(text)), "little"), 0


def decimal_pattern(pattern: int, bits: int) -> int | None:
    """Round a double, given by its bits, to a float of `bits` bits; return that float's bits, or None on overflow."""
    if bits == 64:
        return pattern
    try:
        single = struct.pack("<f", struct.unpack("<d", pattern.to_bytes(8, "little"))[0])
    except OverflowError:
        return None
    return int.from_bytes(single, "little")


def parse_parameters(
    cursor: Cursor, space: Space, most_bytes: int = MAX_PARAMETER_BYTES
) -> tuple[tuple[DeclaredVariable, ...], int]:
    """Parse `(.param .u32 a, ...)` if it is there. Returns the parameters and their size in bytes."""
    parameters: list[DeclaredVariable] = []
    size = 0
    if not cursor.accept("("):
        return (), 0
    # As in the driver API, each parameter begins at the next offset that its alignment allows.
    while not cursor.accept(")"):
        if parameters:
            cursor.expect(",")
        parameter = parse_parameter(cursor, size, space)
        size = parameter.offset + parameter.size
        if size > most_bytes:
            raise cursor.problem(f"the parameters take more than {most_bytes} bytes")
        if parameter.size == 0:
            raise cursor.problem(f"the parameter {parameter.name[:60]} has no size")
        parameters.append(parameter)
    return tuple(parameters), size


def skip_function_directives(cursor: Cursor) -> None:
    """Skip the directive .noreturn after a function's parameters; it has no effect here (PTX ISA section 11.4).

    Raises ImageRejected for any other directive.
    """
    while cursor.peek.kind == "directive":
        at = cursor.take()
        if at.text != ".noreturn":
            raise cursor.problem(f"{at.text[:60]} is not supported", at)
