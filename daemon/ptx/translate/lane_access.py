"""Loads and stores by many lanes at once (see access.py for the checks).

Lanes usually access neighbouring memory, which the generated code tests by their addresses. In this case the code
checks all granules of the access, and moves one masked vector. Otherwise, a function makes the access for one lane
after another. If the address is the same for all lanes, one access is made, as for one thread.
"""

from collections.abc import Sequence

from gpulease.daemon.ptx.native.structures import Access
from gpulease.daemon.ptx.parse.syntax import Address, Instruction, Operand, Register, Scalar, Space
from gpulease.daemon.ptx.translate.access import (
    GRANULE_BYTES,
    RECORD_FAULT,
    SPACE_NUMBERS,
    add_wrapping,
    address_type,
    global_is_valid,
    reach_global,
    window_base,
    window_is_valid,
    window_limit,
)
from gpulease.daemon.ptx.translate.forms import Modifiers
from gpulease.daemon.ptx.translate.ir import LIKELY, NO_LANE, IrWriter, Value, constant
from gpulease.daemon.ptx.translate.lane_copies import translate_copy
from gpulease.daemon.ptx.translate.lane_registers import LaneRegisters
from gpulease.daemon.ptx.translate.loads_stores import check_policy, elements
from gpulease.daemon.ptx.translate.operand_values import ENVIRONMENT
from gpulease.daemon.ptx.translate.vectors import NotWide, is_wide

_SPACES = (Space.GLOBAL, Space.CONST, Space.SHARED)
_EACH_TIME = ("volatile", "relaxed", "acquire", "release")

# Instructions that must be executed once for each lane, even if the operands of all lanes are equal.
_COUNTED = ("atom", "red", "cp")

# Maximum number of bytes that lanes access together in global memory. They are in at most three granules.
_MAX_BYTES = 2 * GRANULE_BYTES

_WORD_BYTES = 4


def is_private(i: Instruction) -> bool:
    """Return whether lanes may get different results of an instruction, even if their operands are equal."""
    if i.opcode == "ld":
        return not _is_shared_load(i)
    if i.opcode == "cvta":
        # Each lane has separate local memory.
        return "local" in i.modifiers
    return i.opcode in _COUNTED


def _is_shared_load(i: Instruction) -> bool:
    spaces = {modifier.partition("::")[0] for modifier in i.modifiers}
    return not spaces.isdisjoint(("global", "const", "shared", "param")) and spaces.isdisjoint(_EACH_TIME)


def translate_access(t: LaneRegisters, i: Instruction, m: Modifiers) -> bool:
    """Translate a load or store by lanes with different addresses. Returns False for any other instruction.

    Raises NotWide if it must be translated for each lane separately.
    """
    # Step 1: leave copies, and instructions that must be executed once for each lane, to other translations.
    if i.opcode == "cp":
        return translate_copy(t, i, m)
    if i.opcode in _COUNTED:
        raise NotWide
    if i.opcode not in ("ld", "st"):
        return False
    if not set(_EACH_TIME).isdisjoint(i.modifiers):
        raise NotWide
    # Step 2: an address without a register is equal for all lanes, except in the local memory of each lane.
    operand = i.operands[0 if i.opcode == "st" else 1]
    if not isinstance(operand, Address) or not isinstance(operand.base, Register):
        if i.opcode == "ld" and is_private(i):
            raise NotWide
        return False
    space = Space(m.get("space").split("::")[0] or "generic")
    # Step 3: an address in a register is also equal for all lanes if the register does not vary.
    if not is_wide(t.read(operand.base, address_type(t, operand.base))):
        if space not in (*_SPACES, Space.PARAM):
            raise NotWide
        return False
    # Step 4: the addresses differ. If the access may span too many granules, translate it for each lane separately.
    check_policy(t, i, m, 2)
    moved = elements(t, m, i.operands[1 if i.opcode == "st" else 0])
    is_long = space is not Space.SHARED and t.ir.lanes * m.scalar().size * len(moved) > _MAX_BYTES
    if space not in _SPACES or is_long:
        raise NotWide
    kind = _LongAccess if len(moved) > 1 and m.scalar().size >= _WORD_BYTES else _Access
    kind(t, operand, operand.base, (space, m.scalar(), len(moved))).translate(moved, stores=i.opcode == "st")
    return True


