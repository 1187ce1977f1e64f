"""Computes the address of an access, and checks that the access is allowed (PTX ISA sections 5.1 and 6.4).

Global addresses are host addresses in the context's arena. The arena's shadow table has an entry for each granule of
256 bytes: the number of the granule's bytes that may be accessed. An access is aligned and has at most 16 bytes, so it
is within one granule. One load and one comparison decide whether it is allowed. The last granule is never allocated,
and its entry is used for addresses outside the arena.

If the shadow forbids an access, the regions that have ended are searched (drivers/interface.py). An access in an ended
region is counted and redirected: a load reads zeros, and a store writes to memory that is never read.

Shared, local and parameter addresses are offsets into a window of known size. A generic address is valid if it is
valid as a global one, or if it is in the host memory of the block's shared window or of the thread's local window.
"""

from collections.abc import Callable, Sequence

from gpulease.daemon.ptx.native.structures import (
    PARAMETERS_OFFSET,
    REGION_SHIFT,
    Access,
    BlockEnvironment,
    QueuedLaunch,
    Returned,
    ReturnStatus,
)
from gpulease.daemon.ptx.parse.syntax import Address, DeclaredVariable, Integer, Operand, Register, Scalar, Space
from gpulease.daemon.ptx.translate.callees import PASSED, RETURNED
from gpulease.daemon.ptx.translate.ir import INVARIANT, LIKELY, IrWriter, Value, constant
from gpulease.daemon.ptx.translate.operand_values import ENVIRONMENT, LAUNCH, OperandTranslator, bits_type

# Number of bytes that one entry of the shadow table describes, and its logarithm.
GRANULE_SHIFT = 8
GRANULE_BYTES = 1 << GRANULE_SHIFT

# The widest access: a vector of four 32-bit or two 64-bit elements (PTX ISA section 6.4.2).
MAX_ACCESS_BYTES = 16

# The host address of the .param variables for a function's calls.
CALLS = Value("ptr", "%calls")

# Spaces in which an address is an offset into a window.
_WINDOWS = tuple(space for space in Space if space not in (Space.GENERIC, Space.GLOBAL, Space.CONST))

NULL = Value("ptr", "null")

# The number of each space in fault records.
SPACE_NUMBERS = {space: number for number, space in enumerate(Space)}

RECORD_FAULT = "record_fault"

# The function is not inlined, because every access has a call of it, which seldom runs.
RECORD_FAULT_IR = f"""
define internal void @{RECORD_FAULT}(ptr %environment, i64 %address, i32 %size, i32 %access, i32 %space, i32 %line)
    noinline cold {{
  %place = getelementptr i8, ptr %environment, i64 {BlockEnvironment.fault.offset}
  %fault = load ptr, ptr %place
  store i64 %address, ptr %fault
  %size_at = getelementptr i8, ptr %fault, i64 8
  store i32 %size, ptr %size_at
  %access_at = getelementptr i8, ptr %fault, i64 12
  store i32 %access, ptr %access_at
  %space_at = getelementptr i8, ptr %fault, i64 16
  store i32 %space, ptr %space_at
  %line_at = getelementptr i8, ptr %fault, i64 20
  store i32 %line, ptr %line_at
  ret void
}}
"""

_STAND_IN = "stand_in"

