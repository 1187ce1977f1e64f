"""Writes the text of one LLVM function. This module does not depend on PTX."""

from typing import NamedTuple

# Names in the IR consist of fixed words and numbers, so that no text from a tenant gets into the IR.


class Value(NamedTuple):
    """An IR value: its type, and its name or literal."""

    type: str
    text: str

    def __str__(self) -> str:
        return f"{self.type} {self.text}"


def constant(type_name: str, number: int) -> Value:
    """Return an integer constant of an LLVM type."""
    if type_name == "i1":
        return Value("i1", "true" if number & 1 else "false")
    return Value(type_name, str(number))


FALSE = constant("i1", 0)
TRUE = constant("i1", 1)

# For loads of memory that does not change while a kernel runs. LLVM may load it early and keep it in registers.
INVARIANT = ", !invariant.load !0"

# For a branch that nearly always goes to its first label.
LIKELY = ", !prof !1"

# The result of a function that runs one lane after another, if no lane failed.
NO_LANE = -1

METADATA = '!0 = !{}\n!1 = !{!"branch_weights", i32 1048576, i32 1}\n'


class IrWriter:
    """Writes the body of one function, line by line.

    Args:
        declarations: Collects the declarations and definitions that the module needs.
        prefix: A prefix of all names, if several writers write parts of the same function.
    """

    def __init__(self, declarations: set[str], prefix: str = "") -> None:
        self.lines: list[str] = []
        self._declarations = declarations
        self._count = 0
        self._prefix = prefix
        self._terminated = False

    def fresh(self, stem: str = "v") -> str:
        self._count += 1
        return f"{self._prefix}{stem}{self._count}"

    def emit(self, line: str) -> None:
        """Add an instruction. After a terminator, this first opens a block that is never reached."""
        # LLVM requires every instruction to be in a block. It removes blocks that are never reached.
        if self._terminated:
            self.block(self.fresh("dead"))
        self.lines.append(f"  {line}")

    @property
    def is_ended(self) -> bool:
        """Whether the current block has a terminator."""
        return self._terminated

    def mark(self) -> tuple[int, bool]:
        """Return the current end of the function, for `rewind`."""
        return len(self.lines), self._terminated

    def rewind(self, mark: tuple[int, bool]) -> None:
        """Remove everything that was written since `mark` returned that end."""
        del self.lines[mark[0] :]
        self._terminated = mark[1]

    def argument(self, name: str) -> Value:
        """Return the function's argument with this name, the name of a special register."""
        return Value("i32", f"%{name}")

    def flat_thread(self) -> Value | None:
        """Return the thread's number in its block if it is already computed; otherwise None."""
        return None

    def value(self, type_name: str, expression: str) -> Value:
        """Emit an expression and return its result under a new name."""
        name = f"%{self.fresh()}"
        self.emit(f"{name} = {expression}")
        return Value(type_name, name)

    def binary(self, operation: str, left: Value, right: Value | int) -> Value:
        """Apply a binary operation to two values of the same type."""
        right = constant(left.type, right) if isinstance(right, int) else right
        return self.value(left.type, f"{operation} {left}, {right.text}")

    def unary(self, operation: str, value: Value) -> Value:
        """Apply a unary operation that does not change the type."""
        return self.value(value.type, f"{operation} {value}")

    def compare(self, condition: str, left: Value, right: Value | int) -> Value:
        """Compare two values, and return an i1. `condition` is LLVM's, such as "icmp ult" or "fcmp oeq"."""
        right = constant(left.type, right) if isinstance(right, int) else right
        return self.value("i1", f"{condition} {left}, {right.text}")

    def invert(self, flag: Value) -> Value:
        return self.binary("xor", flag, TRUE)

    def select(self, flag: Value, then: Value, other: Value) -> Value:
        return self.value(then.type, f"select {flag}, {then}, {other}")

    def cast(self, operation: str, value: Value, type_name: str) -> Value:
        """Convert a value to another type. If it already has that type, return it unchanged."""
        if value.type == type_name:
            return value
        return self.value(type_name, f"{operation} {value} to {type_name}")

    def resize(self, value: Value, type_name: str, *, signed: bool) -> Value:
        """Truncate or extend an integer to another integer type."""
        from_bits, to_bits = int(value.type[1:]), int(type_name[1:])
        return self.cast("trunc" if from_bits > to_bits else "sext" if signed else "zext", value, type_name)

    def require(self, definition: str) -> None:
        """Add a definition or declaration to the module, unless the module has it already."""
        self._declarations.add(definition)

    def intrinsic(self, name: str, type_name: str, *arguments: Value) -> Value:
        types = ", ".join(argument.type for argument in arguments)
        self._declarations.add(f"declare {type_name} @{name}({types})")
        return self.value(type_name, f"call {type_name} @{name}({', '.join(map(str, arguments))})")

    def lanes_of(self, *values: Value) -> int:
        """Return the number of lanes of an operation on these values."""
        return 1

    def function(self, name: str, type_name: str, definition: str, *arguments: Value) -> Value:
        """Call a function of this driver. Its definition, with the declarations it needs, is added to the module."""
        self._define(definition)
        return self.value(type_name, f"call {type_name} @{name}({', '.join(map(str, arguments))})")

    def _define(self, definition: str) -> None:
        # Add each declaration separately, because other definitions may also need it, and LLVM accepts it only once.
        for line in definition.splitlines():
            if line.startswith("declare"):
                self._declarations.add(line)
        self._declarations.add(definition[definition.index("define") :])

    def offset(self, pointer: Value, distance: Value | int) -> Value:
        """Return a pointer `distance` bytes after another."""
        distance = constant("i64", distance) if isinstance(distance, int) else distance
        return self.value("ptr", f"getelementptr i8, {pointer}, {distance}")

    def load(self, type_name: str, pointer: Value, *, extra: str = "") -> Value:
        """Load a value. `extra` is appended to the instruction, for example metadata."""
        return self.value(type_name, f"load {type_name}, {pointer}{extra}")

    def fixed(self, type_name: str, pointer: Value, distance: int) -> Value:
        """Load a value at a constant offset from a pointer. It must not change while a kernel runs."""
        return self.load(type_name, self.offset(pointer, distance), extra=INVARIANT)

    def store(self, value: Value, pointer: Value) -> None:
        self.emit(f"store {value}, {pointer}")

    def block(self, label: str) -> None:
        """Open a block. If the previous block has no terminator, it continues with the new one."""
        if not self._terminated:
            self.lines.append(f"  br label %{label}")
        self.lines.append(f"{label}:")
        self._terminated = False

    def branch(self, label: str) -> None:
        self._terminate(f"br label %{label}")

    def branch_if(self, flag: Value, then: str, other: str, *, extra: str = "") -> None:
        self._terminate(f"br {flag}, label %{then}, label %{other}{extra}")

    def switch(self, value: Value, default: str, cases: list[tuple[int, str]]) -> None:
        table = " ".join(f"{value.type} {number}, label %{label}" for number, label in cases)
        self._terminate(f"switch {value}, label %{default} [{table}]")

    def ret(self, number: int) -> None:
        """Return a constant status from the function (`ReturnStatus`)."""
        self._terminate(f"ret i32 {number}")

    def ret_value(self, status: Value) -> None:
        self._terminate(f"ret {status}")

    def copy(self, into: Value, source: Value, size: int) -> None:
        """Copy `size` bytes between places that do not overlap."""
        self._declarations.add("declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)")
        self.emit(f"call void @llvm.memcpy.p0.p0.i64({into}, {source}, i64 {size}, i1 false)")

    def room(self, name: str, size: int) -> None:
        """Reserve `size` bytes on the stack, filled with zeros. `name` is the pointer's name."""
        self._declarations.add("declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)")
        self.emit(f"{name} = alloca [{size} x i8], align 16")
        self.emit(f"call void @llvm.memset.p0.i64(ptr {name}, i8 0, i64 {size}, i1 false)")

    def _terminate(self, line: str) -> None:
        self.emit(line)
        self._terminated = True
