"""A kernel's registers while its threads run as lanes (lanes.py): their storage, and the lanes that a write changes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from gpulease.daemon.ptx.limits import MAX_LANE_FRAME_BYTES, MAX_LANE_SAVED_REGISTERS
from gpulease.daemon.ptx.native.structures import SHORT_HEAD_BYTES, SLOT_BYTES, ReturnStatus
from gpulease.daemon.ptx.parse.declarations import round_up
from gpulease.daemon.ptx.parse.syntax import Register
from gpulease.daemon.ptx.translate.ir import LIKELY, NO_LANE, Value, constant
from gpulease.daemon.ptx.translate.thread_body import BodyTranslator
from gpulease.daemon.ptx.translate.uniformity import Uniformity
from gpulease.daemon.ptx.translate.vectors import NotAsLanes, NotWide, VectorWriter, is_wide
from gpulease.daemon.ptx.translate.waits import FRAME

ALIVE = Value("ptr", "%alive")

# The size of one lane's element in memory, by the register's size. A predicate takes a byte.
_HELD_BITS = {1: 8, 8: 8, 16: 16, 32: 32, 64: 64, 128: 128}


class LaneRegisters(BodyTranslator):
    """The state of the lanes at the current instruction, and access to their registers.

    Attributes:
        mask: The lanes that take part in the instruction.
        local_step: The distance between the windows of local memory of two lanes, in bytes.
    """

    ir: VectorWriter
    mask: Value
    local_step: int
    _lanes: Uniformity
    _mask_type: str
    # The registers that are live at the beginning of some basic block, as bits by index.
    _shared: int
    # The memory that the function reserves: names and types.
    _rooms: set[tuple[str, str]]
    # While an instruction is translated for one lane: the lane's number, and pointers to the registers of all lanes.
    _lane: Value | None
    _rooms_of: dict[int, Value]
    # Whether all lanes that have not ended take part, and whether the instruction has a guard that varies.
    _takes_all: bool
    _is_guarded: bool
    # Whether all threads of a block are one group of lanes, which never has to wait for another group.
    _is_alone: bool

    def _take(self, mask: Value) -> None:
        self.mask = mask
        # A fault that concerns all lanes reports the first lane.
        self.ir.blamed = self._first_lane(mask)

    def _first_lane(self, mask: Value) -> Value:
        return self.ir.resize(
            self.ir.intrinsic(f"llvm.cttz.{mask.type}", mask.type, mask, constant("i1", 0)), "i32", signed=False
        )

    def room(self, name: str, kind: str) -> Value:
        """Reserve memory of the type `kind` in the function. The same name and type give the same memory."""
        self._rooms.add((f"%{name}", kind))
        return Value("ptr", f"%{name}")

    def alive(self) -> Value:
        """Return the lanes that have not ended. If all of them take part, this is the mask."""
        return self.mask if self._takes_all else self.ir.load(self._mask_type, ALIVE)

    def fail_lane(self, lane: Value) -> None:
        before, self.ir.blamed = self.ir.blamed, lane
        self.ir.ret(ReturnStatus.FAULT)
        self.ir.blamed = before

    def call_each(self, name: str, arguments: Iterable[Value]) -> str:
        """Call a function that runs for one lane after another, and end the kernel if it returns a lane that failed.

        The function returns NO_LANE if no lane failed. This method returns the label of the block after the call.
        """
        ir = self.ir
        failed = ir.value("i32", f"call i32 @{name}({', '.join(map(str, arguments))})")
        fault, fine = ir.fresh("fault"), ir.fresh("fine")
        ir.branch_if(ir.compare("icmp eq", failed, NO_LANE), fine, fault, extra=LIKELY)
        ir.block(fault)
        self.fail_lane(failed)
        ir.block(fine)
        return fine

    def local_window(self) -> Value:
        """Return the address of the current lane's local memory. Raises NotWide if there is no current lane."""
        if self._lane is None:
            raise NotWide
        distance = self.ir.binary("mul", self.ir.resize(self._lane, "i64", signed=False), self.local_step)
        return self.ir.offset(super().local_window(), distance)

    @contextmanager
    def _as_lane(self, lane: Value, rooms: dict[int, Value]) -> Iterator[None]:
        """In the block, translate for one lane, with the registers, indices and local memory of `lane`."""
        ir = self.ir
        blamed, self._rooms_of = ir.blamed, rooms
        self._lane = ir.blamed = ir.lane = lane
        yield
        ir.blamed, self._rooms_of = blamed, {}
        self._lane = ir.lane = None

    # --- Registers ---------------------------------------------------------------------------------------------

    def _varies(self, register: Register) -> bool:
        return bool(self._lanes.varying >> register.index & 1)

    def _load(self, register: Register) -> Value:
        if not self._varies(register):
            return super()._load(register)
        kind = f"i{register.type.bits}"
        # For all lanes, load the vector. For one lane, load its element, which was spilled to memory.
        if self._lane is None:
            return self.ir.wide_value(kind, f"load {self.ir.wide_type(kind)}, ptr %r{register.index}")
        stored = self.ir.load(_held(register), self._place(register))
        return self.ir.resize(stored, kind, signed=False)

    def _store(self, register: Register, value: Value) -> None:
        # A register that does not vary must get the same value in all lanes.
        if not self._varies(register):
            if is_wide(value) or self._lane is not None:
                raise NotAsLanes
            super()._store(register, value)
            return
        if self._lane is not None:
            self.ir.store(self.ir.resize(value, _held(register), signed=False), self._place(register))
            return
        # A lane that does not take part keeps its element, but this is only necessary if the element may still be read.
        is_needed = self._is_guarded or self._shared >> register.index & 1
        if is_needed and not self._takes_all:
            value = self.ir.select(self.ir.flags_of(self.mask), value, self._load(register))
        self._put(register, value)

    def _put(self, register: Register, value: Value) -> None:
        self.ir.raw(f"store {self.ir.whole(value)}, ptr %r{register.index}")

    def _place(self, register: Register) -> Value:
        """Return the address of the current lane's element of a register. Raises NotAsLanes if it has none."""
        if self._lane is None or register.index not in self._rooms_of:
            raise NotAsLanes
        size = _HELD_BITS[register.type.bits] // 8
        distance = self.ir.binary("mul", self.ir.resize(self._lane, "i64", signed=False), size)
        return self.ir.offset(self._rooms_of[register.index], distance)

    def _spill(self, register: Register, number: int) -> Value:
        """Store a vector register to memory. Returns a pointer to it."""
        memory_kind, ir = _held(register), self.ir
        room = self.room(f"room{number}.{memory_kind}", ir.wide_type(memory_kind))
        ir.raw(f"store {ir.whole(ir.resize(self._load(register), memory_kind, signed=False))}, {room}")
        return room

    def _fetch(self, register: Register, room: Value) -> None:
        memory_kind, ir = _held(register), self.ir
        value = ir.wide_value(memory_kind, f"load {ir.wide_type(memory_kind)}, {room}")
        self._put(register, ir.resize(value, f"i{register.type.bits}", signed=False))

    # --- Waiting -----------------------------------------------------------------------------------------------

    def suspend(self, status: ReturnStatus) -> None:
        """Write code that returns to the loop over the block, and resumes here when it is called again.

        All lanes that have not ended must take part.
        """
        self.carry = None
        # A single group never has to wait for another one.
        if self._is_alone:
            return
        saved = self._registers_to_save()
        resume = self.ir.fresh("resume")
        self._resumes.append(resume)
        # Step 1: lay out the frame. It contains the place at which to resume, the lanes that have not ended, and the
        # registers, each at a multiple of the slot size.
        places, end = [], SHORT_HEAD_BYTES + SLOT_BYTES
        for register in saved:
            places.append(self.ir.offset(FRAME, end))
            end += round_up(self._frame_bytes_of(register), SLOT_BYTES)
        self._saved_registers += len(saved)
        if end > MAX_LANE_FRAME_BYTES or self._saved_registers > MAX_LANE_SAVED_REGISTERS:
            raise NotAsLanes
        # Step 2: save the registers. Store a vector of predicates as a mask with one bit for each lane.
        for register, place in zip(saved, places, strict=True):
            value = self._load(register)
            stored = self.ir.mask_of(value) if is_wide(value) and value.type == "i1" else value
            text = self.ir.whole(stored) if is_wide(stored) else str(stored)
            self.ir.raw(f"store {text}, {place}, align {SLOT_BYTES}")
        # Step 3: store the lanes and the place, and return.
        alive = self.ir.offset(FRAME, SHORT_HEAD_BYTES)
        self.ir.store(self.mask, alive)
        self.ir.store(constant("i32", len(self._resumes)), FRAME)
        self.ir.ret(status)
        # Step 4: when called again, load the registers and the mask.
        self.ir.block(resume)
        end = SHORT_HEAD_BYTES + SLOT_BYTES
        for register in saved:
            self._restore(register, self.ir.offset(FRAME, end))
            end += round_up(self._frame_bytes_of(register), SLOT_BYTES)
        self.frame_bytes = max(self.frame_bytes, end)
        mask = self.ir.load(self._mask_type, self.ir.offset(FRAME, SHORT_HEAD_BYTES))
        self.ir.store(mask, ALIVE)
        self._take(mask)

    def _restore(self, register: Register, place: Value) -> None:
        kind, align = f"i{register.type.bits}", f", align {SLOT_BYTES}"
        if not self._varies(register):
            super()._store(register, self.ir.load(kind, place, extra=align))
        elif kind == "i1":
            self._put(register, self.ir.flags_of(self.ir.load(self._mask_type, place, extra=align)))
        else:
            self._put(register, self.ir.wide_value(kind, f"load {self.ir.wide_type(kind)}, {place}{align}"))

    def _frame_bytes_of(self, register: Register) -> int:
        bits = register.type.bits
        return max(1, bits * (self.ir.lanes if self._varies(register) else 1) // 8)


def _held(register: Register) -> str:
    """Return the type that one lane's element of a register has in memory."""
    return f"i{_HELD_BITS[register.type.bits]}"