class _Access:
    """A load or store of one or a few scalars by each lane.

    All lanes' scalars are in one vector: first those of the first lane, then those of the second, and so on.
    """

    def __init__(self, t: LaneRegisters, operand: Address, base: Register, access: tuple[Space, Scalar, int]) -> None:
        self.t, self.ir = t, t.ir
        self._space, self._scalar, self._count = access
        self._size = self._scalar.size * self._count
        self._base = t.read(base, address_type(t, base))
        self._offset = operand.offset
        # A window's 32-bit addresses wrap, so add the offset in 32 bits.
        if self._space is Space.SHARED and base.type.bits == 32:
            self._base, self._offset = add_wrapping(t.ir, self._base, operand.offset), 0
        self._kind = f"i{self._scalar.bits}"
        self._vector = f"<{t.ir.lanes * self._count} x {self._kind}>"
        # Hosts with 256-bit vectors can't mask elements below 32 bits, so LLVM would write a branch for each lane.
        self._is_narrow = self._scalar.bits < 32

    def translate(self, moved: Sequence[Operand], *, stores: bool) -> None:
        """Write code that moves the elements of all lanes together, code that moves them separately, and the choice."""
        t, ir = self.t, self.ir
        values = [t.to_bits(t.read_wide(operand, self._scalar), self._scalar) for operand in moved] if stores else []
        value = self._interleave(values) if stores else None
        address = self._first_address()
        # Move them together if the addresses are neighbouring and allowed and, for narrow elements, no lane is missing.
        flag = ir.binary("and", self._side_by_side(), self._is_valid(address))
        if self._is_narrow:
            flag = ir.binary("and", flag, ir.compare("icmp eq", t.mask, -1))
        together, apart, done = (ir.fresh(stem) for stem in ("together", "apart", "accessed"))
        ir.branch_if(flag, together, apart, extra=LIKELY)
        ir.block(together)
        quick = self._move_together(address, value)
        ir.branch(done)
        # Otherwise, move the elements of one lane after another, through memory.
        ir.block(apart)
        slow, last = self._move_each(value)
        ir.branch(done)
        ir.block(done)
        # The results of a load come from one of the two branches.
        if value is None:
            phi = f"phi {self._vector} [ {quick.text}, %{together} ], [ {slow.text}, %{last} ]"
            loaded = ir.wide_value(self._kind, phi)
            for number, element in enumerate(moved):
                result = t.from_bits(self._part(loaded, number), self._scalar)
                t.write_wide(element, self._scalar, result)

    def _interleave(self, values: Sequence[Value]) -> Value:
        """Combine the values into one vector, in which the values of each lane are together."""
        ir = self.ir
        if len(values) == 1:
            return ir.widen(values[0])
        texts, lanes = [ir.widen(value).text for value in values], ir.lanes
        # Concatenate pairs of vectors until there is one, then reorder its elements by lanes.
        width = lanes
        while len(texts) > 1:
            order = ", ".join(f"i32 {n}" for n in range(2 * width))
            kind = f"<{width} x {self._kind}>"
            texts = [
                ir.wide_value(self._kind, f"shufflevector {kind} {a}, {kind} {b}, <{2 * width} x i32> <{order}>").text
                for a, b in zip(texts[::2], texts[1::2], strict=True)
            ]
            width *= 2
        order = ", ".join(f"i32 {part * lanes + lane}" for lane in range(lanes) for part in range(self._count))
        pick = f"shufflevector {self._vector} {texts[0]}, {self._vector} poison, <{width} x i32> <{order}>"
        return ir.wide_value(self._kind, pick)

    def _part(self, loaded: Value, number: int) -> Value:
        """Extract scalar `number` of each lane from the vector of all lanes' scalars."""
        if self._count == 1:
            return loaded
        order = ", ".join(f"i32 {lane * self._count + number}" for lane in range(self.ir.lanes))
        pick = f"shufflevector {self._vector} {loaded.text}, {self._vector} poison, <{self.ir.lanes} x i32> <{order}>"
        return self.ir.wide_value(self._kind, pick)

    def _first_address(self) -> Value:
        """Return the first lane's address as i64, even if that lane does not take part."""
        first = self.ir.resize(self.ir.first(self._base), "i64", signed=False)
        return self.ir.binary("add", first, self._offset)

    def _side_by_side(self) -> Value:
        """Compute whether each lane that takes part accesses the memory directly after the previous lane's."""
        ir, kind = self.ir, self._base.type
        first = ir.first(self._base)
        numbers = ir.each(kind, self._size)
        # Compare with the first lane's address plus the lane's distance. Ignore lanes that do not take part.
        same = ir.compare("icmp eq", self._base, ir.binary("add", ir.widen(first), numbers))
        absent = ir.binary("xor", self.t.mask, -1)
        every = ir.compare("icmp eq", ir.binary("or", ir.mask_of(same), absent), -1)
        if kind == "i64":
            return every
        # 32-bit addresses are extended before use, so the address of no lane may have wrapped.
        most = 2**32 - self._size * ir.lanes
        return ir.binary("and", every, ir.compare("icmp ule", first, most))

    def _is_valid(self, address: Value) -> Value:
        """Compute whether all memory from the first to the last lane that takes part may be accessed."""
        ir, size, mask = self.ir, self._size, self.t.mask
        # Find the first and last lane of the mask, and compute their addresses.
        before = ir.intrinsic(f"llvm.cttz.{mask.type}", mask.type, mask, constant("i1", 0))
        leading_zeros = ir.intrinsic(f"llvm.ctlz.{mask.type}", mask.type, mask, constant("i1", 0))
        after = ir.binary("sub", constant(mask.type, ir.lanes - 1), leading_zeros)
        low, high = (
            ir.binary("add", address, ir.binary("mul", ir.resize(lane, "i64", signed=False), size))
            for lane in (before, after)
        )
        if self._space is Space.SHARED:
            limit = window_limit(self.t, self._space)
            ends = window_is_valid(ir, low, size, limit), window_is_valid(ir, high, size, limit)
            return ir.binary("and", *ends)
        # The allocated bytes of a granule are at its beginning. So if the last access in a granule is allowed, all
        # accesses in the granule are allowed.
        edge = ir.binary("sub", ir.binary("or", low, GRANULE_BYTES - 1), size - 1)
        valid = global_is_valid(ir, high, size)
        for distance in range(0, ir.lanes * size, GRANULE_BYTES):
            last_there = ir.intrinsic("llvm.umin.i64", "i64", ir.binary("add", edge, distance), high)
            valid = ir.binary("and", valid, global_is_valid(ir, last_there, size))
        return valid

    def _pointer(self, address: Value) -> Value:
        if self._space is Space.SHARED:
            return self.ir.offset(window_base(self.t, self._space), address)
        return self.ir.cast("inttoptr", address, "ptr")

    def _move_together(self, address: Value, value: Value | None) -> Value:
        ir, vector, pointer = self.ir, self._vector, self._pointer(address)
        # For narrow elements, all lanes take part, so no mask is needed.
        if self._is_narrow:
            if value is None:
                return ir.wide_value(self._kind, f"load {vector}, {pointer}, align {self._size}")
            ir.raw(f"store {vector} {value.text}, {pointer}, align {self._size}")
            return value
        # LLVM's masked load and store do not access memory of lanes that do not take part. The alignment is an operand
        # up to LLVM 21, and an attribute from LLVM 22 on, which still accepts the operand.
        place, places = f"ptr {pointer.text}, i32 {self._size}", "ptr, i32"
        flags = self._flags()
        flag_type = f"<{ir.lanes * self._count} x i1>"
        name = f"v{ir.lanes * self._count}{self._kind}.p0"
        if value is None:
            ir.require(f"declare {vector} @llvm.masked.load.{name}({places}, {flag_type}, {vector})")
            call = (
                f"call {vector} @llvm.masked.load.{name}({place}, {flag_type} {flags.text}, {vector} zeroinitializer)"
            )
            return ir.wide_value(self._kind, call)
        ir.require(f"declare void @llvm.masked.store.{name}({vector}, {places}, {flag_type})")
        ir.raw(f"call void @llvm.masked.store.{name}({vector} {value.text}, {place}, {flag_type} {flags.text})")
        return value

    def _flags(self) -> Value:
        """Return a vector with a flag for each element: whether its lane takes part."""
        ir, flags = self.ir, self.ir.flags_of(self.t.mask)
        if self._count == 1:
            return flags
        order = ", ".join(f"i32 {lane}" for lane in range(ir.lanes) for _ in range(self._count))
        kind = ir.wide_type("i1")
        width = ir.lanes * self._count
        return ir.wide_value("i1", f"shufflevector {kind} {flags.text}, {kind} poison, <{width} x i32> <{order}>")

    def _move_each(self, value: Value | None) -> tuple[Value, str]:
        """Move lane by lane, through memory. Returns the loaded values, and the label of the block after the call."""
        values = self._values()
        self.ir.raw(f"store {self._vector} {value.text if value else 'zeroinitializer'}, {values}")
        last = self._call_each(values, is_store=value is not None)
        return self.ir.wide_value(self._kind, f"load {self._vector}, {values}"), last

    def _values(self) -> Value:
        """Return memory for the values that the lanes load or store. The scalars of each lane are together."""
        return self.t.room(f"values.{self._kind}.{self._count}", self._vector)

    def _call_each(self, values: Value, *, is_store: bool) -> str:
        """Call the function that makes the access for one lane after another.

        Returns the label of the block after the call.
        """
        t, ir = self.t, self.ir
        # Pass the addresses of the lanes in memory and, for shared memory, the window.
        wide = ir.binary("add", ir.resize(self._base, "i64", signed=False), self._offset)
        addresses = t.room("addresses", ir.wide_type("i64"))
        ir.raw(f"store {ir.whole(wide)}, {addresses}")
        name = self._require_function(is_store=is_store)
        line = constant("i32", t.instruction.line if t.instruction else 0)
        limit, base = constant("i64", 0), Value("ptr", "null")
        if self._space is Space.SHARED:
            limit, base = window_limit(t, self._space), window_base(t, self._space)
        return t.call_each(name, (ENVIRONMENT, base, limit, addresses, values, t.mask, line))

    def _require_function(self, *, is_store: bool) -> str:
        # Use one function for each direction, space, size and number of lanes. The module contains it once.
        name = f"{'store' if is_store else 'load'}_{self._space.value}_{self._size}_{self.ir.lanes}"
        declarations: set[str] = set()
        body = IrWriter(declarations)
        _access_each(body, self._space, self._size, self.t.mask.type, is_store=is_store)
        signature = (
            f"define internal i32 @{name}(ptr %environment, ptr %base, i64 %limit, ptr %addresses, ptr %values,"
            f" {self.t.mask.type} %mask, i32 %line) noinline {{"
        )
        for definition in (*declarations, "\n".join([signature, "entry:", *body.lines, "}", ""])):
            self.ir.require(definition)
        return name


