"""Fences, and hints that have no effect here (PTX ISA sections 9.7.9, 9.7.13 and 9.7.19).

All threads of a block run on one host thread. So a fence among them only has to prevent LLVM from reordering accesses.
"""

from typing import TYPE_CHECKING

from gpulease.daemon.ptx.parse.syntax import SCALARS, Address, Instruction, Integer
from gpulease.daemon.ptx.translate.forms import InstructionFamily, Modifiers
from gpulease.daemon.ptx.translate.ir import constant

if TYPE_CHECKING:
    from gpulease.daemon.ptx.translate.thread import ThreadTranslator

_SCOPES = ("cta", "cluster", "gpu", "sys")
_EVICTIONS = ("L2::evict_last", "L2::evict_normal")
_POLICIES = ("L2::evict_last", "L2::evict_normal", "L2::evict_first", "L2::evict_unchanged")
_SECOND_POLICIES = ("L2::evict_first", "L2::evict_unchanged")

FAMILY = InstructionFamily("Fences and hints", "9.7.9, 9.7.13, 9.7.19", way=_POLICIES, other=_SECOND_POLICIES)


@FAMILY.form("membar.level", 0, writes=False, level=("cta", "gl", "sys"))
@FAMILY.form("fence{.order}.scope", 0, writes=False, order=("sc", "acq_rel", "acquire", "release"), scope=_SCOPES)
@FAMILY.form("fence.proxy.alias", 0, writes=False)
@FAMILY.form("fence.proxy.async{.space}", 0, writes=False, space=("global", "shared::cta", "shared::cluster"))
@FAMILY.form("fence.mbarrier_init.release.cluster", 0, writes=False)
def fence(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Prevent the reordering of accesses. A `.cta` fence concerns only the threads of one host thread."""
    among = 'syncscope("singlethread") ' if "cta" in i.modifiers else ""
    t.ir.emit(f"fence {among}seq_cst")


@FAMILY.form("prefetch{.space}.level", 1, writes=False, space=("global", "local"), level=("L1", "L2"))
@FAMILY.form("prefetch.global.evict", 1, writes=False, evict=_EVICTIONS)
@FAMILY.form("prefetchu.L1", 1, writes=False)
@FAMILY.form("applypriority{.global}.L2::evict_normal", 2, writes=False)
def hint(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Do nothing, because the hint only affects caches. Any address is allowed."""
    if not isinstance(i.operands[0], Address):
        raise t.problem("expected an address in brackets")


@FAMILY.form("discard{.global}.L2", 2, writes=False)
def discard(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Do nothing: the contents become undefined, so they may also stay as they are."""
    hint(t, i, m)


@FAMILY.form("createpolicy.fractional.way{.other}.b64", (1, 2))
@FAMILY.form("createpolicy.cvt.L2.b64", 2)
@FAMILY.form("createpolicy.range{.global}.way{.other}.b64", 4)
def policy(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Write an arbitrary number, because a policy only affects caches."""
    t.write(i.operands[0], SCALARS["b64"], constant("i64", 0))


@FAMILY.form("setmaxnreg.way.sync.aligned.u32", 1, writes=False, way=("inc", "dec"))
@FAMILY.form("pmevent", 1, writes=False)
@FAMILY.form("pmevent.mask", 1, writes=False)
def count(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Do nothing. A thread always has all registers that it names, and events are not counted."""
    if not isinstance(i.operands[0], Integer):
        raise t.problem("expected a constant")


@FAMILY.form("nanosleep.u32", 1, writes=False)
def sleep(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Continue at once, which the ISA allows. In a loop, other threads of the block can run (see wait_points.py)."""
    t.read(i.operands[0], SCALARS["u32"])


@FAMILY.form("griddepcontrol.action", 0, writes=False, action=("launch_dependents", "wait"))
def dependency(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Do nothing, because a launch begins only when the launches before it are complete."""
