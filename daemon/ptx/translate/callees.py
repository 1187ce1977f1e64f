"""The native functions that kernels call by name or through a pointer (PTX ISA section 9.7.12.5).

A function's address is not a memory address, but a number from the module's table of variables. A call through a
pointer looks up the number, so it can only reach a function of the same image. An image is compiled in parts; each part
has its own functions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field

from gpulease.daemon.ptx.limits import MAX_CALL_STACK_BYTES
from gpulease.daemon.ptx.native.structures import QueuedLaunch, ReturnStatus
from gpulease.daemon.ptx.parse.syntax import CallSite, Function, Instruction, Signature
from gpulease.daemon.ptx.translate.ir import INVARIANT, IrWriter, Value, constant
from gpulease.daemon.ptx.translate.specials import ARGUMENTS
from gpulease.protocol.fast_dataclass import dataclass

LAUNCH = Value("ptr", "%launch")
PASSED = Value("ptr", "%arguments")
RETURNED = Value("ptr", "%results")
STACK = Value("i64", "%stack")
STACK_END = Value("i64", "%stack_end")

# The arguments of every native function that a caller passes on unchanged. The other arguments differ between calls.
GIVEN = (LAUNCH, Value("ptr", "%environment"), Value("ptr", "%local"), *(Value("i32", f"%{n}") for n in ARGUMENTS))
SIGNATURE = ", ".join(map(str, (*GIVEN, PASSED, RETURNED, STACK, STACK_END)))

# The difference between the numbers of two functions, and the first number. Device memory never has such addresses.
HANDLE_STEP = 16
FIRST_HANDLE = 1 << 56

_HANDLE = Value("i64", "%handle")

Layout = tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]


@dataclass(slots=True)
class Callees:
    """Names the functions of one part. A function that gets a name will be translated.

    Attributes:
        functions: The functions of the image, by their names in PTX.
        addressed: The functions with addresses that are taken, in their order in the table of variables.
        first_place: The index of the first of them in the table.
        watching: The result of `call_graph.watching_functions`.
        prints: Whether translated code prints.
        allocates: Whether translated code calls malloc or free.
        pending: Functions that have a name in the IR but are not translated yet.
    """

    functions: Mapping[str, Function] = field(default_factory=dict)
    addressed: Sequence[str] = ()
    first_place: int = 0
    watching: frozenset[str] = frozenset()
    prints: bool = False
    allocates: bool = False
    pending: list[str] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)
    _by_layout: dict[Layout, list[tuple[int, str]]] = field(default_factory=dict)
    _dispatchers: dict[Layout, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for place, name in enumerate(self.addressed):
            self._by_layout.setdefault(self.functions[name].signature.layout, []).append((place, name))

    def mark(self) -> tuple[int, int]:
        """Return the numbers of names, for `undo`. No function may be pending."""
        return len(self._names), len(self._dispatchers)

    def undo(self, mark: tuple[int, int]) -> None:
        self.pending.clear()
        names, dispatchers = mark
        while len(self._names) > names:
            self._names.popitem()
        while len(self._dispatchers) > dispatchers:
            self._dispatchers.popitem()

    def calls(self, instruction: Instruction) -> bool:
        """Return whether an instruction calls, or may call through a pointer, a function with a body."""
        site = instruction.operands[-1] if instruction.operands else None
        return isinstance(site, CallSite) and (not site.name or site.name in self.functions)

    def name(self, function: str) -> str | None:
        """Return a function's name in the IR; None if it has no body. When first named, a function becomes pending."""
        if function not in self.functions:
            return None
        if function not in self._names:
            self._names[function] = f"func{len(self._names)}"
            self.pending.append(function)
        return self._names[function]

    def dispatcher(self, signature: Signature) -> str:
        """Return the name of the dispatcher, the function that makes calls through pointers with this signature."""
        layout = signature.layout
        if layout not in self._dispatchers:
            self._dispatchers[layout] = f"dispatch{len(self._dispatchers)}"
            # The pointer may refer to any function with this layout, so all of them must be translated.
            for _, function in self._by_layout.get(layout, ()):
                self.name(function)
        return self._dispatchers[layout]

    def dispatchers(self, declarations: set[str]) -> list[str]:
        """Return the IR of all dispatchers that have a name so far."""
        return [self._dispatcher(layout, name, declarations) for layout, name in self._dispatchers.items()]

    def _dispatcher(self, layout: Layout, name: str, declarations: set[str]) -> str:
        """Return the IR of a dispatcher, which selects a function with this layout by its number."""
        ir = IrWriter(declarations)
        table = ir.load("ptr", ir.offset(LAUNCH, QueuedLaunch.variables.offset), extra=INVARIANT)
        first = ir.load("i64", ir.offset(table, 8 * self.first_place), extra=INVARIANT)
        # Turn the number into an index of `addressed` by a rotation. A number between those of two functions becomes a
        # huge index, because its low bits are rotated to the top.
        distance = ir.binary("sub", _HANDLE, first)
        step = constant("i64", HANDLE_STEP.bit_length() - 1)
        number = ir.intrinsic("llvm.fshr.i64", "i64", distance, distance, step)
        candidates = self._by_layout.get(layout, [])
        ir.switch(number, "none", [(place, f"to{place}") for place, _ in candidates])
        for place, function in candidates:
            ir.block(f"to{place}")
            status = ir.value("i32", f"call i32 @{self._names[function]}({SIGNATURE})")
            ir.ret_value(status)
        ir.block("none")
        ir.ret(ReturnStatus.NO_FUNCTION)
        return "\n".join([f"define internal i32 @{name}({SIGNATURE}, {_HANDLE}) noinline {{", *ir.lines, "}", ""])


def frame_address(ir: IrWriter) -> Value:
    """Return the address of the current native stack frame, as i64."""
    address = ir.intrinsic("llvm.frameaddress.p0", "ptr", constant("i32", 0))
    return ir.cast("ptrtoint", address, "i64")


def name_stack_end(ir: IrWriter) -> None:
    """Compute STACK_END, the lowest address that the stack frames of a kernel's calls may have."""
    ir.emit(f"{STACK_END.text} = sub {frame_address(ir)}, {MAX_CALL_STACK_BYTES}")
