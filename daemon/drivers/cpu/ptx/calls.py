"""The call instruction and the lists and prototypes it names (PTX ISA sections 9.7.12.5 and 11.2)."""

from collections.abc import Mapping

from gpulease.daemon.drivers.cpu.limits import MAX_LISTED, MAX_OPERANDS
from gpulease.daemon.drivers.cpu.ptx.cursor import Cursor
from gpulease.daemon.drivers.cpu.ptx.lexer import Token
from gpulease.daemon.drivers.cpu.ptx.operands import OperandParser
from gpulease.daemon.drivers.cpu.ptx.scopes import Listing, Scope
from gpulease.daemon.drivers.cpu.ptx.signatures import parse_parameters, skip_function_directives
from gpulease.daemon.drivers.cpu.ptx.syntax import CallSite, Operand, Register, Signature, Space, Variable

# Directives that stand behind a label.
LISTS = (".branchtargets", ".calltargets", ".callprototype")


class CallParser(OperandParser):
    """Reads calls; arguments and results are .param variables, as compilers write them."""

    scope: Scope

    def __init__(self, cursor: Cursor, signatures: Mapping[str, Signature]) -> None:
        super().__init__(cursor)
        self._signatures = signatures

    def parse_call(self) -> tuple[Operand, ...]:
        """Take `(result), function, (arguments), prototype;`: the site, behind the register if there is one."""
        cursor = self.cursor
        at = cursor.peek
        results: tuple[Variable, ...] = ()
        if cursor.peek.kind == "(":
            results = self._parse_passed()
            cursor.expect(",")
        target = cursor.expect("word")
        arguments: tuple[Variable, ...] = ()
        listed: Token | None = None
        if cursor.accept(","):
            if cursor.peek.kind == "(":
                arguments = self._parse_passed()
                listed = cursor.expect("word") if cursor.accept(",") else None
            else:
                listed = cursor.expect("word")
        cursor.expect(";")
        meaning = self._find(target)
        if isinstance(meaning, Register):
            site = CallSite("", self._listed_signature(listed, target), arguments, results)
        elif isinstance(meaning, Variable) and meaning.space is Space.CODE:
            site = CallSite(meaning.name, self._signatures[meaning.name], arguments, results)
        else:
            raise cursor.problem(f"{target.text[:60]} is no function", target)
        self._check(site, at)
        return (meaning, site) if isinstance(meaning, Register) else (site,)

    def parse_listing(self) -> Listing:
        """Take what follows a label: `.branchtargets L1, L2;`, `.calltargets f, g;` or a prototype."""
        cursor = self.cursor
        kind = cursor.take().text
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
        found = [self._signatures.get(name) for name in names]
        if found[0] is None or any(other is None or other.layout != found[0].layout for other in found):
            raise cursor.problem("the functions of a .calltargets must be declared and have the same parameters")
        return Listing(kind, tuple(names), found[0])

    def _parse_passed(self) -> tuple[Variable, ...]:
        """Take `(a, b)`."""
        cursor = self.cursor
        cursor.expect("(")
        passed: list[Variable] = []
        while not cursor.accept(")"):
            if passed:
                cursor.expect(",")
            if len(passed) >= MAX_OPERANDS:
                raise cursor.problem(f"more than {MAX_OPERANDS} operands")
            at = cursor.take()
            meaning = self._find(at) if at.kind == "word" else None
            if not isinstance(meaning, Variable) or meaning.space is not Space.CALL:
                raise cursor.problem("arguments and results must be .param variables of the calling function", at)
            passed.append(meaning)
        return tuple(passed)

    def _listed_signature(self, listed: Token | None, target: Token) -> Signature:
        listing = self.scope.find_listing(listed.text) if listed else None
        if listing is None or listing.signature is None:
            raise self.cursor.problem("a call through a register needs a .callprototype or .calltargets", target)
        return listing.signature

    def _check(self, site: CallSite, at: Token) -> None:
        for given, wanted in (
            (site.arguments, site.signature.parameters),
            (site.results, site.signature.results),
        ):
            if [variable.size for variable in given] != [variable.size for variable in wanted]:
                raise self.cursor.problem("what is passed does not fit the function's parameters or results", at)
