"""Arithmetic rounded towards zero, down or up (PTX ISA sections 9.7.3.3 to 9.7.3.13 and 9.7.3.19).

The host's floating-point unit does this, with its rounding mode changed for one instruction. The change is made in a
separate function that LLVM does not inline. The function is `strictfp`, so LLVM does not move operations over the
change. When it returns, the mode is nearest even again, so no other code is affected.
"""

from gpulease.daemon.ptx.parse.syntax import SCALARS, Instruction
from gpulease.daemon.ptx.translate.approximate import real
from gpulease.daemon.ptx.translate.floating import read_float, write_float
from gpulease.daemon.ptx.translate.forms import InstructionFamily, Modifiers
from gpulease.daemon.ptx.translate.operand_values import OperandTranslator, ir_type

_ROUND = ("rz", "rm", "rp")

FAMILY = InstructionFamily("Floating point, rounded otherwise", "9.7.3", round=_ROUND)

# The numbers of the modes in LLVM's llvm.set.rounding.
_NUMBERS = {"rz": 0, "rp": 2, "rm": 3}
_NEAREST = 1

_OPERATIONS = {
    "add": "fadd",
    "sub": "fsub",
    "mul": "fmul",
    "div": "fdiv",
    "rcp": "fdiv",
    "fma": "fma",
    "mad": "fma",
    "sqrt": "sqrt",
}


@FAMILY.form("add|sub|mul.round{.ftz}{.sat}.f32", 3)
@FAMILY.form("div.round{.ftz}.f32", 3)
@FAMILY.form("fma|mad.round{.ftz}{.sat}.f32", 4)
@FAMILY.form("sqrt|rcp.round{.ftz}.f32", 2)
@FAMILY.form("add|sub|mul|div.round.f64", 3)
@FAMILY.form("fma|mad.round.f64", 4)
@FAMILY.form("sqrt|rcp.round.f64", 2)
def calculate(t: OperandTranslator, i: Instruction, m: Modifiers) -> None:
    """Compute with one rounding in the given mode."""
    scalar = next(SCALARS[modifier] for modifier in i.modifiers if modifier in SCALARS)
    kind = ir_type(scalar)
    operands = [read_float(t, i, n, scalar, m) for n in range(1, len(i.operands))]
    # A reciprocal is 1 divided by the operand.
    if i.opcode == "rcp":
        operands.insert(0, real(kind, 1.0))
    operation, mode = _OPERATIONS[i.opcode], m["round"]
    # Use one function for each operation, mode, type and number of lanes. The module contains it once.
    lanes = t.ir.lanes_of(*operands)
    name = f"{operation}_{mode}_f{scalar.bits}_x{lanes}"
    definition = _definition(name, (operation, mode), kind, len(operands), lanes)
    result = t.ir.function(name, kind, definition, *operands)
    write_float(t, i, scalar, m, result)


def _definition(name: str, what: tuple[str, str], kind: str, arity: int, lanes: int) -> str:
    """Return the LLVM function that performs one operation in one mode, for `lanes` lanes."""
    operation, mode = what
    suffix = {"float": "f32", "double": "f64"}[kind]
    if lanes > 1:
        kind, suffix = f"<{lanes} x {kind}>", f"v{lanes}{suffix}"
    intrinsic = f"@llvm.experimental.constrained.{operation}.{suffix}"
    types = ", ".join([kind] * arity)
    parameters = ", ".join(f"{kind} %p{n}" for n in range(arity))
    return f"""declare {kind} {intrinsic}({types}, metadata, metadata)
declare void @llvm.set.rounding(i32)
define internal {kind} @{name}({parameters}) noinline strictfp {{
  call void @llvm.set.rounding(i32 {_NUMBERS[mode]}) strictfp
  %result = call {kind} {intrinsic}({parameters}, metadata !"round.dynamic", metadata !"fpexcept.strict") strictfp
  call void @llvm.set.rounding(i32 {_NEAREST}) strictfp
  ret {kind} %result
}}"""
