"""PTX's fundamental types (PTX ISA section 5.2, "Types")."""

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What a type's bits mean."""

    BITS = "b"
    SIGNED = "s"
    UNSIGNED = "u"
    FLOAT = "f"
    PREDICATE = "pred"


@dataclass(frozen=True, slots=True)
class Scalar:
    """One fundamental type: its PTX name without the dot, its width, and what the bits mean."""

    name: str
    bits: int
    kind: Kind

    @property
    def size(self) -> int:
        """Bytes in memory; 0 for a predicate, which has no place there."""
        return self.bits // 8

    @property
    def is_float(self) -> bool:
        """Whether arithmetic on it rounds."""
        return self.kind is Kind.FLOAT

    @property
    def is_signed(self) -> bool:
        """Whether widening repeats the sign bit."""
        return self.kind is Kind.SIGNED

    def accepts(self, register: "Scalar") -> bool:
        """Whether an operand of this type may be a register of that one (PTX ISA section 9.2, "Type Information")."""
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
    # Section 5.2.3: held in .b16 and .b32 registers as well. No host type is theirs, so what they mean is up to the
    # instruction.
    for name, bits in (("f16", 16), ("bf16", 16), ("f16x2", 32), ("bf16x2", 32)):
        table[name] = Scalar(name, bits, Kind.BITS)
    return table


SCALARS = _scalars()
PREDICATE = SCALARS["pred"]
