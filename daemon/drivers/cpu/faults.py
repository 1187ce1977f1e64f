"""What a kernel's fault looks like to a tenant."""

from collections.abc import Callable

from gpulease.daemon.drivers.cpu.native.layout import Access, Fault
from gpulease.daemon.drivers.cpu.ptx.syntax import Space
from gpulease.daemon.drivers.interface import KernelFault

_SPACES = tuple(Space)
_EVENTS: dict[int, str] = {
    Access.TRAP: "trap executed",
    Access.BREAKPOINT: "breakpoint without a debugger executed",
    Access.STACK_OVERFLOW: "stack overflow",
    Access.NO_FUNCTION: "call through {:#x}, which is no function with these parameters,",
    Access.NO_ALLOCATION: "free of {:#x}, which no kernel has allocated,",
    Access.NO_TARGET: "branch by the index {}, which is past its targets,",
    # Where threads wait for one another; the number is the barrier's or the member mask.
    Access.BARRIER: "barrier {} is never complete: threads it needs have ended or wait elsewhere; waited for",
    Access.BARRIER_OPERAND: "no such barrier or number of threads (barrier {}) used",
    Access.EXCHANGE: "warp operation with member mask {:#010x} is never complete: members wait elsewhere; waited for",
    Access.NO_MEMBER: "warp operation with member mask {:#010x}, which lacks the thread's own lane, executed",
    Access.PART_OF_WARP: "operation that needs a whole warp executed with lanes {:#010x} alone,",
}
_UNNAMED = (Space.GENERIC, Space.GLOBAL)


def describe(fault: Fault, text_at: Callable[[int], str], *, kernel: str, tag: int) -> KernelFault:
    """The error for a fault record; `text_at` reads what an assertion's addresses mean."""
    place = f"by thread {_triple(fault.thread)} of block {_triple(fault.block)}"
    where = f"{place} in kernel {kernel}, PTX line {fault.line}"
    if fault.access == Access.ASSERTION:
        message, file, function = (text_at(fault.assertion[n]) for n in range(3))
        failed = f"assertion failed: {file}:{fault.assertion[3]}: {function}: {message},"
        return KernelFault(f"{failed} {where}", tag=tag, kernel=kernel)
    if fault.access in _EVENTS:
        return KernelFault(f"{_EVENTS[fault.access].format(fault.address)} {where}", tag=tag, kernel=kernel)
    space = _SPACES[fault.space]
    what = "misaligned" if fault.address % fault.size else "illegal"
    kind = what if space in _UNNAMED else f"{what} {space.value}"
    access = Access(fault.access).name.lower()
    return KernelFault(
        f"{kind} address {fault.address:#x} ({fault.size}-byte {access}) {where}",
        tag=tag,
        kernel=kernel,
        address=fault.address,
    )


def _triple(numbers: "list[int]") -> str:
    return f"({numbers[0]},{numbers[1]},{numbers[2]})"
