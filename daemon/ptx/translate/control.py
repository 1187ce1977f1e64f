"""Control flow (PTX ISA sections 9.7.12 and 9.7.19)."""

from typing import TYPE_CHECKING

from gpulease.daemon.ptx.native.structures import Access
from gpulease.daemon.ptx.parse.syntax import Instruction, Space, Target
from gpulease.daemon.ptx.translate.access import fail_unless
from gpulease.daemon.ptx.translate.forms import Family, Modifiers
from gpulease.daemon.ptx.translate.ir import FALSE, constant
from gpulease.daemon.ptx.translate.wait_points import count_turn

if TYPE_CHECKING:
    from gpulease.daemon.ptx.translate.thread import ThreadTranslator

FAMILY = Family("Control flow", "9.7.12")


@FAMILY.form("bra{.uni}", 1, writes=False)
def branch(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """`bra`: continue at a label, where a loop that polls memory may first let others run."""
    target = i.operands[0]
    if not isinstance(target, Target):
        raise t.problem("a branch goes to a label")
    # Before the jump, because a loop ends with a branch: here a watching thread may let others run.
    count_turn(t)
    t.jump(target.index)


@FAMILY.form("ret{.uni}", 0, writes=False)
@FAMILY.form("exit", 0, writes=False)
def leave(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """`ret`, `exit`: end the function or the thread; in a kernel both end the thread."""
    t.leave(is_exit=i.opcode == "exit")


@FAMILY.form("trap", 0, writes=False)
def trap(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    fail_unless(t, FALSE, Access.TRAP, Space.GENERIC, constant("i64", 0), 0)


@FAMILY.form("brkpt", 0, writes=False)
def break_point(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """End the kernel with a fault, since no debugger can resume it."""
    fail_unless(t, FALSE, Access.BREAKPOINT, Space.GENERIC, constant("i64", 0), 0)
