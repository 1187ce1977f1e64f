"""Instructions and kernels that must give the same bytes on a real card and on the embedded driver, from the same PTX.

Every instruction that the embedded driver supports, with every combination of its modifiers, runs on rows of operands:
combinations of each type's special values, and random bits from a fixed seed.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from gpulease.daemon.ptx.translate.form_table import FAMILIES
from gpulease.daemon.ptx.translate.forms import Form
from helpers.rows import OPERAND_NAMES, RESULT_BYTES, rows_ptx

ROWS: Final = 48

WIDTHS: Final = {
    **{f"{kind}{bits}": bits for kind in "usb" for bits in (8, 16, 32, 64)},
    "f16": 16,
    "bf16": 16,
    "f16x2": 32,
    "bf16x2": 32,
    "u16x2": 32,
    "s16x2": 32,
    "f32": 32,
    "f64": 64,
    "pred": 1,
}
_FLOAT_SPECIALS: Final = {
    "f32": (0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x3FC00000, 0x4B000001, 0x7F7FFFFF, 0x7F800000, 0x7FC00001),
    "f64": (
        0,
        1,
        0xFFFFFFFFFFFFF,
        0x10000000000000,
        0x3FF0000000000000,
        0x3FF8000000000000,
        0x43E0000000000000,
        0x7FEFFFFFFFFFFFFF,
        0x7FF0000000000000,
        0x7FF8000000000001,
    ),
    "f16": (0, 1, 0x3FF, 0x400, 0x3C00, 0x3E00, 0x7BFF, 0x7C00, 0x7E01),
    "bf16": (0, 1, 0x7F, 0x80, 0x3F80, 0x3FC0, 0x7F7F, 0x7F80, 0x7FC1),
}


@dataclass(frozen=True, slots=True)
class Spelled:
    """One instruction: its opcode with modifiers, and the types of its operands and of its result."""

    text: str
    operands: tuple[str, ...]
    result: str

    @property
    def body(self) -> str:
        """The instruction as text in a kernel of `rows_ptx`."""
        names = OPERAND_NAMES[: len(self.operands)]
        return f"{self.text} %d, {', '.join('%' + name for name in names)};"

    @property
    def ptx(self) -> str:
        """A module with a kernel `row` that runs the instruction on each row of operands."""
        return rows_ptx([self.body], self.operands, self.result)

    def rows(self) -> list[tuple[int, ...]]:
        """Return bit patterns for the operands, which are the same in every run."""
        draw = random.Random(",".join(self.operands))
        specials = list(itertools.product(*(_specials(kind) for kind in self.operands)))
        chosen = draw.sample(specials, min(len(specials), ROWS * 2 // 3))
        while len(chosen) < ROWS:
            chosen.append(tuple(draw.getrandbits(WIDTHS[kind]) for kind in self.operands))
        return chosen


def _specials(kind: str) -> tuple[int, ...]:
    if kind == "pred":
        return (0, 1)
    width = WIDTHS[kind]
    if kind in ("f16x2", "bf16x2"):
        halves = _FLOAT_SPECIALS[kind[:-2]]
        return tuple(low | high << 16 for low, high in itertools.pairwise((*halves, halves[0])))
    if kind in _FLOAT_SPECIALS:
        positive = _FLOAT_SPECIALS[kind]
        return positive + tuple(bits | 1 << (width - 1) for bits in positive)
    top = 1 << (width - 1)
    return (0, 1, 2, 7, width - 1, width, top - 1, top, top + 1, 2 * top - 1)


def spelled_instructions() -> Iterator[Spelled]:
    """Yield all supported instructions with all modifiers, if their operands are registers of known types."""
    seen = set()
    for family in FAMILIES:
        for form in family.forms:
            # Loads and stores are no functions of registers. They have by far the most combinations, which take
            # seconds.
            if form.opcode in ("ld", "st"):
                continue
            for text in _texts(form):
                spelled = _signed(form, text)
                if spelled is not None and spelled.text not in seen:
                    seen.add(spelled.text)
                    yield spelled


def _texts(form: Form) -> Iterator[tuple[str, ...]]:
    choices = [(("",) if optional else ()) + tuple(values) for _, values, optional in form.slots]
    for chosen in itertools.product(*choices):
        yield (form.opcode, *(part for part in chosen if part))


_SAME: Final = {
    **dict.fromkeys(("add", "sub", "mul", "div", "rem", "min", "max", "and", "or", "xor", "mul24", "copysign"), 2),
    **dict.fromkeys(("neg", "abs", "not", "sqrt", "rcp", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh", "brev"), 1),
    **dict.fromkeys(("mad", "fma", "mad24"), 3),
}


def _signed(form: Form, parts: tuple[str, ...]) -> Spelled | None:
    """Return the instruction with its operands' types; None if its result does not depend on registers only."""
    text = ".".join(parts)
    kinds = [part for part in parts if part in WIDTHS]
    if not kinds:
        return None
    kind, opcode = kinds[-1], parts[0]
    if opcode in _SAME and "cc" not in parts:
        operands, result = (kind,) * _SAME[opcode], kind
        if "wide" in parts:
            result = kind[0] + str(2 * WIDTHS[kind])
            operands = (kind, kind, result)[: _SAME[opcode]]
        return _plain(text, operands, result)
    match opcode:
        case "cvt" if len(kinds) == 2 and len(form.arity) == 1 and form.arity[0] == 2:
            return _plain(text, (kinds[1],), kinds[0])
        case "cvt" if "pack" in parts:
            return _plain(text, ("s32", "s32", *kinds[2:]), "b32")
        case "cvt" if kinds[0].endswith("x2") and form.arity == (3,):
            return _plain(text, ("f32", "f32"), kinds[0])
        case "setp" | "set" if not _stands_for_all(opcode, set(parts)):
            return None
        case "setp" if not kind.endswith("x2"):
            return _plain(text, (kind, kind, *_further_predicate(parts)), "pred")
        case "set":
            return _plain(text, (kind, kind, *_further_predicate(parts)), kinds[0])
        case "testp":
            return _plain(text, (kind,), "pred")
        case "slct":
            return _plain(text, (kinds[0], kinds[0], kind), kinds[0])
        case "cnot":
            return _plain(text, (kind,), kind)
        case "sad":
            return _plain(text, (kind,) * 3, kind)
        case "dp2a" | "dp4a":
            result = "u32" if kinds == ["u32", "u32"] else "s32"
            return _plain(text, (kinds[0], kinds[1], result), result)
        case "fns":
            return _plain(text, ("b32",) * 3, "b32")
        case "bmsk" | "szext":
            return _plain(text, (kind,) * 2, kind)
        case "selp":
            return _plain(text, (kind, kind, "pred"), kind)
        case "shl" | "shr":
            return _plain(text, (kind, "b32"), kind)
        case "clz" | "popc" | "bfind":
            return _plain(text, (kind,), "u32")
        case "bfe":
            return _plain(text, (kind, "b32", "b32"), kind)
        case "bfi":
            return _plain(text, (kind, kind, "b32", "b32"), kind)
        case "shf":
            return _plain(text, ("b32", "b32", "b32"), "b32")
        case "prmt":
            return _plain(text, ("b32", "b32", "b32"), "b32")
    return None


def _stands_for_all(opcode: str, parts: set[str]) -> bool:
    """Return whether to include a comparison: every simple setp, and a few of the thousands of other combinations."""
    if {"and", "or", "xor"} & parts:
        return "lt" in parts and (opcode == "setp" or "xor" in parts)
    return opcode == "setp" or bool({"lt", "equ", "nan", "ls"} & parts)


def _further_predicate(parts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the type of the predicate with which a comparison's result is combined, if any (PTX ISA section 9.7.6)."""
    return ("pred",) * bool({"and", "or", "xor"} & set(parts))


def _plain(text: str, operands: tuple[str, ...], result: str) -> Spelled | None:
    # Only comparisons may result in a predicate, because only their kernels store one as a number.
    if result == "pred" and not text.startswith(("setp", "testp")):
        return None
    return Spelled(text, operands, result)


def results_of(data: bytes, kind: str) -> list[str]:
    """Return each row's result as hex digits."""
    digits = max(1, WIDTHS[kind] // 4)
    mask = (1 << max(WIDTHS[kind], 4)) - 1
    return [
        f"{int.from_bytes(data[at : at + RESULT_BYTES], 'little') & mask:0{digits}x}"
        for at in range(0, len(data), RESULT_BYTES)
    ]
