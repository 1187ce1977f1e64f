"""Translates a kernel to a function that runs adjacent threads together, as lanes of vectors.

    i32 lanes(launch, environment, frame, local, mask, tid.x, tid.y, tid.z, ctaid.x, ctaid.y, ctaid.z)

The mask has a bit for each thread that exists. The indices are those of the first thread. The other threads follow it
in its row or, for warps, in the block. The function returns a `ReturnStatus`. For a fault, its bits from 8 on are the
lane at fault.

The basic blocks are in the order of the PTX. Each has a mask of the lanes that wait for it. The first block with
waiting lanes runs next, so lanes that a branch has separated run together again where the paths join (uniformity.py).

Registers that are equal in all lanes are scalars, and others are vectors. A write does not change the elements of lanes
that do not take part. Operations without a vector form are done in a loop over the lanes.
"""

from collections.abc import Callable
from ctypes import sizeof
from math import prod

from gpulease.daemon.ptx.limits import MAX_LANE_BLOCKS, MAX_LANE_LINES
from gpulease.daemon.ptx.native.structures import PARAMETERS_OFFSET, BlockEnvironment, ReturnStatus
from gpulease.daemon.ptx.parse.declarations import round_up
from gpulease.daemon.ptx.parse.syntax import PREDICATE, Bounds, Function, Instruction, Target
from gpulease.daemon.ptx.translate.callees import Callees
from gpulease.daemon.ptx.translate.form_table import PURE_OPCODES, find_form
from gpulease.daemon.ptx.translate.forms import Form, Modifiers
from gpulease.daemon.ptx.translate.ir import Value, constant
from gpulease.daemon.ptx.translate.lane_access import translate_access
from gpulease.daemon.ptx.translate.lane_exchange import EXCHANGES, kinds_of, open_warp, translate_exchange
from gpulease.daemon.ptx.translate.lane_registers import ALIVE, LaneRegisters
from gpulease.daemon.ptx.translate.liveness import TooComplex, effect_of, registers_of
from gpulease.daemon.ptx.translate.specials import ARGUMENTS, WARP_THREADS
from gpulease.daemon.ptx.translate.uniformity import Unordered, leaves_at, uniformity_of
from gpulease.daemon.ptx.translate.vectors import NotAsLanes, NotWide, VectorWriter, is_wide
from gpulease.daemon.ptx.translate.waits import WAITING, Waits, find_waits

# Number of threads that run together. The widest vector register of any host has this many 32-bit numbers.
LANES = 16

# The local windows of a block's threads are adjacent. Each has the largest alignment that a variable may require.
LOCAL_STEP = 256

# Opcodes with side effects that can be executed for one lane after another.
_MEMORY = ("ld", "st", "atom", "red", "cp", "membar", "fence", "prefetch", "prefetchu", "createpolicy", "discard")
_EFFECTS = (*_MEMORY, "trap", "brkpt", "nanosleep")
_BRANCHES = ("bra", "ret", "exit")
_BARRIERS = ("bar", "barrier")
# Modifiers of instructions on phases of mbarriers, for which threads may wait.
_PHASED = ("async", "bulk", "mbarrier")
_OPCODES = PURE_OPCODES | EXCHANGES | {*_EFFECTS, *_BRANCHES, *_BARRIERS}

_MASK = Value("ptr", "%mask")


