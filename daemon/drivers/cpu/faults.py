"""What a kernel's fault looks like to a tenant."""

from gpulease.daemon.drivers.cpu.native.layout import Access, Fault
from gpulease.daemon.drivers.cpu.ptx.syntax import Space
from gpulease.daemon.drivers.interface import KernelFault

_SPACES = tuple(Space)
_UNNAMED = (Space.GENERIC, Space.GLOBAL)

# What went wrong where threads wait for one another; the number is the barrier's or the member mask.
_WAITS = {
    Access.BARRIER: "barrier {0} is never complete: threads it needs have ended or wait elsewhere; waited for",
    Access.BARRIER_OPERAND: "no such barrier or number of threads (barrier {0}) used",
    Access.EXCHANGE: "warp operation with member mask {0:#010x} is never complete: members wait elsewhere; waited for",
    Access.NO_MEMBER: "warp operation with member mask {0:#010x}, which lacks the thread's own lane, executed",
}


def describe(fault: Fault, *, kernel: str, tag: int) -> KernelFault:
    """The error for a fault record."""
    place = f"by thread {_triple(fault.thread)} of block {_triple(fault.block)}"
    where = f"{place} in kernel {kernel}, PTX line {fault.line}"
    if fault.access == Access.TRAP:
        return KernelFault(f"trap executed {where}", tag=tag, kernel=kernel)
    if fault.access in _WAITS:
        return KernelFault(f"{_WAITS[fault.access].format(fault.address)} {where}", tag=tag, kernel=kernel)
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
