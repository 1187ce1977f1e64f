"""Match an instruction's spelling to the function that translates it.

A form's template is written as the PTX ISA writes syntax: `add{.rn}{.ftz}{.sat}.f32` or `setp.cmp.type`, where a name
with choices (`cmp`, `type`) stands for one of them and any other name for itself. An instruction that matches no form
is refused: an unknown modifier may change the result.

ptxas accepts most modifiers in any order, and compilers rely on that: CUB writes `vote.ballot.sync.b32`. Forms do the
same, except for modifiers that ptxas distinguishes by position: types, layouts or spaces relative to each other, and
parts of the opcode (`mul.lo`).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gpulease.daemon.ptx.parse.syntax import SCALARS, Instruction, Scalar
from gpulease.protocol.fast_dataclass import dataclass

if TYPE_CHECKING:
    from gpulease.daemon.ptx.translate.thread import ThreadTranslator

# Kinds of modifiers that must keep their order among themselves: types, layouts, spaces.
_ORDERED_KINDS = (
    re.compile(r"(?:b|u|s|f|bf|tf)\d+(?:x\d)?|e\dm\d(?:x\d)?|pred"),
    re.compile(r"row|col"),
    re.compile(r"global|shared(?:::cta|::cluster)?"),
)

# Modifiers that come first or not at all (seen with ptxas 13.0).
_FIRST = ("lo", "hi", "wide", "l", "r", "warp", "to", "async", "idx")

# One modifier of a template, in braces if it is optional.
_SLOT = re.compile(r"(\{)?\.(\w+(?:::\w+)?)\}?")

UNSIGNED = ("u16", "u32", "u64")
SIGNED = ("s16", "s32", "s64")
INTEGERS = UNSIGNED + SIGNED
BITS = ("b16", "b32", "b64")
FLOATS = ("f32", "f64")


@dataclass(frozen=True, slots=True)
class Modifiers:
    """The modifiers of an instruction, by their names in the form that it matches."""

    found: dict[str, str]

    def __contains__(self, name: str) -> bool:
        return name in self.found

    def __getitem__(self, name: str) -> str:
        return self.found[name]

    def get(self, name: str) -> str:
        """Return the choice for a name, "" for an optional one that is absent."""
        return self.found.get(name, "")

    def scalar(self, name: str = "type") -> Scalar:
        return SCALARS[self.found[name]]


Translate = Callable[["ThreadTranslator", Instruction, Modifiers], None]


@dataclass(frozen=True, slots=True)
class Form:
    """A supported spelling.

    Attributes:
        slots: For each modifier in order: its name, its choices, whether it may be left out.
        arity: The numbers of operands that it may have.
        writes: Whether the first operand receives the result.
    """

    template: str
    opcode: str
    slots: tuple[tuple[str, tuple[str, ...], bool], ...]
    arity: tuple[int, ...]
    writes: bool
    translate: Translate

    def match(self, instruction: Instruction) -> Modifiers | None:
        """Return the instruction's modifiers by name, or None if its spelling does not match."""
        values: dict[str, str] = {}
        modifiers = list(instruction.modifiers)
        # Slots and modifiers advance together; an optional slot may be passed over.
        for name, choices, optional in self.slots:
            if modifiers and modifiers[0] in choices:
                values[name] = modifiers.pop(0)
            elif not optional:
                return None
        # A modifier left over is unknown here.
        if modifiers or len(instruction.operands) not in self.arity:
            return None
        return Modifiers(values)

    def match_in_any_order(self, instruction: Instruction) -> Modifiers | None:
        """Match modifiers in an order that the ISA does not list, but ptxas accepts."""
        # Sort the modifiers into the slots' order, then match as usual.
        modifiers = list(instruction.modifiers)
        if any(modifier in _FIRST for modifier in modifiers[1:]):
            return None
        arranged: list[str] = []
        for _, choices, optional in self.slots:
            choice = next((candidate for candidate in modifiers if candidate in choices), None)
            if choice is not None:
                arranged.append(choice)
                modifiers.remove(choice)
            elif not optional:
                return None
        # Where position carries meaning, sorting must not have changed the order.
        if modifiers or _ordered_modifiers(instruction.modifiers) != _ordered_modifiers(arranged):
            return None
        return self.match(replace(instruction, modifiers=tuple(arranged)))


def _ordered_modifiers(modifiers: Sequence[str]) -> list[list[str]]:
    """Return the types, the layouts and the spaces, each in their order."""
    return [[modifier for modifier in modifiers if kind.fullmatch(modifier)] for kind in _ORDERED_KINDS]


class InstructionFamily:
    """The instructions that one section of the PTX ISA describes together."""

    def __init__(self, title: str, section: str) -> None:
        self.title = title
        self.section = section
        self.forms: list[Form] = []

    def form(
        self, template: str, arity: int | tuple[int, ...], *, writes: bool = True, **choices: Sequence[str]
    ) -> Callable[[Translate], Translate]:
        """Register the decorated function as the translation of a form."""

        def register(translate: Translate) -> Translate:
            opcode = re.split(r"[.{]", template, maxsplit=1)[0]
            slots = tuple(
                (name, tuple(choices.get(name, (name,))), bool(brace))
                for brace, name in _SLOT.findall(template[len(opcode) :])
            )
            counts = (arity,) if isinstance(arity, int) else arity
            self.forms.append(Form(template, opcode, slots, counts, writes, translate))
            return translate

        return register
