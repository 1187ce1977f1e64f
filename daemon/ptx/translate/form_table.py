"""All families of instructions, and the search for the form that matches an instruction."""

from gpulease.daemon.ptx.limits import rejected
from gpulease.daemon.ptx.parse.syntax import Instruction
from gpulease.daemon.ptx.translate.approximate import FAMILY as APPROXIMATE
from gpulease.daemon.ptx.translate.async_copies import FAMILY as COPYING
from gpulease.daemon.ptx.translate.atomics import FAMILY as ATOMICS
from gpulease.daemon.ptx.translate.barriers import FAMILY as BARRIERS
from gpulease.daemon.ptx.translate.bulk import FAMILY as BULK
from gpulease.daemon.ptx.translate.comparison import COMPARISON, SET
from gpulease.daemon.ptx.translate.control import CALLS, CONTROL
from gpulease.daemon.ptx.translate.conversion import FAMILY as CONVERSION
from gpulease.daemon.ptx.translate.directed import FAMILY as DIRECTED
from gpulease.daemon.ptx.translate.fences import FAMILY as ORDERING
from gpulease.daemon.ptx.translate.floating import FAMILY as FLOATING
from gpulease.daemon.ptx.translate.forms import Form, Modifiers
from gpulease.daemon.ptx.translate.half import FAMILY as HALF
from gpulease.daemon.ptx.translate.integer import CARRY, INTEGER
from gpulease.daemon.ptx.translate.loads_stores import FAMILY as MEMORY
from gpulease.daemon.ptx.translate.logic import FAMILY as LOGIC
from gpulease.daemon.ptx.translate.matrix import FAMILY as MATRIX
from gpulease.daemon.ptx.translate.minifloats import FAMILY as MINIFLOATS
from gpulease.daemon.ptx.translate.movement import MOVEMENT, PLACEMENT
from gpulease.daemon.ptx.translate.multimedia import FAMILY as MULTIMEDIA
from gpulease.daemon.ptx.translate.narrow_conversions import FAMILY as NARROWING
from gpulease.daemon.ptx.translate.phases import FAMILY as PHASES
from gpulease.daemon.ptx.translate.selection import FAMILY as SELECTION
from gpulease.daemon.ptx.translate.specials import NAMES
from gpulease.daemon.ptx.translate.tiles import FAMILY as TILES
from gpulease.daemon.ptx.translate.video import FAMILY as VIDEO
from gpulease.daemon.ptx.translate.warp import FAMILY as WARP

FAMILIES = (
    INTEGER,
    CARRY,
    MULTIMEDIA,
    VIDEO,
    FLOATING,
    DIRECTED,
    APPROXIMATE,
    HALF,
    COMPARISON,
    SET,
    SELECTION,
    LOGIC,
    MOVEMENT,
    PLACEMENT,
    MEMORY,
    CONVERSION,
    NARROWING,
    MINIFLOATS,
    CONTROL,
    CALLS,
    BARRIERS,
    WARP,
    MATRIX,
    TILES,
    ATOMICS,
    ORDERING,
    COPYING,
    BULK,
    PHASES,
)

# The instructions of these families only compute registers of a thread from registers of the same thread. So lanes can
# execute them together.
_PURE = (
    INTEGER,
    CARRY,
    MULTIMEDIA,
    VIDEO,
    FLOATING,
    DIRECTED,
    APPROXIMATE,
    HALF,
    COMPARISON,
    SET,
    SELECTION,
    LOGIC,
    MOVEMENT,
    CONVERSION,
    NARROWING,
    MINIFLOATS,
)
PURE_OPCODES = frozenset(form.opcode for family in _PURE for form in family.forms)


def _by_opcode() -> dict[str, list[Form]]:
    table: dict[str, list[Form]] = {}
    for family in FAMILIES:
        for form in family.forms:
            table.setdefault(form.opcode, []).append(form)
    return table


_FORMS = _by_opcode()


def find_form(instruction: Instruction, kernel: str) -> tuple[Form, Modifiers]:
    """Return an instruction's form, and its modifiers by name. Raises ImageRejected if no form matches."""
    # First try the ISA's order of modifiers, which nearly always matches.
    for form in _FORMS.get(instruction.opcode, ()):
        modifiers = form.match(instruction)
        if modifiers is not None:
            return form, modifiers
    # Then try any other order that ptxas accepts.
    for form in _FORMS.get(instruction.opcode, ()):
        modifiers = form.match_in_any_order(instruction)
        if modifiers is not None:
            return form, modifiers
    # If the opcode is known, say so, because the user may find another form in the list.
    is_known = instruction.opcode in _FORMS
    label = "this form of" if is_known else "the instruction"
    raise rejected(
        f"{label} {instruction.spelling[:80]} is not supported by the embedded driver",
        line=instruction.line,
        text=instruction.text,
        kernel=kernel,
        hint="The supported instructions are listed in daemon/ptx/README.md.",
    )


def supported_table() -> str:
    """Return README.md's table of supported instructions, in Markdown."""
    lines = ["| family | PTX ISA | forms |", "|---|---|---|"]
    for family in FAMILIES:
        forms = "<br>".join(f"`{_describe(form)}`" for form in family.forms)
        lines.append(f"| {family.title} | {family.section} | {forms} |")
    specials = ", ".join(f"`%{name}`" for name in NAMES)
    lines.append(f"| Special registers | 10 | {specials} |")
    return "\n".join(lines)


def _describe(form: Form) -> str:
    text = form.opcode
    for _, choices, optional in form.slots:
        # Separate alternatives by commas, because a vertical bar would end the table's cell.
        slot = f".{choices[0]}" if len(choices) == 1 else f".({','.join(choices)})"
        text += f"[{slot}]" if optional else slot
    return text
