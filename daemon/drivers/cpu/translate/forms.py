"""Which spellings of an instruction are supported, and what translates them.

A form's template is written as the PTX ISA writes syntax: `add{.rn}{.ftz}{.sat}.f32` or `setp.cmp.type`, where a name
with choices (`cmp`, `type`) stands for one of them and any other name for itself. What matches no form is refused:
an unknown modifier may change the result.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpulease.daemon.drivers.cpu.ptx.scalars import SCALARS, Scalar
from gpulease.daemon.drivers.cpu.ptx.syntax import Instruction

if TYPE_CHECKING:
    from gpulease.daemon.drivers.cpu.translate.thread import ThreadTranslator

_SLOT = re.compile(r"(\{)?\.(\w+(?:::\w+)?)\}?")

UNSIGNED = ("u16", "u32", "u64")
SIGNED = ("s16", "s32", "s64")
INTEGERS = UNSIGNED + SIGNED
BITS = ("b16", "b32", "b64")
FLOATS = ("f32", "f64")


@dataclass(frozen=True, slots=True)
class Modifiers:
    """The modifiers of an instruction, by the names its form gives them."""

    found: dict[str, str]

    def __contains__(self, name: str) -> bool:
        return name in self.found

    def __getitem__(self, name: str) -> str:
        return self.found[name]

    def get(self, name: str) -> str:
        """What was chosen for a name, "" for an optional one that is absent."""
        return self.found.get(name, "")

    def scalar(self, name: str = "type") -> Scalar:
        """The type chosen for a name."""
        return SCALARS[self.found[name]]


Translate = Callable[["ThreadTranslator", Instruction, Modifiers], None]


@dataclass(frozen=True, slots=True)
class Form:
    """One spelling.

    Attributes:
        slots: For each modifier in order: its name, its choices, whether it may be left out.
        arity: How many operands it takes.
        writes: Whether the first operand is where the result goes.
        loose: Slots at the front whose modifiers may be given at any place.
    """

    template: str
    opcode: str
    slots: tuple[tuple[str, tuple[str, ...], bool], ...]
    arity: tuple[int, ...]
    writes: bool
    translate: Translate
    loose: tuple[str, ...] = ()

    def match(self, instruction: Instruction) -> Modifiers | None:
        """The instruction's modifiers by name, or None if it is spelled otherwise."""
        found: dict[str, str] = {}
        given = self._arranged(instruction.modifiers)
        for name, choices, optional in self.slots:
            if given and given[0] in choices:
                found[name] = given.pop(0)
            elif not optional:
                return None
        if given or len(instruction.operands) not in self.arity:
            return None
        return Modifiers(found)

    def _arranged(self, modifiers: tuple[str, ...]) -> list[str]:
        if not self.loose:
            return list(modifiers)
        places = {choice: name for name, choices, _ in self.slots if name in self.loose for choice in choices}
        order = {name: place for place, name in enumerate(self.loose)}
        return sorted(modifiers, key=lambda modifier: order.get(places.get(modifier, ""), len(order)))


class Family:
    """Instructions described together in one section of the PTX ISA."""

    def __init__(self, title: str, section: str, *, loose: tuple[str, ...] = ()) -> None:
        self.title = title
        self.section = section
        self.loose = loose
        self.forms: list[Form] = []

    def form(
        self, template: str, arity: int | tuple[int, ...], *, writes: bool = True, **choices: Sequence[str]
    ) -> Callable[[Translate], Translate]:
        """Register a function as what translates a form."""

        def register(translate: Translate) -> Translate:
            opcode = re.split(r"[.{]", template, maxsplit=1)[0]
            slots = tuple(
                (name, tuple(choices.get(name, (name,))), bool(brace))
                for brace, name in _SLOT.findall(template[len(opcode) :])
            )
            counts = (arity,) if isinstance(arity, int) else arity
            self.forms.append(Form(template, opcode, slots, counts, writes, translate, self.loose))
            return translate

        return register