# Returns the substitute for an access in an ended region. The function accesses no memory of the kernel and preserves
# all registers, so that LLVM can optimise a loop around the call.
STAND_IN_IR = f"""
define internal preserve_allcc ptr @{_STAND_IN}(ptr %environment, i64 %address, i32 %size, i32 %access)
    noinline cold nounwind noimplicitfloat memory(argmem: readwrite, inaccessiblemem: readwrite) {{
  %returned.at = getelementptr i8, ptr %environment, i64 {BlockEnvironment.returned.offset}
  %returned = load ptr, ptr %returned.at
  %start = load i64, ptr %returned
  %granules.at = getelementptr i8, ptr %returned, i64 {Returned.granules.offset}
  %granules = load i64, ptr %granules.at
  %offset = sub i64 %address, %start
  %granule = lshr i64 %offset, {REGION_SHIFT}
  %is.near = icmp ult i64 %granule, %granules
  %less = sub i32 %size, 1
  %mask = zext i32 %less to i64
  %odd = and i64 %address, %mask
  %is.aligned = icmp eq i64 %odd, 0
  %may.be = and i1 %is.near, %is.aligned
  br i1 %may.be, label %look, label %none
look:
  %counters.at = getelementptr i8, ptr %returned, i64 {Returned.counters.offset}
  %counters = load ptr, ptr %counters.at
  %distance = shl i64 %granule, 3
  %entry = getelementptr i8, ptr %counters, i64 %distance
  %counter = load atomic ptr, ptr %entry acquire, align 8
  %is.active = icmp eq ptr %counter, null
  br i1 %is.active, label %none, label %count
count:
  %before = atomicrmw add ptr %counter, i64 1 monotonic
  %strays = getelementptr i8, ptr %returned, i64 {Returned.strays.offset}
  %all = atomicrmw add ptr %strays, i64 1 monotonic
  switch i32 %access, label %atomic [i32 {Access.LOAD.value}, label %load i32 {Access.STORE.value}, label %store]
load:
  %zeros = getelementptr i8, ptr %returned, i64 {Returned.zeros.offset}
  ret ptr %zeros
store:
  %sink = getelementptr i8, ptr %returned, i64 {Returned.sink.offset}
  ret ptr %sink
atomic:
  %scratch = getelementptr i8, ptr %environment, i64 {BlockEnvironment.scratch.offset}
  store i64 0, ptr %scratch
  %second = getelementptr i8, ptr %scratch, i64 8
  store i64 0, ptr %second
  ret ptr %scratch
none:
  ret ptr null
}}
"""


def checked_pointer(
    t: OperandTranslator,
    operand: Operand,
    space: Space,
    size: int,
    access: Access,
    *,
    needed_bytes: Value | None = None,
) -> Value:
    """Return a host pointer for an access of `size` bytes. If the access is not allowed, the kernel ends with a fault.

    If `needed_bytes`, an i64, is not None, only that many bytes must be allocated. The values of the others are
    undefined.
    """
    address, space = address_in(t, operand, space)
    # A constant offset within the static size needs no check.
    if space in _WINDOWS and _is_surely_inside(address, size, _static_limit(t, space)):
        return t.ir.offset(window_base(t, space), address)
    fault, go_on = t.ir.fresh("fault"), t.ir.fresh("valid")
    pointer = reach(t, address, space, (size, access), fault, needed_bytes)
    t.ir.branch(go_on)
    t.ir.block(fault)
    _fail(t, access, space, address, size)
    t.ir.block(go_on)
    return pointer


def checked_access(
    t: OperandTranslator,
    operand: Operand,
    space: Space,
    size_and_access: tuple[int, Access],
    operation: Callable[[Value], Sequence[Value]],
) -> Sequence[Value]:
    """Write a load or store of this size and kind. Returns the results of `operation`, or zeros for an ended region.

    `operation` gets a pointer, and must write a single basic block.
    """
    size, access = size_and_access
    address, space = address_in(t, operand, space)
    if space in _WINDOWS:
        return operation(checked_pointer(t, operand, space, size, access))
    ir = t.ir
    # There are three cases: the access is allowed; it is in an ended region, and no memory is accessed; or it faults.
    inside, outside, fault, done = (ir.fresh(stem) for stem in ("inside", "outside", "fault", "done"))
    ir.branch_if(is_valid(t, address, space, size), inside, outside, extra=LIKELY)
    ir.block(outside)
    ir.branch_if(ir.compare("icmp ne", stand_in(ir, address, size, access), NULL), done, fault)
    ir.block(fault)
    _fail(t, access, space, address, size)
    ir.block(inside)
    results = operation(pointer_at(t, address, space))
    ir.branch(done)
    ir.block(done)
    # A load in an ended region gives 0.
    return [
        ir.value(result.type, f"phi {result.type} [ {result.text}, %{inside} ], [ 0, %{outside} ]")
        for result in results
    ]


