"""Translates operands to IR values, and writes results to registers (PTX ISA sections 6 and 9.4)."""

from gpulease.daemon.drivers.interface import ImageRejected
from gpulease.daemon.ptx.limits import rejected
from gpulease.daemon.ptx.native.structures import QueuedLaunch
from gpulease.daemon.ptx.parse.declarations import decimal_pattern
from gpulease.daemon.ptx.parse.syntax import (
    PREDICATE,
    SCALARS,
    DeclaredVariable,
    Function,
    Instruction,
    Integer,
    Kind,
    Negated,
    Operand,
    Real,
    Register,
    Scalar,
    Sink,
    Space,
    Special,
    Symbol,
)
from gpulease.daemon.ptx.translate.ir import INVARIANT, IrWriter, Value, constant
from gpulease.daemon.ptx.translate.specials import SHARED_SIZES, read_shared_size, read_special

# Arguments of every function that runs a thread.
LAUNCH = Value("ptr", "%launch")
ENVIRONMENT = Value("ptr", "%environment")
LOCAL = Value("ptr", "%local")


def ir_type(scalar: Scalar) -> str:
    """Return the LLVM type for arithmetic on a scalar."""
    if scalar.is_float:
        return {32: "float", 64: "double"}[scalar.bits]
    return f"i{scalar.bits}"


