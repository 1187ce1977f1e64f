"""The tree of a parsed PTX text, and PTX's fundamental types (PTX ISA section 5.2, "Types").

An operand has the register or variable itself in place of its name.
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
        """Whether the type is .f32 or .f64. For this driver, .f16 and .bf16 are types of bits."""
        return self.kind is Kind.FLOAT

    @property
    def is_signed(self) -> bool:
        return self.kind is Kind.SIGNED

    def accepts(self, register: "Scalar") -> bool:
        """Return whether an operand of this type may be a register of the other type (PTX ISA section 9.2)."""
        # The sizes must be equal, and a predicate matches only a predicate. A type of bits matches every type, and
        # integers match each other.
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
    # Registers of the types .b16 and .b32 may contain these types (section 5.2.3), so they are types of bits here.
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
    # PTX has no names for the next spaces. RESULT and CALL are .param variables of a function's results and of its
    # calls. CODE is the space of functions.
    RESULT = "result"
    CALL = "call"
    CODE = "code"


@dataclass(frozen=True, slots=True)
class Register:
    """A virtual register. `index` is its number within its function."""

    index: int
    name: str
    type: Scalar


@dataclass(frozen=True, slots=True)
class Relocation:
    """An address in an initial value. At `offset` are `size` bytes of `symbol + addend`, from bit `shift` on."""

    offset: int
    size: int
    symbol: str
    addend: int = 0
    shift: int = 0


@dataclass(frozen=True, slots=True)
class DeclaredVariable:
    """A declared variable of any space.

    Attributes:
        name: Its name.
        space: Its state space.
        size: Its size in bytes.
        alignment: Its alignment in bytes, a power of two.
        offset: Bytes from the start of its function's area of that space. Not used for GLOBAL and CONST, whose
            variables get addresses when the image is loaded.
        initial: Its first bytes. The others are 0.
        is_dynamic: Whether it is `.extern .shared x[]`, which begins after the static shared memory.
        relocations: The parts of `initial` that are known only when the image is loaded.
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
    """The parameters and results of a function or prototype, with their offsets in the buffers that pass them."""

    parameters: tuple[DeclaredVariable, ...] = ()
    parameter_bytes: int = 0
    results: tuple[DeclaredVariable, ...] = ()
    result_bytes: int = 0

    @property
    def layout(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """Offsets and sizes of parameters and results. A call through a pointer requires equal layouts."""
        parameters = tuple((v.offset, v.size) for v in self.parameters)
        return parameters, tuple((v.offset, v.size) for v in self.results)


@dataclass(frozen=True, slots=True)
class Integer:
    """An integer literal modulo 2^64 (PTX ISA section 4.5.1)."""

    value: int


@dataclass(frozen=True, slots=True)
class Real:
    """A floating-point literal (section 4.5.2).

    Attributes:
        pattern: The bits of the number; for a decimal literal, those of a double.
        bits: The width: 32 for the form 0f, 64 for the form 0d, 0 for a decimal literal.
    """

    pattern: int
    bits: int


@dataclass(frozen=True, slots=True)
class Special:
    """A special register such as %tid.x (PTX ISA section 10)."""

    name: str


@dataclass(frozen=True, slots=True)
class Target:
    """A label. `index` is the index of the instruction after it."""

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
    """`!p`, the complement of a predicate."""

    register: Register


@dataclass(frozen=True, slots=True)
class Sink:
    """`_`, a destination that discards the value."""


@dataclass(frozen=True, slots=True)
class CallSite:
    """Arguments and results of a `call`. `name` is "" for a call through a register, which is then another operand."""

    name: str
    signature: Signature
    arguments: tuple[DeclaredVariable, ...]
    results: tuple[DeclaredVariable, ...]


Operand = Register | Integer | Real | Special | Target | Symbol | Address | Vector | Pair | Negated | Sink | CallSite


@dataclass(frozen=True, slots=True)
class PredicateGuard:
    """`@p` or `@!p`: the instruction is executed only if the predicate is true, or false (PTX ISA section 9.3)."""

    register: Register
    negated: bool


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction.

    Attributes:
        line: Its line, from 1.
        text: That line of the source.
        guard: Its predicate; None if it is always executed.
        opcode: Its name, such as "add".
        modifiers: The words after the opcode, without their dots.
        operands: Its operands.
    """

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
    """The performance directives that limit a launch (PTX ISA section 11.4).

    Attributes:
        max_threads: Maximum number of threads of a block, the product of .maxntid; 0 if the kernel has no limit.
        required: The dimensions of a block that .reqntid requires; None if the kernel accepts any.
    """

    max_threads: int = 0
    required: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class Function:
    """An .entry or .func with its body. Sizes are in bytes.

    Attributes:
        shared_bytes: Size of the shared variables that have a declared size.
        dynamic_shared_offset: Offset at which `.extern` shared arrays begin. They get their size at launch.
        results: The results of a .func; `result_bytes` is their size.
        call_bytes: Size of the .param variables for its calls.
        module_shared: The module's shared variables that the function names.
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
    module_shared: tuple[DeclaredVariable, ...] = ()

    @property
    def signature(self) -> Signature:
        return Signature(self.parameters, self.parameter_bytes, self.results, self.result_bytes)


@dataclass(frozen=True, slots=True)
class Image:
    """A whole PTX module.

    Attributes:
        version: The PTX version: major, minor.
        target: The target architecture, such as "sm_90".
        functions: The kernels.
        variables: The variables in device memory.
        subroutines: The functions with a body that are not kernels.
        addressed: The functions whose addresses are taken, in the order of the table of addresses, where they come
            after the variables. None until the image is linked (translate/call_graph.py).
        refusals: The errors that are known of kernels and functions, by name. A function whose body could not be parsed
            has no instructions.
    """

    version: tuple[int, int]
    target: str
    functions: tuple[Function, ...]
    variables: tuple[DeclaredVariable, ...] = field(default=())
    subroutines: tuple[Function, ...] = field(default=())
    addressed: tuple[str, ...] | None = None
    refusals: dict[str, ImageRejected] = field(default_factory=dict)

    def check(self) -> None:
        """Raise the first refusal, an ImageRejected, if all kernels were refused."""
        if self.refusals and all(kernel.name in self.refusals for kernel in self.functions):
            raise next(iter(self.refusals.values()))