def reach(
    t: OperandTranslator,
    address: Value,
    space: Space,
    size_and_access: tuple[int, Access],
    otherwise: str,
    needed_bytes: Value | None = None,
) -> Value:
    """Return a host pointer for an access of this size and kind. The code jumps to `otherwise` if it is not allowed."""
    size, _ = size_and_access
    valid = is_valid(t, address, space, size, needed_bytes)
    if space not in _WINDOWS:
        return reach_global(t.ir, address, valid, size_and_access, otherwise)
    there = t.ir.fresh("there")
    t.ir.branch_if(valid, there, otherwise, extra=LIKELY)
    t.ir.block(there)
    return pointer_at(t, address, space)


def reach_global(
    ir: IrWriter, address: Value, valid: Value, size_and_access: tuple[int, Access], otherwise: str
) -> Value:
    """Return a host pointer for a global access, or for its substitute in an ended region."""
    size, access = size_and_access
    inside, outside, there = (ir.fresh(stem) for stem in ("inside", "outside", "there"))
    # Because of LIKELY, LLVM places the code for the substitute outside of the loop.
    ir.branch_if(valid, inside, outside, extra=LIKELY)
    ir.block(outside)
    placeholder = stand_in(ir, address, size, access)
    ir.branch_if(ir.compare("icmp ne", placeholder, NULL), there, otherwise)
    ir.block(inside)
    pointer = ir.cast("inttoptr", address, "ptr")
    ir.branch(there)
    ir.block(there)
    return ir.value("ptr", f"phi ptr [ {pointer.text}, %{inside} ], [ {placeholder.text}, %{outside} ]")


def stand_in(ir: IrWriter, address: Value, size: int, access: Access) -> Value:
    """Return a pointer to the substitute for an access in an ended region; null if the address is in no such region."""
    arguments = ", ".join(map(str, (ENVIRONMENT, address, constant("i32", size), constant("i32", access))))
    return ir.value("ptr", f"call preserve_allcc ptr @{_STAND_IN}({arguments})")


def address_in(t: OperandTranslator, operand: Operand, space: Space) -> tuple[Value, Space]:
    """Return the address in an operand, as i64, and its space."""
    if not isinstance(operand, Address):
        raise t.problem("expected an address in brackets")
    if isinstance(operand.base, DeclaredVariable):
        space = _space_of(t, operand.base, space)
    return _address(t, operand, wraps=space in _WINDOWS), space


def shared_offset(t: OperandTranslator, operand: Operand, *, is_generic: bool) -> Value:
    """Return the offset in shared memory of an operand, which may be a generic address. The offset is not checked."""
    address, space = address_in(t, operand, Space.GENERIC if is_generic else Space.SHARED)
    if space is Space.GENERIC:
        return t.ir.binary("sub", address, t.ir.cast("ptrtoint", window_base(t, Space.SHARED), "i64"))
    if space is not Space.SHARED:
        raise t.problem(f"an address in .{space.value} where one in .shared is needed")
    return address


def shared_pointer(t: OperandTranslator, operand: Operand, size: int, access: Access, *, is_generic: bool) -> Value:
    """Return a host pointer for an access of shared memory, at a shared or generic address."""
    offset = shared_offset(t, operand, is_generic=is_generic)
    fail_unless(t, is_valid(t, offset, Space.SHARED, size), access, Space.SHARED, offset, size)
    return pointer_at(t, offset, Space.SHARED)


