"""Resolves the names of registers, variables and labels in nested blocks (PTX ISA sections 4.4 and 5.4)."""

from dataclasses import field

from gpulease.daemon.ptx.limits import MAX_REGISTERS_PER_FUNCTION
from gpulease.daemon.ptx.parse.syntax import DeclaredVariable, Register, Scalar, Signature
from gpulease.protocol.fast_dataclass import dataclass

# Maximum number of digits after the prefix of a range: `%r<100>` declares %r0 to %r99 (PTX ISA section 5.4.6). It must
# fit MAX_REGISTERS_PER_RANGE.
_RANGE_DIGITS = 7


class NameTaken(Exception):
    """A name was declared twice in the same block of a function, or twice in the module."""


class TooManyRegisters(Exception):
    """A function names more registers than can be compiled in bounded memory."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The directive after a label: .branchtargets, .calltargets or .callprototype.

    Attributes:
        kind: The directive, with its dot.
        names: The names in the list; () for a prototype.
        signature: The signature of the prototype or of all functions in the list; None for .branchtargets.
    """

    kind: str
    names: tuple[str, ...] = ()
    signature: Signature | None = None


@dataclass(slots=True)
class RegisterFile:
    """The registers that a function's instructions name, and those that were declared singly, in this order."""

    registers: list[Register] = field(default_factory=list)

    def add(self, name: str, scalar: Scalar) -> Register:
        if len(self.registers) >= MAX_REGISTERS_PER_FUNCTION:
            raise TooManyRegisters(f"more than {MAX_REGISTERS_PER_FUNCTION} registers in one function")
        register = Register(len(self.registers), name, scalar)
        self.registers.append(register)
        return register


@dataclass(slots=True)
class Scope:
    """The names of one block. A range of registers stays a range; a member becomes a register when first named."""

    parent: "Scope | None"
    names: dict[str, Register | DeclaredVariable] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    listings: dict[str, Listing] = field(default_factory=dict)
    _ranges: dict[str, tuple[int, Scalar]] = field(default_factory=dict)
    _stems: set[str] = field(default_factory=set)

    def declare(self, name: str, declared: Register | DeclaredVariable) -> None:
        """Declare a name in this block. Raises NameTaken."""
        if name in self.names or name in self.labels or self._range_of(name):
            raise NameTaken(name)
        self.names[name] = declared

    def declare_range(self, prefix: str, count: int, scalar: Scalar) -> None:
        """Declare the registers prefix0 to prefix(count-1). Raises NameTaken; not all conflicts are detected."""
        # Two ranges can overlap only if their prefixes are equal, or if one prefix is a stem of the other: the other is
        # the stem plus digits.
        stems = list(_stems(prefix))
        if prefix in self._ranges or prefix in self._stems or any(stem in self._ranges for stem in stems):
            raise NameTaken(prefix)
        # Look up only the first and the last member, because a range can have a million. nvcc never declares a name
        # both in a range and singly.
        if any(self.names.get(f"{prefix}{n}") for n in (0, count - 1)):
            raise NameTaken(prefix)
        self._ranges[prefix] = (count, scalar)
        self._stems.update(stems)

    def declare_label(self, name: str, index: int) -> None:
        """Declare a label before the instruction with this index. Raises NameTaken."""
        if name in self.labels or name in self.names:
            raise NameTaken(name)
        self.labels[name] = index

    def find(self, name: str, registers: RegisterFile) -> Register | DeclaredVariable | None:
        """Return the register or variable with a name in this block or those around it; None if there is none."""
        scope: Scope | None = self
        while scope is not None:
            declared = scope.names.get(name)
            # When a member of a range is first named, make a register, and remember it like any other name.
            if declared is None and (scalar := scope._range_of(name)):
                declared = scope.names[name] = registers.add(name, scalar)
            if declared is not None:
                return declared
            scope = scope.parent
        return None

    def find_label(self, name: str) -> int | None:
        """Return the index of the instruction after a label; None if no block from this one outwards has the label."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        return None

    def find_listing(self, name: str) -> Listing | None:
        """Return the directive after a label; None if no block from this one outwards has one with this label."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.listings:
                return scope.listings[name]
            scope = scope.parent
        return None

    def _range_of(self, name: str) -> Scalar | None:
        for prefix in _stems(name):
            register_range = self._ranges.get(prefix)
            number = name[len(prefix) :]
            # Members have no leading zeros: `%r01` does not belong to `%r<100>`.
            if register_range and (number == "0" or number[0] != "0") and int(number) < register_range[0]:
                return register_range[1]
        return None


def _stems(name: str) -> list[str]:
    """Return a name without its last digit, without its last two digits, and so on, at most _RANGE_DIGITS of them."""
    stems = []
    for cut in range(1, min(_RANGE_DIGITS, len(name) - 1) + 1):
        if not "0" <= name[-cut] <= "9":
            break
        stems.append(name[:-cut])
    return stems
