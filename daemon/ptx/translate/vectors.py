"""Writes LLVM IR in which a value is a scalar, the same for all lanes, or a vector with an element for each lane.

Code that translates instructions does not distinguish the two. A value's `type` is always that of one lane, and if one
operand of an operation is a vector, the others are widened. If an operation can't be done on vectors, such as raw text
or a branch, it raises NotWide.
"""

from gpulease.daemon.ptx.native.structures import ReturnStatus
from gpulease.daemon.ptx.translate.ir import INVARIANT, IrWriter, Value, constant

# The prefix of the names of vectors, and of no other names.
_WIDE = "%wide"

# Hosts have no vector instructions for these operations, so LLVM writes an operation for each lane.
_SCALAR_OPERATIONS = ("sdiv", "udiv", "srem", "urem")
_SCALAR_INTRINSICS = ("llvm.sin.", "llvm.cos.", "llvm.log2.", "llvm.tanh.")

# Number of lines of IR as which one lane's operation counts: to extract the elements, compute, and insert the result.
_SCALAR_COST = 4

# The last argument of these intrinsics is a flag, which must be a scalar constant.
_FLAGGED = ("llvm.abs.", "llvm.ctlz.", "llvm.cttz.")


class NotWide(Exception):
    """An instruction can only be translated for one lane at a time."""


class NotAsLanes(Exception):
    """The threads of a kernel can't run together as lanes. They will run one after another."""


def is_wide(value: Value) -> bool:
    return value.text.startswith((_WIDE, "<"))


