"""The tree that a PTX text becomes, and PTX's fundamental types (PTX ISA section 5.2, "Types").

Names are resolved: an operand holds the register or variable that it names.
"""

from dataclasses import field
from enum import Enum

from gpulease.daemon.drivers.interface import ImageRejected
from gpulease.protocol.fast_dataclass import dataclass


class Kind(Enum):
    BITS = "b"
    SIGNED = "s"
    UNSIGNED = "u"
    FLOAT = "f"
    PREDICATE = "pred"


@dataclass(frozen=True, slots=True)
class Scalar:
    """A fundamental type: the PTX name without the dot, the width, and the meaning of the bits."""

    name: str
    bits: int
    kind: Kind

    @property
    def size(self) -> int:
        """Bytes in memory; 0 for a predicate, which can't be stored."""
        return self.bits // 8

    @property
    def is_float(self) -> bool:
        """Whether the type is .f32 or .f64; .f16 and its kin are bits to this driver."""
        return self.kind is Kind.FLOAT

    @property
    def is_signed(self) -> bool:
        return self.kind is Kind.SIGNED

    def accepts(self, register: "Scalar") -> bool:
        """Say whether an operand of this type may be a register of the other type (PTX ISA section 9.2)."""
        # Sizes must agree, and a predicate matches only itself. Then bits match everything, integers each other.
        if self.bits != register.bits or Kind.PREDICATE in (self.kind, register.kind):
            return self == register
        return Kind.BITS in (self.kind, register.kind) or self.is_float == register.is_float


def _scalars() -> dict[str, Scalar]:
    table = {"pred": Scalar("pred", 1, Kind.PREDICATE)}
    for bits in (8, 16, 32, 64):
        for kind in (Kind.BITS, Kind.SIGNED, Kind.UNSIGNED):
            table[f"{kind.value}{bits}"] = Scalar(f"{kind.value}{bits}", bits, kind)
    for bits in (32, 64):
        table[f"f{bits}"] = Scalar(f"f{bits}", bits, Kind.FLOAT)
    # Section 5.2.3: these are held in .b16 and .b32 registers as well. The host has no such types, so the instruction
    # decides the meaning of the bits. instruction.
    for name, bits in (("f16", 16), ("bf16", 16), ("f16x2", 32), ("bf16x2", 32)):
        table[name] = Scalar(name, bits, Kind.BITS)
    return table


SCALARS = _scalars()
PREDICATE = SCALARS["pred"]


class Space(Enum):
    """The state spaces of variables and addresses (PTX ISA section 5.1)."""

    GENERIC = "generic"
    GLOBAL = "global"
    CONST = "const"
    SHARED = "shared"
    LOCAL = "local"
    PARAM = "param"
    # Not spelled in PTX: the .param variables of a function's results and of calls, and the space of functions' names.
    RESULT = "result"
    CALL = "call"
    CODE = "code"


@dataclass(frozen=True, slots=True)
class Register:
    """A virtual register; `index` numbers it within its function."""

    index: int
    name: str
    type: Scalar


@dataclass(frozen=True, slots=True)
class Relocation:
    """A part of an initialiser that is an address: `size` bytes of `symbol + addend`, from bit `shift` on."""

    offset: int
    size: int
    symbol: str
    addend: int = 0
    shift: int = 0