def is_valid(t: OperandTranslator, address: Value, space: Space, size: int, needed_bytes: Value | None = None) -> Value:
    """Compute whether an access of `size` bytes is allowed."""
    if space in _WINDOWS:
        return window_is_valid(t.ir, address, size, window_limit(t, space))
    valid = global_is_valid(t.ir, address, size, needed_bytes)
    return _generic_is_valid(t, address, size, valid) if space is Space.GENERIC else valid


def pointer_at(t: OperandTranslator, address: Value, space: Space) -> Value:
    """Return the host pointer for an address that is known to be valid."""
    if space in _WINDOWS:
        return t.ir.offset(window_base(t, space), address)
    return t.ir.cast("inttoptr", address, "ptr")


def fail_unless(t: OperandTranslator, valid: Value, access: Access, space: Space, address: Value, size: int) -> None:
    """End the kernel with a fault unless `valid` is true."""
    ir = t.ir
    go_on, fail = ir.fresh("valid"), ir.fresh("fault")
    ir.branch_if(valid, go_on, fail, extra=LIKELY)
    ir.block(fail)
    _fail(t, access, space, address, size)
    ir.block(go_on)


def _fail(t: OperandTranslator, access: Access, space: Space, address: Value, size: int) -> None:
    record_fault(t, access, space, address, size)
    t.ir.ret(ReturnStatus.FAULT)


def record_fault(t: OperandTranslator, access: Access, space: Space, address: Value, size: int) -> None:
    """Write the fault record for the fault with which the kernel is about to end."""
    line = t.instruction.line if t.instruction else 0
    details = [constant("i32", n) for n in (size, access, SPACE_NUMBERS[space], line)]
    arguments = ", ".join(map(str, (ENVIRONMENT, address, *details)))
    t.ir.emit(f"call void @{RECORD_FAULT}({arguments})")


def window_base(t: OperandTranslator, space: Space) -> Value:
    """Return the host address at which a window begins."""
    match space:
        case Space.SHARED:
            return t.ir.fixed("ptr", ENVIRONMENT, BlockEnvironment.shared.offset)
        case Space.LOCAL:
            return t.local_window()
        case Space.CALL:
            return CALLS
        case Space.RESULT:
            return RETURNED
        case Space.PARAM if not t.function.is_kernel:
            return PASSED
        case Space.PARAM:
            return t.ir.offset(LAUNCH, PARAMETERS_OFFSET)
    raise t.problem(f".{space.value} has no window")


def window_limit(t: OperandTranslator, space: Space) -> Value:
    """Return a window's size as i64. The size of shared memory is known only at launch, so it is loaded."""
    if space is not Space.SHARED:
        return constant("i64", _static_limit(t, space))
    size = t.ir.fixed("i32", LAUNCH, QueuedLaunch.shared_bytes.offset)
    return t.ir.cast("zext", size, "i64")


def _static_limit(t: OperandTranslator, space: Space) -> int:
    match space:
        case Space.SHARED:
            return t.function.shared_bytes
        case Space.LOCAL:
            return t.local_limit
        case Space.CALL:
            return t.function.call_bytes
        case Space.RESULT:
            return t.function.result_bytes
    return t.function.parameter_bytes


def _space_of(t: OperandTranslator, variable: DeclaredVariable, space: Space) -> Space:
    """Return the space of an access that names a variable, which is the variable's.

    Raises ImageRejected if the instruction gives another space.
    """
    if variable.space is Space.CODE:
        raise t.problem(f"{variable.name[:60]} is a function")
    # PTX has one name, .param, for a kernel's parameters, a function's results and a call's variables.
    if space is Space.PARAM and variable.space in (Space.CALL, Space.RESULT):
        return variable.space
    if space not in (Space.GENERIC, variable.space):
        raise t.problem(f"{variable.name[:60]} lies in .{variable.space.value}, not in .{space.value}")
    return variable.space


