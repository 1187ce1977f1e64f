"""Parses a whole PTX text into an `Image` (PTX ISA sections 4 and 11).

For any text, the only error raised is ImageRejected. If the body of a function is refused, the function is skipped, so
that the other kernels of its module can run.
"""

from dataclasses import replace
from math import prod

from gpulease.daemon.drivers.interface import ImageRejected
from gpulease.daemon.ptx.architecture import SM_90, Architecture, takes_long_parameters
from gpulease.daemon.ptx.limits import (
    MAX_FUNCTIONS,
    MAX_IMAGE_INSTRUCTIONS,
    MAX_OLD_PARAMETER_BYTES,
    MAX_PARAMETER_BYTES,
)
from gpulease.daemon.ptx.parse.bodies import BodyParser
from gpulease.daemon.ptx.parse.declarations import (
    parse_parameters,
    parse_variable,
    round_up,
    skip_function_directives,
)
from gpulease.daemon.ptx.parse.lexer import Cursor, Lexeme, Source
from gpulease.daemon.ptx.parse.scopes import NameTaken, Scope
from gpulease.daemon.ptx.parse.syntax import Bounds, DeclaredVariable, Function, Image, Signature, Space

_LINKAGE = ("visible", "extern", "weak", "common")
_SPACES = {"global": Space.GLOBAL, "const": Space.CONST, "shared": Space.SHARED}

# The offset of a module's shared variable, which has a separate offset in each kernel that names it.
_NO_PLACE = -1

# Shared memory that is reserved for CUDA (PTX ISA section 10, %reserved_smem_offset). A kernel that reads its address
# gets this memory like a variable. Cooperative groups need 288 bytes of it for the barriers of tiles of several warps.
_RESERVED_SHARED = DeclaredVariable("%reserved_smem_offset_1", Space.SHARED, 288, 16, _NO_PLACE)


def parse(text: str, architecture: Architecture = SM_90) -> Image:
    """Parse a PTX text for a device of this architecture. Raises ImageRejected, also if the device can't run it."""
    return _ImageParser(Cursor(Source(text)), architecture).parse()