class LaneTranslator(LaneRegisters):
    """Translates the body of one kernel for lanes. Raises NotAsLanes if that is impossible."""

    def __init__(self, function: Function, address_indices: dict[str, int], declarations: set[str]) -> None:
        super().__init__(function, address_indices, declarations, Callees())
        # Step 1: raise if the kernel has instructions or waits that have no translation for lanes.
        body = function.instructions
        if not self.waits.is_short or not body or function.call_bytes or not all(map(_is_known, body)):
            raise NotAsLanes
        # Step 2: choose the number of lanes. Warp operations need all 32 lanes of a warp in one group.
        self._kinds_of = kinds_of(body)
        self.is_warp = bool(self._kinds_of.exchanges)
        lanes = WARP_THREADS if self.is_warp else LANES
        self._is_alone = self.is_warp and 0 < _most_threads(function.bounds) <= WARP_THREADS
        self.ir = VectorWriter(declarations, lanes)
        self._found = [find_form(instruction, function.name) for instruction in body]
        effects = [effect_of(i, writes_first=form.writes) for i, (form, _) in zip(body, self._found, strict=True)]
        # Step 3: find registers that are equal in all lanes, and blocks that all lanes execute together.
        try:
            self._lanes = uniformity_of(body, effects, self._kinds_of)
        except (Unordered, TooComplex):
            raise NotAsLanes from None
        if len(self._lanes.blocks) > MAX_LANE_BLOCKS:
            raise NotAsLanes
        # Step 4: barriers and exchanges are only possible in blocks where no lanes are missing.
        common = frozenset(range(len(self._lanes.blocks))) - self._lanes.apart
        for sites, blocks in ((self.waits.sites, common), (self._kinds_of.exchanges, self._lanes.meeting)):
            if not all(self._lies_in(index, blocks) for index in sites):
                raise NotAsLanes
        if self.waits.sites:
            self._find_live([form for form, _ in self._found])
        # Step 5: find the registers that are live at the start of a block. Other registers' values are used in one
        # block only.
        self._shared = 0
        for bits in self._lanes.live:
            self._shared |= bits
        self.local_step = round_up(self.local_limit, LOCAL_STEP)
        # Step 6: initialise the state of the translation.
        indices = ARGUMENTS[:3] if self.is_warp else ARGUMENTS[:1]
        self.ir.arguments = {name: Value("i32", f"%wide.{name}") for name in indices}
        if self.is_warp:
            self.ir.flat = Value("i32", "%wide.flat")
        self._mask_type = f"i{lanes}"
        self._rooms = set()
        self._block = 0
        self._lane, self._rooms_of = None, {}
        self.mask = constant(self._mask_type, 0)
        self._takes_all = self._is_guarded = False

    def _find_waits(self) -> Waits:
        """Return only the waits at barriers, because exchanges are done within the function."""
        body = self.function.instructions
        meetings = [i for i in body if i.opcode in WAITING and i.opcode not in EXCHANGES and "warp" not in i.modifiers]
        is_short = find_waits(meetings).is_short and not find_waits(body).yields
        sites = frozenset(n for n, i in enumerate(body) if i.opcode in _BARRIERS and "warp" not in i.modifiers)
        return Waits(sites, frozenset(), is_short, words=0, parks=False)

    def translate(self, name: str) -> str:
        """Return the IR of the function, with this name. Raises ImageRejected or NotAsLanes."""
        self._name = name
        self.ir.branch("start")
        self.ir.block("start")
        self.ir.branch("in0")
        for number, block in enumerate(self._lanes.blocks):
            self._open_block(number)
            for index in range(block.start, block.end):
                self.index, self.instruction = index, self.function.instructions[index]
                self._translate_for_lanes(self.instruction, *self._found[index])
                if self.ir.length > MAX_LANE_LINES:
                    raise NotAsLanes
            self._close_block(number)
        # After the last block, no lanes are left.
        self.ir.block(f"check{len(self._lanes.blocks)}")
        self.ir.ret(ReturnStatus.DONE)
        size = f"@{name}.frame = internal constant i64 {self.frame_bytes}"
        return "\n".join([size, self._signature(name), *self._prologue(), *self.ir.lines[1:], "}", ""])

    # --- Blocks and branches -----------------------------------------------------------------------------------

    def _open_block(self, number: int) -> None:
        """Begin a block with the lanes that wait for it. If none wait, continue with the next block."""
        # `check` tests whether any lanes wait for the block, `take` moves them into the mask, `in` is the block's code.
        ir, pending = self.ir, self._pending(number)
        self.carry = None
        self._block = number
        ir.block(f"check{number}")
        arriving = ir.load(self._mask_type, pending)
        ir.branch_if(ir.compare("icmp eq", arriving, 0), f"check{number + 1}", f"take{number}")
        ir.block(f"take{number}")
        ir.store(constant(self._mask_type, 0), pending)
        ir.store(arriving, _MASK)
        ir.block(f"in{number}")
        # If all lanes execute the block together, the mask has all lanes that have not ended.
        self._takes_all = number not in self._lanes.apart
        self._take(ir.load(self._mask_type, ALIVE if self._takes_all else _MASK))

    def _pending(self, number: int) -> Value:
        return Value("ptr", f"%pending{number}")

    def _waits_for(self, number: int, mask: Value) -> None:
        """Add lanes to those that wait for a block. For the end after the last block, do nothing."""
        if number < len(self._lanes.blocks):
            before = self.ir.load(self._mask_type, self._pending(number))
            self.ir.store(self.ir.binary("or", before, mask), self._pending(number))

    def _close_block(self, number: int) -> None:
        """Continue with the next block, unless all lanes have left this one."""
        if not self.ir.is_ended:
            self._go(number + 1, self.mask)

    def _go(self, number: int, mask: Value) -> None:
        """Send all lanes that take part to a block. Nothing can follow in the current basic block."""
        # If the block only ends the kernel, end these lanes here.
        if number < len(self._lanes.blocks) and leaves_at(self.function.instructions, self._lanes.blocks[number].start):
            self._go_or_leave(-1, mask)
            return
        is_back = number <= self._block
        if number < len(self._lanes.blocks) and (is_back or self._takes_all):
            # Jump directly. No lane waits for an earlier block, and if all lanes are here, no lane waits for any block.
            self.ir.store(mask, _MASK)
            self.ir.branch(f"in{number}")
            return
        # Otherwise lanes may wait for a block before the target, so check the blocks in their order.
        self._waits_for(number, mask)
        self.ir.branch(f"check{self._block + 1}")

    def _leave(self, mask: Value) -> None:
        alive = self.ir.load(self._mask_type, ALIVE)
        self.ir.store(self.ir.binary("and", alive, self.ir.binary("xor", mask, -1)), ALIVE)

    def _branch(self, instruction: Instruction) -> None:
        ir, body = self.ir, self.function.instructions
        # `number` is the block of the branch's target, or -1 if the kernel ends there.
        target = instruction.operands[0] if instruction.operands else None
        if instruction.opcode == "bra" and not isinstance(target, Target):
            raise self.problem("a branch must go to a label")
        index = target.index if isinstance(target, Target) else len(body)
        ends = leaves_at(body, index)
        number = -1 if ends else [block.start for block in self._lanes.blocks].index(index)
        flag = self._guard(instruction)
        # Case 1: there is no guard, so all lanes branch.
        if flag is None:
            self._go_or_leave(number, self.mask)
            return
        # Case 2: the guard is equal for all lanes, so this is an ordinary branch.
        if not is_wide(flag):
            taken, stay = ir.fresh("taken"), ir.fresh("stay")
            ir.branch_if(flag, taken, stay)
            ir.block(taken)
            self._go_or_leave(number, self.mask)
            ir.block(stay)
            return
        # Case 3: the guard separates the lanes.
        self._part(number, ir.mask_of(flag))

    def _go_or_leave(self, number: int, mask: Value) -> None:
        if number >= 0:
            self._go(number, mask)
            return
        self._leave(mask)
        self.ir.branch(f"check{self._block + 1}")

    def _part(self, number: int, flags: Value) -> None:
        """Send the lanes with the flag to a block, or end them if `number` is -1. The other lanes skip the branch."""
        ir, following = self.ir, self._block + 1
        taken = ir.binary("and", self.mask, flags)
        other_lanes = ir.binary("and", self.mask, ir.binary("xor", flags, -1))
        # Case 1: the lanes with the flag end.
        if number < 0:
            self._leave(taken)
            some = ir.fresh("some")
            ir.branch_if(ir.compare("icmp eq", other_lanes, 0), f"check{following}", some)
            ir.block(some)
            self.mask = other_lanes
            return
        # Case 2: the other lanes would end after the branch, so end them here.
        if leaves_at(self.function.instructions, self._lanes.blocks[self._block].end):
            self._leave(other_lanes)
            some = ir.fresh("some")
            ir.branch_if(ir.compare("icmp eq", taken, 0), f"check{following}", some)
            ir.block(some)
            self._go(number, taken)
            return
        # Case 3: each part waits for its block. The earlier block runs first.
        self._waits_for(following, other_lanes)
        if number > self._block:
            self._waits_for(number, taken)
            ir.branch(f"check{following}")
        # If any lane branches back, jump to that block directly, because no lane waits for an earlier one.
        else:
            back = ir.fresh("back")
            ir.branch_if(ir.compare("icmp eq", taken, 0), f"check{following}", back)
            ir.block(back)
            ir.store(taken, _MASK)
            ir.branch(f"in{number}")

    # --- Instructions ------------------------------------------------------------------------------------------

    def _guard(self, instruction: Instruction) -> Value | None:
        if instruction.guard is None:
            return None
        flag = self.read(instruction.guard.register, PREDICATE)
        return self.ir.invert(flag) if instruction.guard.negated else flag

    def _translate_for_lanes(self, instruction: Instruction, form: Form, modifiers: Modifiers) -> None:
        if instruction.opcode in _BRANCHES:
            self._branch(instruction)
            return
        flag = self._guard(instruction)
        if flag is None:
            self._translate_masked(instruction, form, modifiers)
        elif not is_wide(flag):
            self._jump_over(flag, lambda: self._translate_masked(instruction, form, modifiers))
            if self._takes_all:
                # A wait in the instruction may have changed the mask.
                self._take(self.ir.load(self._mask_type, ALIVE))
        else:
            self._translate_guarded_lanes(flag, instruction, form, modifiers)

    def _translate_guarded_lanes(self, flag: Value, instruction: Instruction, form: Form, modifiers: Modifiers) -> None:
        """Translate an instruction with a guard that varies. Without side effects, it is executed for all lanes."""
        block_mask, takes_all = self.mask, self._takes_all
        mask = self.ir.binary("and", block_mask, self.ir.mask_of(flag))
        self._takes_all, self._is_guarded = False, True
        self._take(mask)
        # The results of lanes with a false guard are dropped when the register is written.
        if instruction.opcode in PURE_OPCODES:
            self._translate_masked(instruction, form, modifiers)
        else:
            some = self.ir.compare("icmp ne", mask, 0)
            self._jump_over(some, lambda: self._translate_masked(instruction, form, modifiers))
        self._takes_all, self._is_guarded = takes_all, False
        self._take(block_mask)

    def _jump_over(self, flag: Value, translate: Callable[[], None]) -> None:
        do, skip = self.ir.fresh("do"), self.ir.fresh("skip")
        self.ir.branch_if(flag, do, skip)
        self.ir.block(do)
        translate()
        self.ir.block(skip)

    def _translate_masked(self, instruction: Instruction, form: Form, modifiers: Modifiers) -> None:
        mark, carry = self.ir.mark(), self.carry
        try:
            # Try exchanges first, then loads and stores of vectors, then the family's translation.
            if instruction.opcode in EXCHANGES or "warp" in instruction.modifiers:
                translate_exchange(self, instruction, modifiers)
            elif not translate_access(self, instruction, modifiers):
                form.translate(self, instruction, modifiers)
        except NotWide:
            # Undo the IR that was written, and translate for one lane in a loop.
            self.ir.rewind(mark)
            self.carry = carry
            self._run_one_by_one(instruction, form, modifiers)

    def _run_one_by_one(self, instruction: Instruction, form: Form, modifiers: Modifiers) -> None:
        """Translate as for one thread, in a loop over the lanes that take part. The loop keeps vectors in memory."""
        ir, carry = self.ir, self.carry
        if instruction.opcode in PURE_OPCODES and self._is_guarded:
            # The loop runs at least once, so skip it if the mask is empty.
            some, none = ir.fresh("some"), ir.fresh("none")
            ir.branch_if(ir.compare("icmp ne", self.mask, 0), some, none)
            ir.block(some)
        # Step 1: store the registers that vary to memory, so that a lane can access its element.
        registers = {r.index: r for operand in instruction.operands for r in registers_of(operand)}
        spilled = [register for register in registers.values() if self._varies(register)]
        rooms = {r.index: self._spill(r, number) for number, r in enumerate(spilled)}
        # Step 2: write the loop. `left` has the remaining lanes; the lowest one is next.
        left, again = Value("ptr", "%left"), ir.fresh("each")
        ir.store(self.mask, left)
        ir.block(again)
        still = ir.load(self._mask_type, left)
        lane = self._first_lane(still)
        with self._as_lane(lane, rooms):
            form.translate(self, instruction, modifiers)
        # Clear the lowest bit.
        remaining = ir.binary("and", still, ir.binary("sub", still, 1))
        ir.store(remaining, left)
        done = ir.fresh("alldone")
        ir.branch_if(ir.compare("icmp ne", remaining, 0), again, done)
        ir.block(done)
        # A carry flag that is set in the loop would be only the last lane's.
        if self.carry is not carry:
            raise NotAsLanes
        # Step 3: load the results into vectors.
        if form.writes and instruction.operands:
            for register in {r.index: r for r in registers_of(instruction.operands[0]) if self._varies(r)}.values():
                self._fetch(register, rooms[register.index])
        if instruction.opcode in PURE_OPCODES and self._is_guarded:
            ir.block(none)

    def _lies_in(self, index: int, among: frozenset[int]) -> bool:
        """Return whether an instruction is in one of these blocks and has no guard that varies."""
        guard = self.function.instructions[index].guard
        if guard is not None and self._varies(guard.register):
            return False
        return any(block.start <= index < block.end for n, block in enumerate(self._lanes.blocks) if n in among)

    # --- The function ------------------------------------------------------------------------------------------

    def _signature(self, name: str) -> str:
        numbers = ", ".join(f"i32 %{argument}" for argument in ARGUMENTS)
        launch = f"ptr noalias dereferenceable({PARAMETERS_OFFSET + self.function.parameter_bytes}) %launch"
        environment = f"ptr noalias dereferenceable({sizeof(BlockEnvironment)}) %environment"
        return (
            f"define internal i32 @{name}({launch}, {environment}, ptr noalias %frame, ptr %local,"
            f" {self._mask_type} %given, {numbers}) alwaysinline {{"
        )

    def _prologue(self) -> list[str]:
        """Write stack slots for registers and masks, all 0, and the switch to the place at which the lanes wait."""
        opening = VectorWriter(self.declarations, self.ir.lanes, "opening.")
        opening.block("entry")
        # A register that varies is a vector, others are scalars.
        for register in self._used_registers():
            kind = f"i{register.type.bits}"
            kind = opening.wide_type(kind) if self._varies(register) else kind
            opening.raw(f"%r{register.index} = alloca {kind}")
            opening.raw(f"store {kind} zeroinitializer, ptr %r{register.index}")
        # The masks are the lanes that wait for each block, that take part, that are left in a loop, and that have not
        # ended.
        for name in (*(f"%pending{n}" for n in range(len(self._lanes.blocks))), _MASK.text, "%left"):
            opening.emit(f"{name} = alloca {self._mask_type}")
            opening.emit(f"store {self._mask_type} 0, ptr {name}")
        opening.emit(f"{ALIVE.text} = alloca {self._mask_type}")
        opening.emit(f"store {self._mask_type} %given, {ALIVE}")
        opening.emit(f"store {self._mask_type} %given, {_MASK}")
        # Reserve the memory that the translations of instructions have requested.
        for name, kind in sorted(self._rooms):
            opening.raw(f"{name} = alloca {kind}, align 64")
        # Load the values that are loaded only once, and compute the threads' indices.
        self.ir.open_fixed(opening)
        if self.is_warp:
            open_warp(opening)
        else:
            opening.raw(f"%wide.tid.x = add {opening.whole(Value('i32', '%tid.x'))}, {opening.each('i32').text}")
        if self._resumes:
            opening.emit("%resume = load i32, ptr %frame")
            cases = [(number + 1, label) for number, label in enumerate(self._resumes)]
            opening.switch(Value("i32", "%resume"), "start", cases)
        else:
            opening.branch("start")
        return opening.lines[1:]


def _most_threads(bounds: Bounds) -> int:
    """Return the maximum number of threads in a block; 0 if the kernel does not declare it."""
    return prod(bounds.required) if bounds.required else bounds.max_threads


def _is_known(i: Instruction) -> bool:
    """Return whether an instruction has a translation for lanes."""
    # `cp.async` copies synchronously, so its first modifier "async" does not count.
    is_copy = i.opcode == "cp" and i.modifiers[:1] == ("async",)
    return i.opcode in _OPCODES and set(_PHASED).isdisjoint(i.modifiers[is_copy:])
