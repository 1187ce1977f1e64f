"""Writes the code for `vprintf`, which a kernel's `printf` calls (CUDA C++ Programming Guide, "Formatted Output").

    i32 print(launch, environment, local, i64 bytes of the local window, i64 format, i64 arguments, ptr bad)

The function writes a record with the format and the values that the format uses; `printf.py` reads it. The values are
in a buffer, each at the next multiple of its size. The function reads only memory that a load of the kernel may read.
If an address may not be read, it is stored in `bad`, and the result is negative. Otherwise the result is the number of
values.

This module also translates calls to the other functions that CUDA provides: `assert`, `malloc` and `free`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from gpulease.daemon.ptx.limits import MAX_PRINT_TEXT
from gpulease.daemon.ptx.native.structures import (
    Access,
    BlockEnvironment,
    Fault,
    Mark,
    PrintHead,
    PrintRecord,
    QueuedLaunch,
)
from gpulease.daemon.ptx.parse.syntax import CallSite, Space
from gpulease.daemon.ptx.printf import MARKS
from gpulease.daemon.ptx.translate import heap
from gpulease.daemon.ptx.translate.access import (
    fail_unless,
    global_is_valid,
    stand_in,
    window_base,
    window_is_valid,
)
from gpulease.daemon.ptx.translate.callees import GIVEN
from gpulease.daemon.ptx.translate.ir import FALSE, INVARIANT, IrWriter, Value, constant

if TYPE_CHECKING:
    from gpulease.daemon.ptx.translate.thread import ThreadTranslator

PRINT = "print"

_LOCAL = Value("i64", "%local_bytes")
_ADDRESS = Value("i64", "%address")
_WINDOWS = f"ptr %launch, ptr %environment, ptr %local, {_LOCAL}"


def print_ir(declarations: set[str]) -> str:
    """Return the IR of the function, with a table that gives the meaning of each byte in a format."""
    table = ", ".join(f"i8 {mark}" for mark in MARKS)
    readers = [_reader(size, declarations) for size in (1, 4, 8)]
    return "\n".join([f"@print_marks = internal constant [256 x i8] [{table}]", *readers, _PRINT_IR])


def _reader(size: int, declarations: set[str]) -> str:
    """Return the IR of a function that returns a pointer to `size` bytes, or null if a thread may not read them."""
    ir = IrWriter(declarations)
    environment, launch = Value("ptr", "%environment"), Value("ptr", "%launch")
    shared = ir.load("ptr", ir.offset(environment, BlockEnvironment.shared.offset), extra=INVARIANT)
    shared_bytes = ir.load("i32", ir.offset(launch, QueuedLaunch.shared_bytes.offset), extra=INVARIANT)
    # As for a generic address, the memory may be global, in the local window, or in the shared window.
    valid = global_is_valid(ir, _ADDRESS, size)
    windows = ((Value("ptr", "%local"), _LOCAL), (shared, ir.cast("zext", shared_bytes, "i64")))
    for base, limit in windows:
        distance = ir.binary("sub", _ADDRESS, ir.cast("ptrtoint", base, "i64"))
        valid = ir.binary("or", valid, window_is_valid(ir, distance, size, limit))
    ir.branch_if(valid, "there", "elsewhere")
    ir.block("there")
    ir.ret_value(ir.cast("inttoptr", _ADDRESS, "ptr"))
    # As for loads, an ended region reads as zeros.
    ir.block("elsewhere")
    ir.ret_value(stand_in(ir, _ADDRESS, size, Access.LOAD))
    return "\n".join([f"define internal ptr @readable{size}({_WINDOWS}, {_ADDRESS}) noinline {{", *ir.lines, "}"])


_GIVEN = f"ptr %launch, ptr %environment, ptr %local, {_LOCAL}"

# `%out` counts further if the buffer is full, so that the code at the end can detect that the record does not fit.
_PRINT_IR = f"""
define internal void @print_byte(ptr %data, ptr %out, i64 %capacity, i8 %byte) {{
  %at = load i64, ptr %out
  %more = add i64 %at, 1
  store i64 %more, ptr %out
  %fits = icmp ult i64 %at, %capacity
  br i1 %fits, label %write, label %done
write:
  %place = getelementptr i8, ptr %data, i64 %at
  store i8 %byte, ptr %place
  br label %done
done:
  ret void
}}

