"""Writes the text of one LLVM function. It knows LLVM's grammar and nothing of PTX."""

from typing import NamedTuple

# Names in the IR are made only from numbers, so that no text of a tenant gets into the IR.


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

# For contents that do not change while a kernel runs: LLVM may keep them in registers and load them early.
INVARIANT = ", !invariant.load !0"

# For a branch that nearly always goes to its first label.
LIKELY = ", !prof !1"

# Returned by a function that runs one lane after another: no lane failed.
NO_LANE = -1

METADATA = '!0 = !{}\n!1 = !{!"branch_weights", i32 1048576, i32 1}\n'


class IrWriter:
    """The body of one function under construction, line by line."""

    def __init__(self, declarations: set[str], prefix: str = "") -> None:
        self.lines: list[str] = []
        self._declarations = declarations
        self._count = 0
        # Distinguishes the names that two writers give in one function.
        self._prefix = prefix
        self._terminated = False

    def fresh(self, stem: str = "v") -> str:
        self._count += 1
        return f"{self._prefix}{stem}{self._count}"

    def emit(self, line: str) -> None:
        """Add an instruction; after a terminator it opens a block that nothing reaches."""
        # LLVM demands that every instruction is in a block; it removes unreachable ones.
        if self._terminated:
            self.block(self.fresh("dead"))
        self.lines.append(f"  {line}")

    @property
    def is_ended(self) -> bool:
        """Whether the current block has its terminator."""
        return self._terminated

    def mark(self) -> tuple[int, bool]:
        """Return the current end of the function, for `rewind`."""
        return len(self.lines), self._terminated

    def rewind(self, mark: tuple[int, bool]) -> None:
        """Remove everything written since `mark` returned that end."""
        del self.lines[mark[0] :]
        self._terminated = mark[1]

    def argument(self, name: str) -> Value:
        """Return the function's argument with the name of a special register."""
        return Value("i32", f"%{name}")

    def flat_thread(self) -> Value | None:
        """Return the thread's number in its block if it has been computed already, else None."""
        return None

    def value(self, type_name: str, expression: str) -> Value:
        """Emit an expression and return its result under a new name."""
        name = f"%{self.fresh()}"
        self.emit(f"{name} = {expression}")
        return Value(type_name, name)

    def binary(self, operation: str, left: Value, right: Value | int) -> Value:
        """Apply a binary operation to two values of one type."""
        right = constant(left.type, right) if isinstance(right, int) else right
        return self.value(left.type, f"{operation} {left}, {right.text}")

    def unary(self, operation: str, value: Value) -> Value:
        """Apply a unary operation; its type stays the same."""
        return self.value(value.type, f"{operation} {value}")

    def compare(self, condition: str, left: Value, right: Value | int) -> Value:
        """Compare with a full LLVM condition, such as "icmp ult" or "fcmp oeq"; gives an i1."""
        right = constant(left.type, right) if isinstance(right, int) else right
        return self.value("i1", f"{condition} {left}, {right.text}")

    def invert(self, flag: Value) -> Value:
        return self.binary("xor", flag, TRUE)

    def select(self, flag: Value, then: Value, other: Value) -> Value:
        return self.value(then.type, f"select {flag}, {then}, {other}")

    def cast(self, operation: str, value: Value, type_name: str) -> Value:
        """Convert a value; return it unchanged if it has the type."""
        if value.type == type_name:
            return value
        return self.value(type_name, f"{operation} {value} to {type_name}")

    def resize(self, value: Value, type_name: str, *, signed: bool) -> Value:
        """Truncate or extend an integer to another integer type."""
        from_bits, to_bits = int(value.type[1:]), int(type_name[1:])
        return self.cast("trunc" if from_bits > to_bits else "sext" if signed else "zext", value, type_name)

    def require(self, definition: str) -> None:
        """Add a definition or declaration to the module, once."""
        self._declarations.add(definition)

    def intrinsic(self, name: str, type_name: str, *arguments: Value) -> Value:
        types = ", ".join(argument.type for argument in arguments)
        self._declarations.add(f"declare {type_name} @{name}({types})")
        return self.value(type_name, f"call {type_name} @{name}({', '.join(map(str, arguments))})")

    def lanes_of(self, *values: Value) -> int:
        """Return for how many lanes an operation on these values is."""
        return 1

    def function(self, name: str, type_name: str, definition: str, *arguments: Value) -> Value:
        """Call a function of this driver's own; its definition, and what that declares, is added to the module once."""
        self._define(definition)
        return self.value(type_name, f"call {type_name} @{name}({', '.join(map(str, arguments))})")

    def _define(self, definition: str) -> None:
        # Add declarations one by one: other definitions may need the same ones, and LLVM accepts each only once.
        for line in definition.splitlines():
            if line.startswith("declare"):
                self._declarations.add(line)
        self._declarations.add(definition[definition.index("define") :])

    def offset(self, pointer: Value, distance: Value | int) -> Value:
        """Return a pointer `distance` bytes after another."""
        distance = constant("i64", distance) if isinstance(distance, int) else distance
        return self.value("ptr", f"getelementptr i8, {pointer}, {distance}")

    def load(self, type_name: str, pointer: Value, *, extra: str = "") -> Value:
        """Load a value; `extra` is appended to the instruction, such as its metadata."""
        return self.value(type_name, f"load {type_name}, {pointer}{extra}")

    def fixed(self, type_name: str, pointer: Value, distance: int) -> Value:
        """Load a value at a constant offset from a pointer; the value must not change while a kernel runs."""
        return self.load(type_name, self.offset(pointer, distance), extra=INVARIANT)

    def store(self, value: Value, pointer: Value) -> None:
        self.emit(f"store {value}, {pointer}")

    def block(self, label: str) -> None:
        """Open a block. Control falls into it from the block before, unless that has a terminator."""
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
        """End the function with a constant status (`Status`)."""
        self._terminate(f"ret i32 {number}")

    def ret_value(self, status: Value) -> None:
        self._terminate(f"ret {status}")

    def copy(self, into: Value, source: Value, size: int) -> None:
        """Copy `size` bytes between places that do not overlap."""
        self._declarations.add("declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)")
        self.emit(f"call void @llvm.memcpy.p0.p0.i64({into}, {source}, i64 {size}, i1 false)")

    def room(self, name: str, size: int) -> None:
        """Reserve `size` zero bytes on the stack under a name."""
        self._declarations.add("declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)")
        self.emit(f"{name} = alloca [{size} x i8], align 16")
        self.emit(f"call void @llvm.memset.p0.i64(ptr {name}, i8 0, i64 {size}, i1 false)")

    def _terminate(self, line: str) -> None:
        self.emit(line)
        self._terminated = True