class VectorWriter(IrWriter):
    """Writes the body of one function for a number of lanes.

    Attributes:
        lanes: The number of lanes.
        blamed: The lane that a fault at this point reports.
        arguments: The threads' indices, as vectors, by the name of the special register.
        flat: The threads' numbers in their block, as a vector; None if they are not computed.
        lane: The lane for which code is being written; None for all lanes.
    """

    def __init__(self, declarations: set[str], lanes: int, prefix: str = "") -> None:
        super().__init__(declarations, prefix)
        self.lanes = lanes
        self.blamed = constant("i32", 0)
        self.arguments: dict[str, Value] = {}
        self.flat: Value | None = None
        self.lane: Value | None = None
        # The number of operations that LLVM will write for the lanes separately.
        self._more = 0
        # Values that are loaded once, at the beginning of the function, by type, pointer and offset.
        self.opening: dict[tuple[str, str, int], Value] = {}

    # --- Operations on scalars or vectors ----------------------------------------------------------------------

    def binary(self, operation: str, left: Value, right: Value | int) -> Value:
        right = constant(left.type, right) if isinstance(right, int) else right
        if not (is_wide(left) or is_wide(right)):
            return super().binary(operation, left, right)
        self._more += self.lanes * (operation in _SCALAR_OPERATIONS)
        return self.wide_value(left.type, f"{operation} {self.whole(left)}, {self.widen(right).text}")

    def unary(self, operation: str, value: Value) -> Value:
        if not is_wide(value):
            return super().unary(operation, value)
        return self.wide_value(value.type, f"{operation} {self.whole(value)}")

    def compare(self, condition: str, left: Value, right: Value | int) -> Value:
        right = constant(left.type, right) if isinstance(right, int) else right
        if not (is_wide(left) or is_wide(right)):
            return super().compare(condition, left, right)
        return self.wide_value("i1", f"{condition} {self.whole(left)}, {self.widen(right).text}")

    def select(self, flag: Value, then: Value, other: Value) -> Value:
        if not (is_wide(flag) or is_wide(then) or is_wide(other)):
            return super().select(flag, then, other)
        choice = self.whole(flag) if is_wide(flag) else str(flag)
        return self.wide_value(then.type, f"select {choice}, {self.whole(then)}, {self.whole(other)}")

    def cast(self, operation: str, value: Value, type_name: str) -> Value:
        if value.type == type_name or not is_wide(value):
            return super().cast(operation, value, type_name)
        return self.wide_value(type_name, f"{operation} {self.whole(value)} to {self.wide_type(type_name)}")

    def intrinsic(self, name: str, type_name: str, *arguments: Value) -> Value:
        """Call an LLVM intrinsic. If an argument is a vector, call the version for vectors."""
        if not any(is_wide(argument) for argument in arguments):
            return super().intrinsic(name, type_name, *arguments)
        if not name.startswith("llvm."):
            raise NotWide
        self._more += self.lanes * name.startswith(_SCALAR_INTRINSICS)
        # For example, the overloaded name llvm.umin.i32 becomes llvm.umin.v16i32.
        overloads = name.split(".")
        stem = [part for part in overloads if not _is_type(part)]
        wide = ".".join([*stem, *(f"v{self.lanes}{part}" for part in overloads if _is_type(part))])
        # Some intrinsics have a flag as their last argument, which stays a scalar.
        plain = arguments[-1:] if name.startswith(_FLAGGED) else ()
        vector_arguments = arguments[: len(arguments) - len(plain)]
        types = ", ".join(
            [*(self.wide_type(value.type) for value in vector_arguments), *(value.type for value in plain)]
        )
        result = self.wide_type(type_name)
        self.require(f"declare {result} @{wide}({types})")
        passed = ", ".join([*map(self.whole, vector_arguments), *map(str, plain)])
        return self.wide_value(type_name, f"call {result} @{wide}({passed})")

    @property
    def length(self) -> int:
        return len(self.lines) + _SCALAR_COST * self._more

    def lanes_of(self, *values: Value) -> int:
        return self.lanes if any(map(is_wide, values)) else 1

    def function(self, name: str, type_name: str, definition: str, *arguments: Value) -> Value:
        """Call a function of this driver. The name of a version for lanes ends with their number."""
        if self.lanes_of(*arguments) == 1:
            return super().function(name, type_name, definition, *arguments)
        if not name.endswith(f"_x{self.lanes}"):
            raise NotWide
        self._define(definition)
        passed = ", ".join(map(self.whole, arguments))
        return self.wide_value(type_name, f"call {self.wide_type(type_name)} @{name}({passed})")

    def fixed(self, type_name: str, pointer: Value, distance: int) -> Value:
        """Load a value that never changes. It is loaded once, at the beginning of the function (`open_fixed`)."""
        return self.opening.setdefault(
            (type_name, pointer.text, distance), Value(type_name, f"%fixed{len(self.opening)}")
        )

    def open_fixed(self, opening: IrWriter) -> None:
        """Write the loads that `fixed` has collected."""
        for (kind, pointer, distance), value in self.opening.items():
            place = opening.offset(Value("ptr", pointer), distance)
            opening.emit(f"{value.text} = load {kind}, {place}{INVARIANT}")

    def argument(self, name: str) -> Value:
        """Return the threads' indices as a vector, or the index of the current lane."""
        index = self.arguments.get(name)
        return super().argument(name) if index is None else self._here(index)

    def flat_thread(self) -> Value | None:
        """Return the threads' numbers in their block, or the current lane's number; None if they are not computed."""
        return None if self.flat is None else self._here(self.flat)

    def _here(self, value: Value) -> Value:
        return value if self.lane is None else self.value_of(value, self.lane)

    # --- Operations that are not possible on vectors -----------------------------------------------------------

    def emit(self, line: str) -> None:
        """Add an instruction. Raises NotWide if the line contains the name of a vector."""
        if _WIDE in line:
            raise NotWide
        super().emit(line)

    def ret(self, number: int) -> None:
        """End the function with a status. For a fault, add the lane at fault in the bits from 8 on."""
        if number != ReturnStatus.FAULT:
            super().ret(number)
            return
        lane = self.binary("shl", self.blamed, 8)
        self.ret_value(self.binary("or", lane, number))

    # --- For code that handles lanes explicitly ----------------------------------------------------------------

    def wide_type(self, type_name: str) -> str:
        """Return the LLVM vector type with an element of this type for each lane."""
        return f"<{self.lanes} x {type_name}>"

    def wide_value(self, type_name: str, expression: str) -> Value:
        """Emit an expression with a vector as its result, and return the result under a new name."""
        name = f"{_WIDE}{self.fresh('')}"
        self.raw(f"{name} = {expression}")
        return Value(type_name, name)

    def raw(self, line: str) -> None:
        """Add an instruction that may contain names of vectors, which `emit` refuses."""
        super().emit(line)

    def widen(self, value: Value) -> Value:
        """Return a value as a vector. If it is a scalar, each lane gets a copy."""
        if is_wide(value):
            return value
        # LLVM has a special syntax for vectors of a constant.
        if not value.text.startswith("%"):
            return Value(value.type, f"splat ({value})")
        kind = self.wide_type(value.type)
        # This is LLVM's idiom for a broadcast: insert the value into element 0, then copy element 0 to all elements.
        first = self.wide_value(value.type, f"insertelement {kind} poison, {value}, i64 0")
        zeros = f"<{self.lanes} x i32> zeroinitializer"
        return self.wide_value(value.type, f"shufflevector {kind} {first.text}, {kind} poison, {zeros}")

    def whole(self, value: Value) -> str:
        """Return the text of a value as a vector operand, with its type."""
        return f"{self.wide_type(value.type)} {self.widen(value).text}"

    def each(self, type_name: str, step: int = 1) -> Value:
        """Return a constant vector: 0 for the first lane, `step` for the second, and so on."""
        return Value(type_name, f"<{', '.join(f'{type_name} {lane * step}' for lane in range(self.lanes))}>")

    def first(self, value: Value) -> Value:
        """Return the first lane's element of a vector."""
        return self.value_of(value, constant("i64", 0))

    def value_of(self, value: Value, lane: Value) -> Value:
        name = f"%{self.fresh()}"
        self.raw(f"{name} = extractelement {self.whole(value)}, {lane}")
        return Value(value.type, name)

    def mask_of(self, flags: Value) -> Value:
        """Pack the flags of the lanes into an integer. Lane 0 is the lowest bit."""
        name = f"%{self.fresh()}"
        kind = f"i{self.lanes}"
        self.raw(f"{name} = bitcast {self.whole(flags)} to {kind}")
        return Value(kind, name)

    def flags_of(self, mask: Value) -> Value:
        """Unpack the bits of an integer into a flag for each lane."""
        return self.wide_value("i1", f"bitcast {mask} to {self.wide_type('i1')}")


def _is_type(part: str) -> bool:
    return part[0] in "if" and part[1:].isdigit()