define internal i32 @{PRINT}({_GIVEN}, i64 %format, i64 %arguments, ptr %bad) noinline cold {{
  %out = alloca i64
  %slot = alloca i64
  store i64 0, ptr %slot
  %count = alloca i32
  store i32 0, ptr %count
  ; 0 outside of a conversion, else the bytes of an integer in it.
  %width = alloca i64
  store i64 0, ptr %width
  %prints.at = getelementptr i8, ptr %environment, i64 {BlockEnvironment.prints.offset}
  %prints = load ptr, ptr %prints.at
  %lock = getelementptr i8, ptr %prints, i64 {PrintHead.lock.offset}
  br label %spin
spin:
  %held = atomicrmw xchg ptr %lock, i32 1 acquire
  %is.held = icmp ne i32 %held, 0
  br i1 %is.held, label %spin, label %start
start:
  %used = load i64, ptr %prints
  %capacity.at = getelementptr i8, ptr %prints, i64 {PrintHead.capacity.offset}
  %capacity = load i64, ptr %capacity.at
  %data = getelementptr i8, ptr %prints, i64 {PrintHead.lock.offset + 8}
  %begin = add i64 %used, 8
  store i64 %begin, ptr %out
  br label %next

next:
  %index = phi i64 [ 0, %start ], [ %index.more, %text ], [ %index.more, %open ], [ %index.more, %long ],
    [ %index.more, %inside ], [ %index.more, %close ], [ %index.more, %taken.star ]
  %is.too.long = icmp uge i64 %index, {MAX_PRINT_TEXT}
  br i1 %is.too.long, label %finish, label %read
read:
  %char.at = add i64 %format, %index
  %char.place = call ptr @readable1({_GIVEN}, i64 %char.at)
  %char.bad = icmp eq ptr %char.place, null
  br i1 %char.bad, label %fail, label %char.read
char.read:
  %char = load i8, ptr %char.place
  call void @print_byte(ptr %data, ptr %out, i64 %capacity, i8 %char)
  %index.more = add i64 %index, 1
  %is.end = icmp eq i8 %char, 0
  br i1 %is.end, label %finish, label %sort
sort:
  %bytes = load i64, ptr %width
  %is.inside = icmp ne i64 %bytes, 0
  br i1 %is.inside, label %inside, label %text
text:
  %is.percent = icmp eq i8 %char, 37
  br i1 %is.percent, label %open, label %next
open:
  store i64 4, ptr %width
  br label %next
inside:
  %char.wide = zext i8 %char to i64
  %mark.at = getelementptr i8, ptr @print_marks, i64 %char.wide
  %mark = load i8, ptr %mark.at
  switch i8 %mark, label %close [ i8 {Mark.FLAG}, label %next i8 {Mark.LONG}, label %long i8 {Mark.STAR}, label %star
    i8 {Mark.INTEGER}, label %integer i8 {Mark.WIDE}, label %wide i8 {Mark.STRING}, label %wide ]
long:
  store i64 8, ptr %width
  br label %next
close:
  store i64 0, ptr %width
  br label %next

star:
  br label %take
integer:
  br label %take
wide:
  br label %take
take:
  %size = phi i64 [ 4, %star ], [ %bytes, %integer ], [ 8, %wide ]
  %is.four = icmp eq i64 %size, 4
  %old = load i64, ptr %slot
  %size.less = sub i64 %size, 1
  %rounded = add i64 %old, %size.less
  %mask = sub i64 0, %size
  %place.in = and i64 %rounded, %mask
  %slot.more = add i64 %place.in, %size
  store i64 %slot.more, ptr %slot
  %value.at = add i64 %arguments, %place.in
  br i1 %is.four, label %take4, label %take8
take4:
  %place4 = call ptr @readable4({_GIVEN}, i64 %value.at)
  %bad4 = icmp eq ptr %place4, null
  br i1 %bad4, label %fail, label %load4
load4:
  %narrow = load i32, ptr %place4
  %value4 = zext i32 %narrow to i64
  br label %taken
take8:
  %place8 = call ptr @readable8({_GIVEN}, i64 %value.at)
  %bad8 = icmp eq ptr %place8, null
  br i1 %bad8, label %fail, label %load8
load8:
  %value8 = load i64, ptr %place8
  br label %taken
taken:
  %value = phi i64 [ %value4, %load4 ], [ %value8, %load8 ]
  %count.old = load i32, ptr %count
  %count.more = add i32 %count.old, 1
  store i32 %count.more, ptr %count
  br label %put
put:
  %number = phi i64 [ 0, %taken ], [ %number.more, %put ]
  %shift = shl i64 %number, 3
  %shifted = lshr i64 %value, %shift
  %part = trunc i64 %shifted to i8
  call void @print_byte(ptr %data, ptr %out, i64 %capacity, i8 %part)
  %number.more = add i64 %number, 1
  %is.put = icmp eq i64 %number.more, 8
  br i1 %is.put, label %taken.all, label %put
taken.all:
  %is.star = icmp eq i8 %mark, {Mark.STAR}
  br i1 %is.star, label %taken.star, label %taken.value
taken.star:
  br label %next
taken.value:
  %is.string = icmp eq i8 %mark, {Mark.STRING}
  %is.there = icmp ne i64 %value, 0
  %has.text = and i1 %is.string, %is.there
  br i1 %has.text, label %string, label %close

string:
  %letter = phi i64 [ 0, %taken.value ], [ %letter.more, %letter.put ]
  %letter.at = add i64 %value, %letter
  %letter.place = call ptr @readable1({_GIVEN}, i64 %letter.at)
  %letter.bad = icmp eq ptr %letter.place, null
  br i1 %letter.bad, label %fail, label %letter.read
letter.read:
  %letter.byte = load i8, ptr %letter.place
  %is.last = icmp eq i64 %letter, {MAX_PRINT_TEXT}
  %byte = select i1 %is.last, i8 0, i8 %letter.byte
  call void @print_byte(ptr %data, ptr %out, i64 %capacity, i8 %byte)
  %letter.end = icmp eq i8 %byte, 0
  br i1 %letter.end, label %close, label %letter.put
letter.put:
  %letter.more = add i64 %letter, 1
  br label %string

finish:
  call void @print_byte(ptr %data, ptr %out, i64 %capacity, i8 0)
  %end = load i64, ptr %out
  %end.up = add i64 %end, 7
  %end.rounded = and i64 %end.up, -8
  %is.full = icmp ugt i64 %end.rounded, %capacity
  br i1 %is.full, label %drop, label %keep
keep:
  %record = getelementptr i8, ptr %data, i64 %used
  %record.bytes = sub i64 %end.rounded, %used
  %record.size = trunc i64 %record.bytes to i32
  store i32 %record.size, ptr %record
  %kernel.at = getelementptr i8, ptr %launch, i64 {QueuedLaunch.kernel.offset}
  %kernel = load i32, ptr %kernel.at
  %record.kernel = getelementptr i8, ptr %record, i64 {PrintRecord.kernel.offset}
  store i32 %kernel, ptr %record.kernel
  store i64 %end.rounded, ptr %prints
  br label %release
drop:
  %dropped.at = getelementptr i8, ptr %prints, i64 {PrintHead.dropped.offset}
  %dropped = load i64, ptr %dropped.at
  %dropped.more = add i64 %dropped, 1
  store i64 %dropped.more, ptr %dropped.at
  br label %release
release:
  store atomic i32 0, ptr %lock release, align 4
  %result = load i32, ptr %count
  ret i32 %result
fail:
  %bad.address = phi i64 [ %char.at, %read ], [ %value.at, %take4 ], [ %value.at, %take8 ], [ %letter.at, %string ]
  store i64 %bad.address, ptr %bad
  store atomic i32 0, ptr %lock release, align 4
  ret i32 -1
}}
"""


SystemCall = Callable[["ThreadTranslator", CallSite], None]


def fail_assertion(t: "ThreadTranslator", site: CallSite) -> None:
    """Translate `__assertfail(message, file, line, function, character size)`: a fault with these texts."""
    message, file, line, function, _ = _arguments(t, site, (8, 8, 4, 8, 8))
    # Store only the addresses of the texts. They are read when the fault is reported (context.py).
    ir = t.ir
    fault = ir.load("ptr", ir.offset(Value("ptr", "%environment"), BlockEnvironment.fault.offset), extra=INVARIANT)
    for number, value in enumerate((message, file, function, ir.cast("zext", line, "i64"))):
        ir.store(value, ir.offset(fault, Fault.assertion.offset + 8 * number))
    fail_unless(t, FALSE, Access.ASSERTION, Space.GENERIC, constant("i64", 0), 0)


def print_formatted(t: "ThreadTranslator", site: CallSite) -> None:
    """Translate `vprintf(format, arguments)`, which writes a record and returns the number of values."""
    form, values = _arguments(t, site, (8, 8))
    ir = t.ir
    # The code for printing is added to a part only if something prints.
    t.callees.prints = True
    bad, local = Value("ptr", "%bad"), constant("i64", t.local_limit)
    arguments = ", ".join(map(str, (*GIVEN[:3], local, form, values, bad)))
    count = ir.value("i32", f"call i32 @{PRINT}({arguments})")
    # If an address may not be read, this is the same fault as for a load.
    is_read = ir.compare("icmp sge", count, 0)
    fail_unless(t, is_read, Access.LOAD, Space.GENERIC, ir.load("i64", bad), 1)
    _give_result(t, site, count)


def malloc(t: "ThreadTranslator", site: CallSite) -> None:
    """Translate `malloc`, which returns the address of memory in the module's heap, or 0 if there is not enough."""
    (size,) = _arguments(t, site, (8,))
    _give_result(t, site, heap.take(t, size))


