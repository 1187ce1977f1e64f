"""Functions that CUDA provides and no image defines: what `printf`, `assert` and `free` become."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from gpulease.daemon.drivers.cpu.native.layout import Access, Environment, Fault
from gpulease.daemon.drivers.cpu.ptx.syntax import CallSite, Space
from gpulease.daemon.drivers.cpu.translate.access import fail_unless, window_base
from gpulease.daemon.drivers.cpu.translate.callees import GIVEN
from gpulease.daemon.drivers.cpu.translate.ir import FALSE, INVARIANT, Value, constant
from gpulease.daemon.drivers.cpu.translate.printing import PRINT

if TYPE_CHECKING:
    from gpulease.daemon.drivers.cpu.translate.thread import ThreadTranslator

SystemCall = Callable[["ThreadTranslator", CallSite], None]


def fail_assertion(t: "ThreadTranslator", site: CallSite) -> None:
    """__assertfail(message, file, line, function, character size): end the kernel with a fault that says it."""
    message, file, line, function, _ = _arguments(t, site, (8, 8, 4, 8, 8))
    ir = t.ir
    fault = ir.load("ptr", ir.offset(Value("ptr", "%environment"), Environment.fault.offset), extra=INVARIANT)
    for number, value in enumerate((message, file, function, ir.cast("zext", line, "i64"))):
        ir.store(value, ir.offset(fault, Fault.assertion.offset + 8 * number))
    fail_unless(t, FALSE, Access.ASSERTION, Space.GENERIC, constant("i64", 0), 0)


def print_formatted(t: "ThreadTranslator", site: CallSite) -> None:
    """vprintf(format, arguments): the number of values printed."""
    form, values = _arguments(t, site, (8, 8))
    ir = t.ir
    t.callees.prints = True
    bad, local = Value("ptr", "%bad"), constant("i64", t.local_limit)
    given = ", ".join(map(str, (*GIVEN[:3], local, form, values, bad)))
    count = ir.value("i32", f"call i32 @{PRINT}({given})")
    is_read = ir.compare("icmp sge", count, 0)
    fail_unless(t, is_read, Access.LOAD, Space.GENERIC, ir.load("i64", bad), 1)
    if [variable.size for variable in site.results] != [4]:
        raise t.problem(f"{site.name} is declared with another result than CUDA's")
    result = ir.offset(window_base(t, Space.CALL), site.results[0].offset)
    ir.emit(f"store {count}, {result}, align 1")


def free(t: "ThreadTranslator", site: CallSite) -> None:
    """Nothing for address 0, else a fault, as `malloc` is refused: virtual destructors have one that few run."""
    (address,) = _arguments(t, site, (8,))
    fail_unless(t, t.ir.compare("icmp eq", address, 0), Access.NO_ALLOCATION, Space.GENERIC, address, 0)


def _arguments(t: "ThreadTranslator", site: CallSite, sizes: tuple[int, ...]) -> list[Value]:
    if tuple(variable.size for variable in site.arguments) != sizes:
        raise t.problem(f"{site.name} is declared with other parameters than CUDA's")
    base = window_base(t, Space.CALL)
    return [
        t.ir.load(f"i{8 * variable.size}", t.ir.offset(base, variable.offset), extra=", align 1")
        for variable in site.arguments
    ]


SYSTEM_CALLS: dict[str, SystemCall] = {"__assertfail": fail_assertion, "vprintf": print_formatted, "free": free}