class _LongAccess(_Access):
    """An access of two or four words by each lane.

    A function reorders the values of eight lanes at a time, because LLVM takes long for vectors of all values.
    """

    def translate(self, moved: Sequence[Operand], *, stores: bool) -> None:
        """Write both ways: directly for lanes with neighbouring addresses, otherwise through the function's memory."""
        # Step 1: put the registers into memory, one after another.
        t, ir = self.t, self.ir
        parts = t.room(f"parts.{self._kind}.{self._count}", f"[{self._count} x {ir.wide_type(self._kind)}]")
        places = [ir.offset(parts, ir.lanes * self._scalar.size * number) for number in range(self._count)]
        if stores:
            for operand, place in zip(moved, places, strict=True):
                ir.raw(f"store {ir.whole(t.to_bits(t.read_wide(operand, self._scalar), self._scalar))}, {place}")
        # Step 2: choose between the two as for short accesses, but require that all lanes take part.
        address = self._first_address()
        flag = ir.binary("and", self._side_by_side(), self._is_valid(address))
        flag = ir.binary("and", flag, ir.compare("icmp eq", t.mask, -1))
        together, apart, done = (ir.fresh(stem) for stem in ("together", "apart", "accessed"))
        ir.branch_if(flag, together, apart, extra=LIKELY)
        # Step 3, together: move between the registers in memory and the memory that the lanes access.
        ir.block(together)
        self._move(self._pointer(address), parts, stores=stores)
        ir.branch(done)
        ir.block(apart)
        # Step 3, apart: move through a buffer in which the values of each lane are together.
        values = self._values()
        if stores:
            self._move(values, parts, stores=True)
        self._call_each(values, is_store=stores)
        if not stores:
            self._move(values, parts, stores=False)
        ir.branch(done)
        ir.block(done)
        # Step 4: write the registers of a load.
        if not stores:
            for operand, place in zip(moved, places, strict=True):
                value = ir.wide_value(self._kind, f"load {ir.wide_type(self._kind)}, {place}")
                t.write_wide(operand, self._scalar, t.from_bits(value, self._scalar))

    def _move(self, lanes: Value, parts: Value, *, stores: bool) -> None:
        """Move values between `lanes`, with each lane's values together, and `parts`, with each register's together."""
        ir = self.ir
        name = f"{'join' if stores else 'spread'}_{self._count}_{self._kind}_{ir.lanes}"
        body = IrWriter(set())
        _move_eights(body, (self._count, self._scalar.size, ir.lanes), joins=stores)
        signature = f"define internal void @{name}(ptr noalias %lanes, ptr noalias %parts) noinline {{"
        ir.require("\n".join([signature, "entry:", *body.lines, "}", ""]))
        ir.emit(f"call void @{name}({lanes}, {parts})")


