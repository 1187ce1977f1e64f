"""Parses operands of instructions (PTX ISA section 6), calls, and the lists and prototypes that calls refer to.

Calls are in section 9.7.12.5, lists of targets and prototypes in section 11.2.
"""

from collections.abc import Mapping

from gpulease.daemon.ptx.limits import MAX_LISTED, MAX_OPERANDS
from gpulease.daemon.ptx.parse.declarations import parse_parameters, parse_real, skip_function_directives
from gpulease.daemon.ptx.parse.lexer import Cursor, Lexeme, parse_integer
from gpulease.daemon.ptx.parse.scopes import Listing, Scope, TooManyRegisters
from gpulease.daemon.ptx.parse.syntax import (
    Address,
    CallSite,
    DeclaredVariable,
    Integer,
    Negated,
    Operand,
    Pair,
    Real,
    Register,
    Signature,
    Sink,
    Space,
    Special,
    Symbol,
    Target,
    Vector,
)

# The index of a label until the whole function has been parsed.
UNRESOLVED = -1

# PTX has one predefined constant (PTX ISA section 4.5.4).
_PREDEFINED = {"WARP_SZ": 32}


class OperandParser:
    """Parses operands. A subclass resolves names in `find`."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor

    def find(self, name: str) -> Register | DeclaredVariable | None:
        raise NotImplementedError

    def parse_operands(self) -> tuple[Operand, ...]:
        """Parse operands, up to and including the semicolon."""
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
                # `p|q` is a pair of destinations.
                if not cursor.accept("|"):
                    return first
                return Pair(first, self._parse_single())

    def _parse_single(self) -> Operand:
        cursor = self.cursor
        negative = cursor.accept("-")
        token = cursor.take()
        if token.kind in ("number", "real"):
            return self._parse_number(token, negative)
        if token.kind != "word" or negative:
            raise cursor.problem(f"expected an operand, found {token.text[:60] or 'the end'!r}", token)
        if token.text == "_":
            return Sink()
        if token.text in _PREDEFINED:
            return Integer(_PREDEFINED[token.text])
        return self._parse_name(token)

    def _parse_name(self, token: Lexeme) -> Operand:
        # A declared name has precedence. Other names are special registers if they begin with "%", otherwise labels.
        declared = self._find(token)
        if isinstance(declared, Register):
            if self.cursor.peek.kind == "directive":
                raise self.cursor.problem("parts of vector registers are not supported", token)
            return declared
        if isinstance(declared, DeclaredVariable):
            return Symbol(declared, self._parse_offset())
        if token.text[0] == "%":
            return Special(token.text + (self.cursor.take().text if self.cursor.peek.kind == "directive" else ""))
        return Target(token.text, UNRESOLVED)

    def _parse_number(self, token: Lexeme, negative: bool) -> Integer | Real:
        if token.kind == "real":
            real = parse_real(token.text)
            if real is not None and not negative:
                return Real(*real)
        else:
            value = parse_integer(token.text)
            if value is not None:
                return Integer((-value if negative else value) & (2**64 - 1))
        raise self.cursor.problem(f"expected a number, found {token.text[:60]!r}", token)

    def _parse_offset(self) -> int:
        """Parse `+4`, `-4` or `+-4`. Without a sign, take nothing and return 0."""
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
        """Parse `[name]`, `[name+4]` or `[4096]` (PTX ISA section 6.4.1)."""
        cursor = self.cursor
        cursor.expect("[")
        base: Register | DeclaredVariable | Integer
        if cursor.peek.kind == "number":
            base = Integer(cursor.integer())
        else:
            token = cursor.expect("word")
            declared = self._find(token)
            if declared is None:
                raise cursor.problem(f"unknown name {token.text[:60]}", token)
            base = declared
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
        declared = self._find(token)
        if not isinstance(declared, Register):
            raise self.cursor.problem(f"unknown register {token.text[:60]}", token)
        return declared

    def _find(self, token: Lexeme) -> Register | DeclaredVariable | None:
        try:
            return self.find(token.text)
        except TooManyRegisters as error:
            raise self.cursor.problem(str(error), token) from None


# Directives that may follow a label.
LISTS = (".branchtargets", ".calltargets", ".callprototype")


class CallParser(OperandParser):
    """Parses calls. Arguments and results must be .param variables, as in the output of compilers."""

    scope: Scope

    def __init__(self, cursor: Cursor, signatures: Mapping[str, Signature]) -> None:
        super().__init__(cursor)
        self._signatures = signatures

    def parse_call(self) -> tuple[Operand, ...]:
        """Parse `(result), function, (arguments), prototype;`.

        Returns a CallSite, preceded by the register with the function's address if the call is through a pointer.
        """
        cursor = self.cursor
        at = cursor.peek
        # Step 1: parse the parts. Only the function is always present (PTX ISA section 9.7.12.5, "call").
        results: tuple[DeclaredVariable, ...] = ()
        if cursor.peek.kind == "(":
            results = self._parse_passed()
            cursor.expect(",")
        target = cursor.expect("word")
        arguments: tuple[DeclaredVariable, ...] = ()
        listed: Lexeme | None = None
        if cursor.accept(","):
            if cursor.peek.kind == "(":
                arguments = self._parse_passed()
                listed = cursor.expect("word") if cursor.accept(",") else None
            else:
                listed = cursor.expect("word")
        cursor.expect(";")
        # Step 2: find the signature. A call through a register has that of its prototype or list of targets.
        declared = self._find(target)
        if isinstance(declared, Register):
            site = CallSite("", self._listed_signature(listed, target), arguments, results)
        elif isinstance(declared, DeclaredVariable) and declared.space is Space.CODE:
            site = CallSite(declared.name, self._signatures[declared.name], arguments, results)
        else:
            raise cursor.problem(f"{target.text[:60]} is not a function", target)
        # Step 3: check the sizes of arguments and results against the signature.
        self._check(site, at)
        return (declared, site) if isinstance(declared, Register) else (site,)

    def parse_listing(self) -> Listing:
        """Parse the directive after a label: `.branchtargets L1, L2;`, `.calltargets f, g;` or a prototype."""
        cursor = self.cursor
        kind = cursor.take().text
        # The name in a prototype is a placeholder, so ignore it.
        if kind == ".callprototype":
            results, result_bytes = parse_parameters(cursor, Space.RESULT)
            cursor.expect("word")
            parameters, size = parse_parameters(cursor, Space.PARAM)
            skip_function_directives(cursor)
            cursor.expect(";")
            return Listing(kind, signature=Signature(parameters, size, results, result_bytes))
        names = [cursor.expect("word").text]
        while cursor.accept(","):
            if len(names) >= MAX_LISTED:
                raise cursor.problem(f"more than {MAX_LISTED} targets")
            names.append(cursor.expect("word").text)
        cursor.expect(";")
        if kind == ".branchtargets":
            return Listing(kind, tuple(names))
        # All targets must have the same signature, so the call needs no prototype.
        signatures = [self._signatures.get(name) for name in names]
        if signatures[0] is None or any(other is None or other.layout != signatures[0].layout for other in signatures):
            raise cursor.problem("the functions of a .calltargets must be declared and have the same parameters")
        return Listing(kind, tuple(names), signatures[0])

    def _parse_passed(self) -> tuple[DeclaredVariable, ...]:
        """Parse `(a, b)`, the variables of a call's arguments or results."""
        cursor = self.cursor
        cursor.expect("(")
        passed: list[DeclaredVariable] = []
        while not cursor.accept(")"):
            if passed:
                cursor.expect(",")
            if len(passed) >= MAX_OPERANDS:
                raise cursor.problem(f"more than {MAX_OPERANDS} operands")
            at = cursor.take()
            declared = self._find(at) if at.kind == "word" else None
            if not isinstance(declared, DeclaredVariable) or declared.space is not Space.CALL:
                raise cursor.problem("arguments and results must be .param variables of the calling function", at)
            passed.append(declared)
        return tuple(passed)

    def _listed_signature(self, listed: Lexeme | None, target: Lexeme) -> Signature:
        listing = self.scope.find_listing(listed.text) if listed else None
        if listing is None or listing.signature is None:
            raise self.cursor.problem("a call through a register needs a .callprototype or .calltargets", target)
        return listing.signature

    def _check(self, site: CallSite, at: Lexeme) -> None:
        for actual, formal in (
            (site.arguments, site.signature.parameters),
            (site.results, site.signature.results),
        ):
            if [variable.size for variable in actual] != [variable.size for variable in formal]:
                raise self.cursor.problem("the sizes of the arguments and results must be those of the function", at)