class _ImageParser:
    def __init__(self, cursor: Cursor, architecture: Architecture) -> None:
        self.cursor = cursor
        self._architecture = architecture
        self.scope = Scope(None)
        self.scope.declare(_RESERVED_SHARED.name, _RESERVED_SHARED)
        # Kernels, functions with a body, and the signatures of all functions declared so far, by name.
        self.functions: dict[str, Function] = {}
        self.subroutines: dict[str, Function] = {}
        self.signatures: dict[str, Signature] = {}
        self.variables: list[DeclaredVariable] = []
        self._refusals: dict[str, ImageRejected] = {}
        self._aliases: dict[str, tuple[str, Lexeme]] = {}
        self._instruction_budget = MAX_IMAGE_INSTRUCTIONS
        self._dynamic_alignment = 1
        self._max_parameter_bytes = MAX_PARAMETER_BYTES

    def parse(self) -> Image:
        # Step 1: parse the two directives at the beginning of every module. They decide whether this device can run it.
        version, at = self._parse_version(), self.cursor.peek
        target = self._parse_target()
        if not takes_long_parameters(version, target):
            self._max_parameter_bytes = MAX_OLD_PARAMETER_BYTES
        if reason := self._architecture.rejection(version, target):
            hint = f"Compile it with a toolkit whose PTX this driver supports: nvcc -ptx -arch={self._architecture}."
            raise self.cursor.problem(reason, at, hint=hint)
        # Step 2: parse everything else, in any order.
        while self.cursor.peek.kind != "end":
            self._parse_item()
        # Step 3: do the checks for which all names must be known.
        self._resolve_aliases()
        self._check_relocations()
        image = Image(
            version,
            target,
            tuple(self.functions.values()),
            tuple(self.variables),
            tuple(self.subroutines.values()),
            refusals=self._refusals,
        )
        # This raises ImageRejected if every kernel was refused.
        image.check()
        return image

    def _parse_version(self) -> tuple[int, int]:
        """Parse `.version 9.0`, which must come first (PTX ISA section 11.1.1)."""
        cursor = self.cursor
        if cursor.directive() != "version":
            raise cursor.problem("the image must begin with .version", hint="Load PTX text as nvcc -ptx writes it.")
        token = cursor.expect("real")
        major, _, minor = token.text.partition(".")
        if not (major.isdigit() and minor.isdigit() and len(token.text) < 8):
            raise cursor.problem(f"the PTX version must be a number like 8.0, not {token.text[:60]!r}", token)
        return int(major), int(minor)

    def _parse_target(self) -> str:
        """Parse `.target sm_75, debug` (PTX ISA section 11.1.2)."""
        cursor = self.cursor
        if cursor.directive() != "target":
            raise cursor.problem("expected .target")
        name = cursor.expect("word").text
        # Further words are options such as `debug`, which have no effect here.
        while cursor.accept(","):
            cursor.expect("word")
        return name

    def _parse_item(self) -> None:
        cursor = self.cursor
        at = cursor.peek
        if cursor.accept(";"):
            return
        # `.visible .extern .weak .common` come before the object that they apply to.
        linkage: list[str] = []
        while (name := cursor.directive()) in _LINKAGE:
            linkage.append(str(name))
        try:
            self._parse_named(at, name, linkage)
        except NameTaken as error:
            raise cursor.problem(f"{str(error)[:60]} is declared twice", at) from None

    def _parse_named(self, at: Lexeme, name: str | None, linkage: list[str]) -> None:
        cursor = self.cursor
        match name:
            case "entry":
                self._parse_entry(at)
            case "func":
                self._parse_func(at)
            case "alias":
                self._parse_alias(at)
            case "global" | "const" | "shared":
                self._parse_variable(_SPACES[name], is_extern="extern" in linkage)
            # PTX for a 64-bit host always has the address size 64.
            case "address_size":
                if cursor.integer() != 64:
                    raise cursor.problem("only 64-bit addresses are supported", at)
            # Skip debug information.
            case "file" | "loc":
                cursor.skip_line(at.line)
            case "section":
                cursor.expect("directive")
                cursor.skip_braces()
            # Pragmas are hints to the compiler (PTX ISA section 11.5).
            case "pragma":
                cursor.expect("string")
                cursor.expect(";")
            case _:
                label = f".{name}" if name else at.text or "the end"
                raise cursor.problem(f"{label[:60]!r} is not supported at the top level", at)

    def _parse_variable(self, space: Space, *, is_extern: bool) -> None:
        variable = parse_variable(self.cursor, space, is_extern=is_extern)
        # A shared variable gets its offset in each kernel that names it. Dynamic arrays begin at the largest alignment
        # that one of them has.
        if space is Space.SHARED:
            variable = replace(variable, offset=_NO_PLACE)
            if variable.is_dynamic:
                self._dynamic_alignment = max(self._dynamic_alignment, variable.alignment)
        else:
            self.variables.append(variable)
        self.scope.declare(variable.name, variable)

    def _parse_entry(self, at: Lexeme) -> None:
        """Parse the rest of `.entry name(parameters) directives { body }` (PTX ISA section 11.3.1)."""
        cursor = self.cursor
        name = cursor.expect("word").text
        cursor.kernel = name[:60]
        if name in self.functions or name in self.signatures:
            raise NameTaken(name)
        parameters, size = parse_parameters(cursor, Space.PARAM, self._max_parameter_bytes)
        self.functions[name] = self._parse_function(name, at, Signature(parameters, size), is_kernel=True)

    def _parse_func(self, at: Lexeme) -> None:
        """Parse the rest of `.func (results) name(parameters) { body }`, or of a declaration (section 11.3.2)."""
        cursor = self.cursor
        results, result_bytes = parse_parameters(cursor, Space.RESULT)
        name = cursor.expect("word").text
        cursor.kernel = name[:60]
        signature = Signature(*parse_parameters(cursor, Space.PARAM), results, result_bytes)
        skip_function_directives(cursor)
        # A function may be declared any number of times, but defined only once.
        earlier = self.signatures.get(name)
        if name in self.subroutines or name in self.functions:
            raise NameTaken(name)
        # From here on, the function can be called and its address can be taken.
        if earlier is None:
            self.scope.declare(name, DeclaredVariable(name, Space.CODE, 0, 1))
        elif earlier.layout != signature.layout:
            raise cursor.problem(f"{name[:60]} is declared with other parameters before", at)
        self.signatures[name] = signature
        if len(self.signatures) > MAX_FUNCTIONS:
            raise cursor.problem(f"more than {MAX_FUNCTIONS} functions", at)
        if not cursor.accept(";"):
            self.subroutines[name] = self._parse_function(name, at, signature, is_kernel=False)
        cursor.kernel = ""

    def _parse_function(self, name: str, at: Lexeme, signature: Signature, *, is_kernel: bool) -> Function:
        """Parse directives and body, which follow the parameters. If they are refused, keep only the error."""
        cursor, start = self.cursor, self.cursor.peek
        if len(self.functions) + len(self.subroutines) >= MAX_FUNCTIONS:
            raise cursor.problem(f"more than {MAX_FUNCTIONS} kernels", at)
        body, bounds = BodyParser(cursor, self.scope, signature, self.signatures), Bounds()
        # Only kernels have performance directives. An error from here on concerns this function only.
        try:
            bounds = self._parse_bounds() if is_kernel else bounds
            body.parse()
            self._count_instructions(body.steps, at)
        except ImageRejected as error:
            self._refusals[name] = error
            # To recover, drop what was parsed of the body, and continue after its closing brace.
            body = BodyParser(cursor, self.scope, signature, self.signatures)
            self._skip_body(start, error)
        cursor.kernel = ""
        return replace(self._function(name, at, signature, body), bounds=bounds, is_kernel=is_kernel)

    def _count_instructions(self, count: int, at: Lexeme) -> None:
        # The limit is for the whole image, because many small functions take as long as a large one.
        if count > self._instruction_budget:
            raise self.cursor.problem(f"the image has more than {MAX_IMAGE_INSTRUCTIONS} instructions", at)
        self._instruction_budget -= count

    def _skip_body(self, start: Lexeme, error: ImageRejected) -> None:
        """Go back to `start`, and skip the function's body. Raises `error` if the braces of the body don't balance."""
        self.cursor.go_back(start)
        try:
            while self.cursor.peek.kind not in ("{", ";", "end"):
                self.cursor.take()
            self.cursor.skip_braces()
        except ImageRejected:
            raise error from None

    def _function(self, name: str, at: Lexeme, signature: Signature, body: BodyParser) -> Function:
        return Function(
            name=name,
            line=at.line,
            parameters=signature.parameters,
            parameter_bytes=signature.parameter_bytes,
            results=signature.results,
            result_bytes=signature.result_bytes,
            instructions=tuple(body.instructions),
            registers=tuple(body.registers.registers),
            shared_bytes=body.shared.size,
            module_shared=tuple(body.shared.adopted.values()),
            dynamic_shared_offset=round_up(body.shared.size, self._dynamic_alignment),
            local_bytes=body.local.size,
            local_alignment=body.local.alignment,
            call_bytes=body.calls.size,
            call_alignment=body.calls.alignment,
            bounds=Bounds(),
        )

    def _parse_alias(self, at: Lexeme) -> None:
        """Parse the rest of `.alias name, function;` (PTX ISA section 11.3.3)."""
        cursor = self.cursor
        name = cursor.expect("word").text
        cursor.expect(",")
        self._aliases[name] = (cursor.expect("word").text, at)
        cursor.expect(";")

    def _resolve_aliases(self) -> None:
        """Copy the function that each alias names (PTX ISA section 11.3.3)."""
        defined = dict(self.subroutines)
        for name, (target, at) in self._aliases.items():
            function = defined.get(target)
            if function is None or name not in self.signatures or name in defined:
                raise self.cursor.problem("an alias must be declared and not defined, and name a defined function", at)
            if self.signatures[name].layout != function.signature.layout:
                raise self.cursor.problem(f"{name[:60]} is declared with other parameters", at)
            # Count the instructions of the copy, so that many aliases can't multiply the work.
            self._count_instructions(len(function.instructions), at)
            self.subroutines[name] = replace(function, name=name)
            if target in self._refusals:
                self._refusals[name] = self._refusals[target]

    def _check_relocations(self) -> None:
        """Raise ImageRejected if an initialiser names something other than a variable of this image or a function."""
        names = {variable.name for variable in self.variables} | self.subroutines.keys()
        for variable in self.variables:
            for relocation in variable.relocations:
                if relocation.symbol not in names:
                    name = relocation.symbol[:60]
                    raise self.cursor.problem(f"the address of {name}, which initialises a variable, is unknown")

    def _parse_bounds(self) -> Bounds:
        """Parse performance directives (PTX ISA section 11.4). Only those that limit launches have an effect here."""
        cursor = self.cursor
        bounds = Bounds()
        while cursor.peek.kind == "directive":
            at = cursor.take()
            match at.text[1:]:
                case "maxntid":
                    bounds = replace(bounds, max_threads=prod(self._parse_dims()))
                case "reqntid":
                    x, y, z = self._parse_dims()
                    bounds = replace(bounds, required=(x, y, z))
                case "reqnctapercluster":
                    if prod(self._parse_dims()) > 1:
                        raise cursor.problem("clusters of several blocks are not supported", at)
                case "explicitcluster":
                    pass  # A cluster of one block is what every launch here has, so the directive has no effect.
                case "minnctapersm" | "maxnreg" | "maxnctapersm" | "maxclusterrank":
                    cursor.integer()
                case _:
                    raise cursor.problem(f"{at.text[:60]} is not supported", at)
        return bounds

    def _parse_dims(self) -> tuple[int, int, int]:
        at = self.cursor.peek
        dims = [self.cursor.integer()]
        while len(dims) < 3 and self.cursor.accept(","):
            dims.append(self.cursor.integer())
        if not all(0 < dim <= 2**31 for dim in dims):
            raise self.cursor.problem("a block must have at least one thread in each dimension", at)
        x, y, z = (*dims, 1, 1)[:3]
        return x, y, z