def _move_eights(ir: IrWriter, sizes: tuple[int, int, int], *, joins: bool) -> None:
    """Write the body of a function that moves the values of eight lanes at a time.

    `sizes` are the number of a lane's values, the bytes of a value, and the number of lanes. With `joins`, values move
    from `parts` to `lanes`.
    """
    count, size, lanes = sizes
    one, all_ = f"<8 x i{8 * size}>", f"<{8 * count} x i{8 * size}>"
    for eight in range(0, lanes, 8):
        together = ir.offset(Value("ptr", "%lanes"), eight * count * size)
        places = [ir.offset(Value("ptr", "%parts"), (lanes * part + eight) * size) for part in range(count)]
        # To spread, load the values of eight lanes, then shuffle and store once for each register.
        if not joins:
            vector = ir.load(all_, together, extra=f", align {count * size}")
            for part, place in enumerate(places):
                order = ", ".join(f"i32 {lane * count + part}" for lane in range(8))
                shuffle = f"shufflevector {vector}, {all_} poison, <8 x i32> <{order}>"
                ir.emit(f"store {ir.value(one, shuffle)}, {place}, align 8")
            continue
        # To join, concatenate the parts of the registers, and reorder them by lanes.
        held, width = [ir.load(one, place, extra=", align 8") for place in places], 8
        while len(held) > 1:
            order = ", ".join(f"i32 {n}" for n in range(2 * width))
            wide = f"<{2 * width} x i{8 * size}>"
            pairs = zip(held[::2], held[1::2], strict=True)
            held = [ir.value(wide, f"shufflevector {a}, {b}, <{2 * width} x i32> <{order}>") for a, b in pairs]
            width *= 2
        order = ", ".join(f"i32 {part * 8 + lane}" for lane in range(8) for part in range(count))
        mixed = ir.value(all_, f"shufflevector {held[0]}, {all_} poison, <{width} x i32> <{order}>")
        ir.emit(f"store {mixed}, {together}, align {count * size}")
    ir.emit("ret void")