class OperandTranslator:
    """Reads and writes the operands of the current instruction. Registers are stored as integers of their width."""

    def __init__(self, function: Function, address_indices: dict[str, int], ir: IrWriter) -> None:
        self.function = function
        self.ir = ir
        # The instruction that is being translated, for error messages.
        self.instruction: Instruction | None = None
        # The carry flag and the operation that set it; None after a label or wait, where it may not have been set.
        self.carry: tuple[str, Value] | None = None
        # The size of the thread's local window, in bytes.
        self.local_limit = function.local_bytes
        self._address_indices = address_indices

    def local_window(self) -> Value:
        """Return the address at which the thread's local memory begins."""
        return LOCAL

    def problem(self, reason: str) -> ImageRejected:
        """Return the error that refuses the current instruction."""
        line, text = (self.instruction.line, self.instruction.text) if self.instruction else (0, "")
        return rejected(reason, line=line, text=text, kernel=self.function.name)

    # --- Reading -----------------------------------------------------------------------------------------------

    def read(self, operand: Operand, scalar: Scalar) -> Value:
        """Read an operand as a type. Raises ImageRejected if the type does not accept the register or constant."""
        # Nothing is converted: PTX ISA section 9.2 lists which types of registers an instruction accepts.
        match operand:
            case Register():
                if not scalar.accepts(operand.type):
                    raise self.problem(f"{operand.name} is .{operand.type.name}, not .{scalar.name}")
                return self.from_bits(self._load(operand), scalar)
            case Negated(register) if scalar == PREDICATE:
                return self.ir.invert(self.read(register, scalar))
            case Integer(value) if scalar == PREDICATE:
                # A predicate constant is an integer. All numbers except for 0 are true (PTX ISA section 4.5.3).
                return constant("i1", int(value != 0))
            case Integer(value) if not scalar.is_float and scalar != PREDICATE:
                return constant(ir_type(scalar), value & (2**scalar.bits - 1))
            case Real():
                return self._read_real(operand, scalar)
            case Special(name):
                return self._read_special(name, scalar)
            case Symbol(variable, offset):
                return self._read_symbol(variable, offset, scalar)
        raise self.problem(f"an operand can't be read as .{scalar.name}")

    def read_wide(self, operand: Operand, scalar: Scalar) -> Value:
        """Read as `read` does, but also accept a wider register, and return its low bits (PTX ISA section 9.4.1)."""
        if isinstance(operand, Register) and self._is_wider(operand, scalar):
            return self.ir.resize(self._load(operand), f"i{scalar.bits}", signed=False)
        return self.read(operand, scalar)

    def _load(self, register: Register) -> Value:
        return self.ir.load(f"i{register.type.bits}", Value("ptr", f"%r{register.index}"))

    def _read_real(self, operand: Real, scalar: Scalar) -> Value:
        pattern: int | None = operand.pattern
        # A decimal constant is rounded to the type. A hexadecimal one must have its width.
        if operand.bits == 0 and scalar.is_float:
            pattern = decimal_pattern(operand.pattern, scalar.bits)
        elif operand.bits != scalar.bits or scalar.kind not in (Kind.FLOAT, Kind.BITS):
            pattern = None
        if pattern is None:
            raise self.problem(f"a floating-point constant can't be read as .{scalar.name}")
        return self.from_bits(constant(f"i{scalar.bits}", pattern), scalar)

    def _read_special(self, name: str, scalar: Scalar) -> Value:
        bare = name.removeprefix("%")
        # Sizes of shared memory depend on the function, the other registers only on the launch and the thread.
        if bare in SHARED_SIZES:
            value: Value | None = read_shared_size(self.ir, bare, self.function.dynamic_shared_offset)
        else:
            value = read_special(self.ir, bare)
        if value is None:
            raise self.problem(f"{name[:60]} is neither declared nor a special register this driver supports")
        # As in ptxas, the type in the instruction must be that of the special register.
        if value.type != ir_type(scalar):
            raise self.problem(f"{name} can't be read as .{scalar.name}")
        return value

    def _read_symbol(self, variable: DeclaredVariable, offset: int, scalar: Scalar) -> Value:
        # These variables are on the native stack, and a kernel must not get addresses of the stack.
        if variable.space in (Space.CALL, Space.RESULT):
            raise self.problem(f"the address of {variable.name[:60]} can't be taken")
        # Offsets into a window fit 32 bits; device addresses do not.
        windowed = variable.space in (Space.SHARED, Space.LOCAL, Space.PARAM)
        if scalar.is_float or not (scalar.bits == 64 or (scalar.bits == 32 and windowed)):
            raise self.problem(f"the address of {variable.name[:60]} can't be read as .{scalar.name}")
        return self.ir.resize(self.address_of(variable, offset), f"i{scalar.bits}", signed=False)

    def has_variable(self, variable: DeclaredVariable) -> bool:
        """Return whether the module has a variable in device or constant memory."""
        return variable.name in self._address_indices

    def address_of(self, variable: DeclaredVariable, offset: int) -> Value:
        """Return a variable's address in its own space, as i64."""
        # Device variables and functions get addresses when the image is loaded. Read them from the launch's table.
        if variable.space in (Space.GLOBAL, Space.CONST, Space.CODE):
            if variable.name not in self._address_indices:
                raise self.problem(f"{variable.name[:60]} is declared but defined nowhere")
            table = self.ir.fixed("ptr", LAUNCH, QueuedLaunch.variables.offset)
            place = self.ir.offset(table, 8 * self._address_indices[variable.name])
            return self.ir.binary("add", self.ir.load("i64", place, extra=INVARIANT), offset)
        # In a window, the address is an offset, which is known now.
        start = self.function.dynamic_shared_offset if variable.is_dynamic else variable.offset
        return constant("i64", (start + offset) & (2**64 - 1))

    # --- Writing -----------------------------------------------------------------------------------------------

    def write(self, operand: Operand, scalar: Scalar, value: Value) -> None:
        """Write a result of this type to a register. Raises ImageRejected if the type does not accept the register."""
        register = self._destination(operand)
        if register is None:
            return
        if not scalar.accepts(register.type):
            raise self.problem(f"{register.name} is .{register.type.name}, not .{scalar.name}")
        self._store(register, self.to_bits(value, scalar))

    def write_wide(self, operand: Operand, scalar: Scalar, value: Value) -> None:
        """Write as `write` does. For a wider register, extend the value by its sign or zeros (section 9.4.1)."""
        register = self._destination(operand)
        if register is None or not self._is_wider(register, scalar):
            return self.write(operand, scalar, value)
        self._store(register, self.ir.resize(value, f"i{register.type.bits}", signed=scalar.is_signed))

    def _is_wider(self, register: Register, scalar: Scalar) -> bool:
        if scalar.is_float or register.type.is_float or PREDICATE in (scalar, register.type):
            return False
        return register.type.bits > scalar.bits

    def _destination(self, operand: Operand) -> Register | None:
        match operand:
            case Register():
                return operand
            case Sink():
                return None
        raise self.problem("a result must go to a register")

    def _store(self, register: Register, value: Value) -> None:
        self.ir.store(value, Value("ptr", f"%r{register.index}"))

    # --- Bits and numbers --------------------------------------------------------------------------------------

    def from_bits(self, value: Value, scalar: Scalar) -> Value:
        """Reinterpret an integer of the scalar's width as the type for arithmetic (see `ir_type`)."""
        return self.ir.cast("bitcast", value, ir_type(scalar))

    def to_bits(self, value: Value, scalar: Scalar) -> Value:
        """Reinterpret a value of that type as an integer of the scalar's width."""
        return self.ir.cast("bitcast", value, f"i{scalar.bits}")


def bits_type(bits: int) -> Scalar:
    """Return the type of bits with this width: .b8, .b16, .b32 or .b64."""
    return SCALARS[f"b{bits}"]