def _address(t: OperandTranslator, operand: Address, *, wraps: bool) -> Value:
    match operand.base:
        case DeclaredVariable() as variable:
            return t.address_of(variable, operand.offset)
        case Integer(value):
            return constant("i64", (value + operand.offset) & (2**64 - 1))
        case Register() as register:
            base = t.read(register, address_type(t, register))
            # In a window, a 32-bit address wraps at 32 bits, so extend it only after the addition.
            if wraps and register.type.bits == 32:
                return t.ir.resize(add_wrapping(t.ir, base, operand.offset), "i64", signed=False)
            base = t.ir.resize(base, "i64", signed=False)
            return t.ir.binary("add", base, operand.offset) if operand.offset else base


def add_wrapping(ir: IrWriter, base: Value, offset: int) -> Value:
    """Add an offset to a window's 32-bit address. As on a card, the sum wraps at 32 bits."""
    signed = (offset + (1 << 31)) % (1 << 32) - (1 << 31)
    return ir.binary("add", base, signed) if signed else base


def address_type(t: OperandTranslator, register: Register) -> Scalar:
    """Return the type for reading an address from a register. Raises ImageRejected if it can't contain an address."""
    if register.type.bits not in (32, 64) or register.type.is_float:
        raise t.problem(f"{register.name} is .{register.type.name}, which can't hold an address")
    return bits_type(register.type.bits)


def global_is_valid(ir: IrWriter, address: Value, size: int, needed_bytes: Value | None = None) -> Value:
    """Compute whether a global address may be accessed. With `needed_bytes`, only that many bytes must be allocated."""
    # These three do not change while a kernel runs, so LLVM loads them before loops.
    arena = ir.fixed("i64", ENVIRONMENT, BlockEnvironment.arena.offset)
    shadow = ir.fixed("ptr", ENVIRONMENT, BlockEnvironment.shadow.offset)
    last = ir.fixed("i64", ENVIRONMENT, BlockEnvironment.last_granule.offset)
    # An address below the arena wraps to a large offset, which is clamped to the last granule.
    offset = ir.binary("sub", address, arena)
    granule = ir.intrinsic("llvm.umin.i64", "i64", ir.binary("lshr", offset, GRANULE_SHIFT), last)
    # The granule's entry is the number of its allocated bytes, which are at its beginning.
    entry = ir.offset(shadow, ir.binary("shl", granule, 1))
    allowed = ir.cast("zext", ir.load("i16", entry, extra=", align 2" + INVARIANT), "i64")
    end = ir.binary("add", ir.binary("and", offset, GRANULE_BYTES - 1), needed_bytes or constant("i64", size))
    return ir.binary("and", ir.compare("icmp ule", end, allowed), _is_aligned(ir, address, size))


def window_is_valid(ir: IrWriter, offset: Value, size: int, limit: Value) -> Value:
    """Compute whether `size` bytes at an offset are within a window of `limit` bytes."""
    # Use two comparisons, because the sum of offset and size could wrap.
    inside = ir.compare("icmp ult", offset, limit)
    room = ir.compare("icmp uge", ir.binary("sub", limit, offset), size)
    return ir.binary("and", ir.binary("and", inside, room), _is_aligned(ir, offset, size))


def _generic_is_valid(t: OperandTranslator, address: Value, size: int, valid: Value) -> Value:
    # If the address is in one of the windows, its offset from the window's host address is less than the window's size.
    for space in (Space.SHARED, Space.LOCAL):
        base = t.ir.cast("ptrtoint", window_base(t, space), "i64")
        offset = t.ir.binary("sub", address, base)
        valid_in_window = window_is_valid(t.ir, offset, size, window_limit(t, space))
        valid = t.ir.binary("or", valid, valid_in_window)
    return valid


def _is_aligned(ir: IrWriter, address: Value, size: int) -> Value:
    return ir.compare("icmp eq", ir.binary("and", address, size - 1), 0)


def _is_surely_inside(address: Value, size: int, limit: int) -> bool:
    """Return whether an address is a constant offset, aligned and within memory that exists at every launch."""
    if not address.text.isdigit():
        return False
    offset = int(address.text)
    return offset % size == 0 and offset + size <= limit
