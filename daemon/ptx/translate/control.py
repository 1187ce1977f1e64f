"""Control flow, calls and indexed branches (PTX ISA sections 9.7.12 and 9.7.19)."""

from typing import TYPE_CHECKING

from gpulease.daemon.ptx.native.structures import Access, ReturnStatus
from gpulease.daemon.ptx.parse.syntax import SCALARS, CallSite, Instruction, Register, Space, Target
from gpulease.daemon.ptx.translate.access import fail_unless, window_base
from gpulease.daemon.ptx.translate.callees import GIVEN, STACK_END
from gpulease.daemon.ptx.translate.forms import InstructionFamily, Modifiers
from gpulease.daemon.ptx.translate.ir import FALSE, LIKELY, Value, constant
from gpulease.daemon.ptx.translate.vprintf import SYSTEM_CALLS
from gpulease.daemon.ptx.translate.wait_points import count_turn

if TYPE_CHECKING:
    from gpulease.daemon.ptx.translate.thread import ThreadTranslator

CONTROL = InstructionFamily("Control flow", "9.7.12")


@CONTROL.form("bra{.uni}", 1, writes=False)
def branch(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Jump to a label. In a loop that polls memory, this may first let other threads run."""
    target = i.operands[0]
    if not isinstance(target, Target):
        raise t.problem("a branch must go to a label")
    # Every loop ends with a branch, so a thread that polls memory can let other threads run here.
    count_turn(t)
    t.jump(target.index)


@CONTROL.form("ret{.uni}", 0, writes=False)
@CONTROL.form("exit", 0, writes=False)
def leave(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """`ret` ends the function, `exit` the thread. In a kernel, both end the thread."""
    t.leave(is_exit=i.opcode == "exit")


@CONTROL.form("trap", 0, writes=False)
def trap(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    fail_unless(t, FALSE, Access.TRAP, Space.GENERIC, constant("i64", 0), 0)


@CONTROL.form("brkpt", 0, writes=False)
def break_point(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """End the kernel with a fault, because no debugger can resume it."""
    fail_unless(t, FALSE, Access.BREAKPOINT, Space.GENERIC, constant("i64", 0), 0)


CALLS = InstructionFamily("Calls", "9.7.12.4, 9.7.12.5")

_HANDLE = SCALARS["b64"]
_INDEX = SCALARS["u32"]


@CALLS.form("call{.uni}", (1, 2), writes=False)
def call(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Copy the arguments, call, and copy the results. If the function faults or exits, so does the caller."""
    site = i.operands[-1]
    if not isinstance(site, CallSite):
        raise t.problem("a call must name a function")
    # Step 1: call. A call through a pointer goes to the dispatcher for all functions with this signature.
    if not site.name:
        target = t.read(i.operands[0], _HANDLE)
        status = _call(t, site, t.callees.dispatcher(site.signature), target)
        is_function = t.ir.compare("icmp ne", status, ReturnStatus.NO_FUNCTION)
        fail_unless(t, is_function, Access.NO_FUNCTION, Space.CODE, target, 0)
    elif (name := t.callees.name(site.name)) is not None:
        status = _call(t, site, name)
    # A function that is declared and has no body may be one of CUDA's system calls, such as vprintf or malloc.
    elif site.name in SYSTEM_CALLS:
        SYSTEM_CALLS[site.name](t, site)
        return
    else:
        raise t.problem(f"{site.name[:60]} is declared but defined nowhere")
    # Step 2: leave the caller if the thread did not return normally.
    go_on, ended = t.ir.fresh("returned"), t.ir.fresh("ended")
    t.ir.branch_if(t.ir.compare("icmp eq", status, ReturnStatus.DONE), go_on, ended, extra=LIKELY)
    t.ir.block(ended)
    t.pass_on(status)
    t.ir.block(go_on)
    # Step 3: copy the results from the callee's result buffer to the caller's variables.
    base, returned = window_base(t, Space.CALL), Value("ptr", "%returned")
    for actual, formal in zip(site.results, site.signature.results, strict=True):
        t.ir.copy(t.ir.offset(base, actual.offset), t.ir.offset(returned, formal.offset), actual.size)


def _call(t: "ThreadTranslator", site: CallSite, name: str, *further: Value) -> Value:
    t.make_room(site.signature)
    # Copy the arguments, so that the callee has no access to the caller's variables.
    passed, returned = Value("ptr", "%passed"), Value("ptr", "%returned")
    if site.arguments:
        base = window_base(t, Space.CALL)
        for actual, formal in zip(site.arguments, site.signature.parameters, strict=True):
            t.ir.copy(t.ir.offset(passed, formal.offset), t.ir.offset(base, actual.offset), actual.size)
    arguments = ", ".join(map(str, (*GIVEN, passed, returned, t.stack(), STACK_END, *further)))
    return t.ir.value("i32", f"call i32 @{name}({arguments})")


@CALLS.form("brx.idx{.uni}", tuple(range(2, 1 << 12)), writes=False)
def branch_by_index(t: "ThreadTranslator", i: Instruction, m: Modifiers) -> None:
    """Jump to the label with this index in the list. An index past the end of the list is a fault."""
    index, *targets = i.operands
    if not isinstance(index, Register):
        raise t.problem("an indexed branch must have a register")
    count_turn(t)
    # Write a switch over the list's indices. Each case is a separate basic block that jumps to its label.
    number = t.read(index, _INDEX)
    places: list[str] = []
    for target in targets:
        if not isinstance(target, Target):
            raise t.problem("an indexed branch goes to labels of a .branchtargets")
        places.append(t.ir.fresh("case"))
    outside = t.ir.fresh("outside")
    t.ir.switch(number, outside, list(enumerate(places)))
    for place, target in zip(places, targets, strict=True):
        t.ir.block(place)
        t.jump(target.index if isinstance(target, Target) else 0)
    t.ir.block(outside)
    fail_unless(t, FALSE, Access.NO_TARGET, Space.CODE, t.ir.cast("zext", number, "i64"), 0)
    # This is never reached, because the condition above is false, but LLVM requires an instruction that ends the block.
    t.ir.ret_value(constant("i32", ReturnStatus.FAULT))