def _access_each(ir: IrWriter, space: Space, size: int, mask_type: str, *, is_store: bool) -> None:
    """Write the body of a function that makes an access for one lane after another.

    The function returns the first lane with an access that is not allowed, or NO_LANE.
    """
    kind = f"i{8 * size}"
    # The remaining lanes are the bits of a mask. Take the lowest bit.
    ir.block("head")
    left = Value(mask_type, "%left")
    ir.lines.append(f"  {left.text} = phi {mask_type} [ %mask, %entry ], [ %rest, %moved ]")
    lane = ir.intrinsic(f"llvm.cttz.{mask_type}", mask_type, left, constant("i1", 0))
    index = ir.resize(lane, "i64", signed=False)
    address = ir.load("i64", ir.offset(Value("ptr", "%addresses"), ir.binary("shl", index, 3)))
    # Check the address as for a single thread.
    access = Access.STORE if is_store else Access.LOAD
    if space is Space.SHARED:
        valid = window_is_valid(ir, address, size, Value("i64", "%limit"))
        pointer = ir.offset(Value("ptr", "%base"), address)
        ir.branch_if(valid, "moved", "failed", extra=LIKELY)
    else:
        pointer = reach_global(ir, address, global_is_valid(ir, address, size), (size, access), "failed")
        ir.branch("moved")
    # On a fault, record it and return the lane.
    ir.block("failed")
    details = ", ".join(f"i32 {number}" for number in (size, access, SPACE_NUMBERS[space]))
    ir.emit(f"call void @{RECORD_FAULT}({ENVIRONMENT}, {address}, {details}, i32 %line)")
    ir.ret_value(ir.resize(lane, "i32", signed=False))
    # Move the value, then clear the lane's bit.
    ir.block("moved")
    held = ir.offset(Value("ptr", "%values"), ir.binary("mul", index, size))
    source, into = (held, pointer) if is_store else (pointer, held)
    ir.emit(f"store {ir.load(kind, source, extra=f', align {size}')}, {into}, align {size}")
    ir.emit(f"%less = sub {left}, 1")
    ir.emit(f"%rest = and {left}, %less")
    ir.branch_if(ir.compare("icmp ne", Value(mask_type, "%rest"), 0), "head", "done")
    ir.block("done")
    ir.ret(NO_LANE)
