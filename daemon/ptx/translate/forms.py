"""Finds the function that translates an instruction, by the instruction's opcode and modifiers.

The template of a form is written like the syntax in the PTX ISA: `add{.rn}{.ftz}{.sat}.f32` or `setp.cmp.type`. A name
with choices, such as `cmp` or `type`, represents one of its choices; any other name represents itself. Opcodes with the
same modifiers share a template: `add|sub.type`. An instruction that matches no form is refused, because an unknown
modifier may change the result.

ptxas accepts most modifiers in any order, and compilers use this: CUB writes `vote.ballot.sync.b32`. Forms also accept
any order, except for modifiers with a meaning that depends on the position. These are types, layouts and spaces
relative to others of the same kind, and parts of the opcode (`mul.lo`).
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

# Modifiers that ptxas 13.0 accepts only in the first place.
_FIRST = ("lo", "hi", "wide", "l", "r", "warp", "to", "async", "idx")

# A modifier in a template, in braces if it is optional.
_SLOT = re.compile(r"(\{)?\.(\w+(?:::\w+)?)\}?")

UNSIGNED = ("u16", "u32", "u64")
SIGNED = ("s16", "s32", "s64")
INTEGERS = UNSIGNED + SIGNED
BITS = ("b16", "b32", "b64")
FLOATS = ("f32", "f64")


@dataclass(frozen=True, slots=True)
class Modifiers:
    """The modifiers of an instruction, by their names in the form that matches it."""

    found: dict[str, str]

    def __contains__(self, name: str) -> bool:
        return name in self.found

    def __getitem__(self, name: str) -> str:
        return self.found[name]

    def get(self, name: str) -> str:
        """Return the modifier with a name in the form; "" if the instruction does not have it."""
        return self.found.get(name, "")

    def scalar(self, name: str = "type") -> Scalar:
        return SCALARS[self.found[name]]


Translate = Callable[["ThreadTranslator", Instruction, Modifiers], None]


@dataclass(frozen=True, slots=True)
class Form:
    """A supported spelling.

    Attributes:
        template: See the description of this module.
        opcode: The opcode.
        slots: For each modifier in order: its name, its choices, and whether it is optional.
        arity: The permitted numbers of operands.
        writes: Whether the first operand is the destination.
        translate: The function that translates instructions of this form.
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
        # Compare slots and modifiers one by one. An optional slot may be skipped.
        for name, choices, optional in self.slots:
            if modifiers and modifiers[0] in choices:
                values[name] = modifiers.pop(0)
            elif not optional:
                return None
        # A remaining modifier does not belong to this form.
        if modifiers or len(instruction.operands) not in self.arity:
            return None
        return Modifiers(values)

    def match_in_any_order(self, instruction: Instruction) -> Modifiers | None:
        """Return the modifiers by name if they match in an order that ptxas accepts, but the ISA does not list."""
        # Sort the modifiers in the order of the slots, then match as usual.
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
        # If the meaning depends on the position, sorting must not have changed the order.
        if modifiers or _ordered_modifiers(instruction.modifiers) != _ordered_modifiers(arranged):
            return None
        return self.match(replace(instruction, modifiers=tuple(arranged)))


def _ordered_modifiers(modifiers: Sequence[str]) -> list[list[str]]:
    """Return the types, the layouts and the spaces among modifiers, each kind in its order."""
    return [[modifier for modifier in modifiers if kind.fullmatch(modifier)] for kind in _ORDERED_KINDS]


class InstructionFamily:
    """The instructions that one section of the PTX ISA describes together.

    Args:
        title: The heading in the list of supported instructions.
        section: The section of the ISA.
        choices: Choices by name, for names that mean the same in all forms; a form may give a name other choices.
    """

    def __init__(self, title: str, section: str, **choices: Sequence[str]) -> None:
        self.title = title
        self.section = section
        self.forms: list[Form] = []
        self._choices = choices

    def form(
        self, template: str, arity: int | tuple[int, ...], *, writes: bool = True, **choices: Sequence[str]
    ) -> Callable[[Translate], Translate]:
        """Return a decorator that registers a function as a form's translation.

        Args:
            template: See the description of this module.
            arity: The permitted numbers of operands.
            writes: Whether the first operand is the destination.
            choices: Choices by name, in addition to the family's.
        """
        choices = self._choices | choices
        opcodes = re.split(r"[.{]", template, maxsplit=1)[0]
        modifiers = template[len(opcodes) :]
        slots = tuple(
            (name, tuple(choices.get(name, (name,))), bool(brace)) for brace, name in _SLOT.findall(modifiers)
        )
        counts = (arity,) if isinstance(arity, int) else arity

        def register(translate: Translate) -> Translate:
            for opcode in opcodes.split("|"):
                self.forms.append(Form(opcode + modifiers, opcode, slots, counts, writes, translate))
            return translate

        return register