def free(t: "ThreadTranslator", site: CallSite) -> None:
    """Translate `free`. It ignores 0; an address that `malloc` has not returned is a fault."""
    (address,) = _arguments(t, site, (8,))
    fail_unless(t, heap.give_back(t, address), Access.NO_ALLOCATION, Space.GENERIC, address, 0)


def _give_result(t: "ThreadTranslator", site: CallSite, value: Value) -> None:
    # An image may declare these functions with any signature, so accept only CUDA's.
    if [8 * variable.size for variable in site.results] != [int(value.type[1:])]:
        raise t.problem(f"{site.name} is declared with another result than CUDA's")
    result = t.ir.offset(window_base(t, Space.CALL), site.results[0].offset)
    t.ir.emit(f"store {value}, {result}, align 1")


def _arguments(t: "ThreadTranslator", site: CallSite, sizes: tuple[int, ...]) -> list[Value]:
    if tuple(variable.size for variable in site.arguments) != sizes:
        raise t.problem(f"{site.name} is declared with other parameters than CUDA's")
    base = window_base(t, Space.CALL)
    return [
        t.ir.load(f"i{8 * variable.size}", t.ir.offset(base, variable.offset), extra=", align 1")
        for variable in site.arguments
    ]


SYSTEM_CALLS: dict[str, SystemCall] = {
    "__assertfail": fail_assertion,
    "vprintf": print_formatted,
    "malloc": malloc,
    "free": free,
}
