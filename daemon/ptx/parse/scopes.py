"""Resolve names block by block: registers, variables and labels (PTX ISA sections 4.4 and 5.4)."""

from dataclasses import dataclass, field

from gpulease.daemon.ptx.limits import MAX_REGISTERS_PER_FUNCTION
from gpulease.daemon.ptx.parse.syntax import Register, Scalar, Signature, Variable

# `%r<100>` declares %r0 to %r99 (PTX ISA section 5.4.6): at most this many digits, see MAX_REGISTERS_PER_RANGE.
_RANGE_DIGITS = 7


class NameTaken(Exception):
    """A name was declared twice in one block."""


class TooManyRegisters(Exception):
    """A function names more registers than can be compiled in bounded memory."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A label before .branchtargets, .calltargets or .callprototype, and the list behind it."""

    kind: str
    names: tuple[str, ...] = ()
    signature: Signature | None = None


@dataclass(slots=True)
class RegisterFile:
    """The registers a function really names, in order of their first mention."""

    registers: list[Register] = field(default_factory=list)

    def add(self, name: str, scalar: Scalar) -> Register:
        """A new register."""
        if len(self.registers) >= MAX_REGISTERS_PER_FUNCTION:
            raise TooManyRegisters(f"more than {MAX_REGISTERS_PER_FUNCTION} registers in one function")
        register = Register(len(self.registers), name, scalar)
        self.registers.append(register)
        return register


@dataclass(slots=True)
class Scope:
    """The names of one block. A range of registers stays a range; members are made when first named."""

    parent: "Scope | None"
    names: dict[str, Register | Variable] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    listings: dict[str, Listing] = field(default_factory=dict)
    _ranges: dict[str, tuple[int, Scalar]] = field(default_factory=dict)
    _stems: set[str] = field(default_factory=set)

    def declare(self, name: str, meaning: Register | Variable) -> None:
        """Give a name its meaning in this block."""
        if name in self.names or name in self.labels or self._range_of(name):
            raise NameTaken(name)
        self.names[name] = meaning

    def declare_range(self, prefix: str, count: int, scalar: Scalar) -> None:
        """Declare prefix0 to prefix(count-1)."""
        stems = list(_stems(prefix))
        if prefix in self._ranges or prefix in self._stems or any(stem in self._ranges for stem in stems):
            raise NameTaken(prefix)
        if any(self.names.get(f"{prefix}{n}") for n in (0, count - 1)):
            raise NameTaken(prefix)
        self._ranges[prefix] = (count, scalar)
        self._stems.update(stems)

    def declare_label(self, name: str, index: int) -> None:
        """Mark the instruction a label stands before."""
        if name in self.labels or name in self.names:
            raise NameTaken(name)
        self.labels[name] = index

    def find(self, name: str, registers: RegisterFile) -> Register | Variable | None:
        """Resolve a name in this block or in those around it."""
        scope: Scope | None = self
        while scope is not None:
            meaning = scope.names.get(name)
            if meaning is None and (scalar := scope._range_of(name)):
                meaning = scope.names[name] = registers.add(name, scalar)
            if meaning is not None:
                return meaning
            scope = scope.parent
        return None

    def find_label(self, name: str) -> int | None:
        """The instruction a label stands before, seen from this block."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        return None

    def find_listing(self, name: str) -> Listing | None:
        """The list of targets or the prototype that has a label, seen from this block."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.listings:
                return scope.listings[name]
            scope = scope.parent
        return None

    def _range_of(self, name: str) -> Scalar | None:
        for prefix in _stems(name):
            held = self._ranges.get(prefix)
            number = name[len(prefix) :]
            if held and (number == "0" or number[0] != "0") and int(number) < held[0]:
                return held[1]
        return None


def _stems(name: str) -> list[str]:
    """Yield the stems of a name that may be a numbered member: without its last digit, two digits, and so on."""
    stems = []
    for cut in range(1, min(_RANGE_DIGITS, len(name) - 1) + 1):
        if not "0" <= name[-cut] <= "9":
            break
        stems.append(name[:-cut])
    return stems