@dataclass(frozen=True, slots=True)
class DeclaredVariable:
    """A declared variable of any space.

    Attributes:
        offset: Bytes from the start of its function's or module's area of that space; without meaning for GLOBAL and
            CONST, which are placed at load.
        initial: Its first bytes, b"" for zeros.
        is_dynamic: `.extern .shared x[]`: it begins where the static shared memory ends.
        relocations: The parts of `initial` that are known only at load.
    """

    name: str
    space: Space
    size: int
    alignment: int
    offset: int = 0
    initial: bytes = b""
    is_dynamic: bool = False
    relocations: tuple[Relocation, ...] = ()


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameters and results of a function or prototype, with their places in their buffers."""

    parameters: tuple[DeclaredVariable, ...] = ()
    parameter_bytes: int = 0
    results: tuple[DeclaredVariable, ...] = ()
    result_bytes: int = 0

    @property
    def layout(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """Return offsets and sizes; a function can be called through a pointer if its prototype has the same."""
        parameters = tuple((v.offset, v.size) for v in self.parameters)
        return parameters, tuple((v.offset, v.size) for v in self.results)


@dataclass(frozen=True, slots=True)
class Integer:
    """An integer literal, already cut to 64 bits (PTX ISA section 4.5.1)."""

    value: int


@dataclass(frozen=True, slots=True)
class Real:
    """A floating-point literal; `bits` is 32 or 64 for the 0f and 0d forms, 0 for a decimal one (section 4.5.2)."""

    pattern: int
    bits: int


@dataclass(frozen=True, slots=True)
class Special:
    """A special register such as %tid.x (PTX ISA section 10)."""

    name: str


@dataclass(frozen=True, slots=True)
class Target:
    """A label, as the index of the instruction it stands before."""

    name: str
    index: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """The address of a variable plus a constant number of bytes."""

    variable: DeclaredVariable
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Address:
    """`[base+offset]` (PTX ISA section 6.4.1); the base is a register, a variable or an absolute address."""

    base: "Register | DeclaredVariable | Integer"
    offset: int


@dataclass(frozen=True, slots=True)
class Vector:
    """`{a, b}` as an operand (PTX ISA section 6.4.2)."""

    elements: tuple["Operand", ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """`p|q`, the two destinations of `setp` and `shfl`."""

    first: "Operand"
    second: "Operand"


@dataclass(frozen=True, slots=True)
class Negated:
    """`!p`, a predicate used as its complement."""

    register: Register


@dataclass(frozen=True, slots=True)
class Sink:
    """`_`, a destination that discards the value."""


@dataclass(frozen=True, slots=True)
class CallSite:
    """Arguments and results of a `call`; `name` is empty for a call through the register in the other operand."""

    name: str
    signature: Signature
    arguments: tuple[DeclaredVariable, ...]
    results: tuple[DeclaredVariable, ...]


Operand = Register | Integer | Real | Special | Target | Symbol | Address | Vector | Pair | Negated | Sink | CallSite


@dataclass(frozen=True, slots=True)
class PredicateGuard:
    """`@p` or `@!p`, which predicates an instruction (PTX ISA section 9.3)."""

    register: Register
    negated: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction. `modifiers` follow the opcode, one per dot; `line` is 1-based."""

    line: int
    text: str
    guard: PredicateGuard | None
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]

    @property
    def spelling(self) -> str:
        return ".".join((self.opcode, *self.modifiers))


@dataclass(frozen=True, slots=True)
class Bounds:
    """Performance directives that limit a launch (PTX ISA section 11.4); 0 where the kernel has none.

    Attributes:
        max_threads: The product of .maxntid.
        required: The block that .reqntid demands, or None.
    """

    max_threads: int = 0
    required: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class Function:
    """An .entry or .func with its body. Sizes are in bytes.

    Attributes:
        shared_bytes: Bytes of the shared variables with a declared size.
        dynamic_shared_offset: Where `.extern` shared arrays begin, which get their size at launch.
        results: What a .func returns; their sum is `result_bytes`.
        call_bytes: Bytes of the .param variables of its calls.
        module_shared: The module's shared variables that it names.
    """

    name: str
    line: int
    parameters: tuple[DeclaredVariable, ...]
    parameter_bytes: int
    instructions: tuple[Instruction, ...]
    registers: tuple[Register, ...]
    shared_bytes: int
    dynamic_shared_offset: int
    local_bytes: int
    bounds: Bounds
    is_kernel: bool = True
    results: tuple[DeclaredVariable, ...] = ()
    result_bytes: int = 0
    call_bytes: int = 0
    call_alignment: int = 1
    local_alignment: int = 1
    shared_alignment: int = 1
    module_shared: tuple[DeclaredVariable, ...] = ()

    @property
    def signature(self) -> Signature:
        """Return the layout of the function's parameters and results."""
        return Signature(self.parameters, self.parameter_bytes, self.results, self.result_bytes)


@dataclass(frozen=True, slots=True)
class Image:
    """A whole PTX module: version, target, its kernels, the variables that live in device memory, its functions.

    Attributes:
        addressed: The functions that are addressed; the table of addresses has them in this order, after the
            variables. None until the image is linked (translate/call_graph.py).
        refusals: Why kernels and functions can't be translated, by name, as far as known. A refused one that could
            not be parsed has no instructions.
    """

    version: tuple[int, int]
    target: str
    functions: tuple[Function, ...]
    variables: tuple[DeclaredVariable, ...] = field(default=())
    subroutines: tuple[Function, ...] = field(default=())
    addressed: tuple[str, ...] | None = None
    refusals: dict[str, ImageRejected] = field(default_factory=dict)

    def check(self) -> None:
        """Raise the first refusal, an ImageRejected, if it leaves no kernel that could run."""
        if self.refusals and all(kernel.name in self.refusals for kernel in self.functions):
            raise next(iter(self.refusals.values()))
