"""Translate a kernel to a function that runs one thread, from its start or from where it waits.

    i32 thread(launch, environment, frame, local, tid.x, tid.y, tid.z, ctaid.x, ctaid.y, ctaid.z)

It returns a `Status`. Registers are stack slots, which LLVM turns into values; all start as 0, so that nothing a tenant
writes is undefined in LLVM's sense. Where a thread waits for others the function keeps what it still needs in the
thread's frame and returns; called again, it goes on from there.
"""

from ctypes import sizeof

from gpulease.daemon.ptx.limits import (
    MAX_IR_LINES,
    MAX_LIVE_REGISTERS,
    MAX_LOCAL_BYTES,
    MAX_MERGES,
    MAX_SAVED_REGISTERS,
)
from gpulease.daemon.ptx.native.structures import PARAMETERS_OFFSET, SLOT_BYTES, Environment, Status
from gpulease.daemon.ptx.parse.declarations import round_up
from gpulease.daemon.ptx.parse.syntax import PREDICATE, SCALARS, Function, Instruction, Register, Signature
from gpulease.daemon.ptx.translate.callees import Callees, name_stack_end
from gpulease.daemon.ptx.translate.form_table import find_form
from gpulease.daemon.ptx.translate.forms import Form, Modifiers
from gpulease.daemon.ptx.translate.ir import LIKELY, IrWriter, Value, constant
from gpulease.daemon.ptx.translate.liveness import (
    TooComplex,
    count_merges,
    effect_of,
    leaders,
    live_after,
    registers_of,
)
from gpulease.daemon.ptx.translate.operand_values import OperandTranslator
from gpulease.daemon.ptx.translate.specials import ARGUMENTS
from gpulease.daemon.ptx.translate.wait_points import FRAME, Waits, find_waits, let_others_run

# How often a thread goes round a loop that watches memory before it lets the others run: a turn of all threads costs
# some 20 ns each, so that is below a few per cent; and one that waits for many others does not spin for long.
_TURNS = 1024

# Instructions to a block of IR, where control enters no other.
_PIECE = 64

# Counts them down; it starts anew whenever the function is entered.
_TURNS_LEFT = Value("ptr", "%turns")


class ThreadTranslator(OperandTranslator):
    """Translates one kernel's body; the families' functions work through its methods.

    Attributes:
        waits: Where the kernel's threads wait.
        frame_bytes: What one thread's frame takes; known when all is translated.
        index: The instruction at hand.
    """

    WORD = SCALARS["b32"]

    def __init__(
        self,
        function: Function,
        variable_places: dict[str, int],
        declarations: set[str],
        callees: Callees | None = None,
    ) -> None:
        super().__init__(function, variable_places, IrWriter(declarations))
        self.declarations = declarations
        self.callees = callees or Callees()
        self.waits = self._find_waits()
        self.frame_bytes = self.waits.head_bytes
        self.index = 0
        self._resumes: list[str] = []
        self._saved_registers = 0
        self._live: dict[int, int] = {}
        self._kinds: dict[str, int] = {}
        self._name = ""
        # Matrix instructions whose parts of A and B an earlier one has shown: where these are among its words.
        self.shown_before: dict[int, tuple[int, int]] = {}
        self.leaders: set[int] = set()
        self.passed_bytes = self.returned_bytes = 0
        self._calls = any(self.callees.calls(i) for i in function.instructions)
        # What waits leaves the native stack, so its calls' variables lie in its local window.
        self._calls_at = round_up(function.local_bytes, SLOT_BYTES * 2) if self.waits.sites else None
        if self._calls or not function.is_kernel:
            # The window of a whole stack.
            self.local_limit = MAX_LOCAL_BYTES
        elif self._calls_at is not None and function.call_bytes:
            self.local_limit = self._calls_at + function.call_bytes
        if (self._calls_at or 0) + function.call_bytes > MAX_LOCAL_BYTES and self._calls_at is not None:
            raise self.problem(f"over {MAX_LOCAL_BYTES} bytes of .local memory and .param variables")

    def _find_waits(self) -> Waits:
        return find_waits(self.function.instructions, self.callees.watching)

    def translate(self, name: str) -> str:
        """The function's IR, under that name. Raises ImageRejected."""
        self._name = name
        body = self.function.instructions
        found = [find_form(instruction, self.function.name) for instruction in body]
        if self.waits.sites:
            self._find_live([form for form, _ in found])
        self._check_merges([form for form, _ in found])
        starts = self.leaders = leaders(body)
        self.ir.branch("start")
        self.ir.block("start")
        for index, (instruction, (form, modifiers)) in enumerate(zip(body, found, strict=True)):
            if index in starts:
                self.ir.block(f"at{index}")
                self.carry = None
            elif index % _PIECE == 0:
                # Compiling without optimisation takes time in the square of a block's length.
                self.ir.block(self.ir.fresh("piece"))
            self.index, self.instruction = index, instruction
            self._translate_guarded(instruction, form, modifiers)
            if len(self.ir.lines) > MAX_IR_LINES:
                raise self.problem(f"the image takes more than {MAX_IR_LINES} steps")
        self._end()
        size = f"@{name}.frame = internal constant i64 {self.frame_bytes}"
        return "\n".join([size, self._signature(name), *self._prologue(), *self.ir.lines[1:], "}", ""])

    def _translate_guarded(self, instruction: Instruction, form: Form, modifiers: Modifiers) -> None:
        """An instruction, jumped over if its guard says so (PTX ISA section 9.3)."""
        if instruction.guard is None:
            form.translate(self, instruction, modifiers)
            return
        flag = self.read(instruction.guard.register, PREDICATE)
        do, skip = self.ir.fresh("do"), self.ir.fresh("skip")
        if instruction.guard.negated:
            flag = self.ir.invert(flag)
        self.ir.branch_if(flag, do, skip)
        self.ir.block(do)
        form.translate(self, instruction, modifiers)
        self.ir.block(skip)

    def jump(self, index: int) -> None:
        """Go on at an instruction, or end the thread if none is there."""
        if index < len(self.function.instructions):
            self.ir.branch(f"at{index}")
        else:
            self.ir.ret(Status.DONE)

    def leave(self, *, is_exit: bool) -> None:
        """End the thread; in a kernel's own body `ret` and `exit` are the same."""
        self.ir.ret(Status.DONE)

    def pass_on(self, status: Value) -> None:
        """End as a call has ended that did not come back."""
        is_exit = self.ir.compare("icmp eq", status, Status.EXITED)
        self.ir.ret_value(self.ir.select(is_exit, constant("i32", Status.DONE), status))

    def stack(self) -> Value:
        """Return where in the local window the callee's variables begin."""
        return constant("i64", self.function.local_bytes + self.function.call_bytes + SLOT_BYTES * 2)

    def make_room(self, signature: Signature) -> None:
        """Have buffers for the arguments and results of such a call."""
        self.passed_bytes = max(self.passed_bytes, signature.parameter_bytes)
        self.returned_bytes = max(self.returned_bytes, signature.result_bytes)

    def count_turn(self) -> None:
        """Let the other threads run after so many turns of a loop: one of them may write what this one looks for."""
        if self.index not in self.waits.yields:
            return
        left = self.ir.binary("sub", self.ir.load("i32", _TURNS_LEFT), 1)
        self.ir.store(left, _TURNS_LEFT)
        turn, go_on = self.ir.fresh("turn"), self.ir.fresh("goon")
        self.ir.branch_if(self.ir.compare("icmp ne", left, 0), go_on, turn, extra=LIKELY)
        self.ir.block(turn)
        let_others_run(self)
        self.ir.block(go_on)

    def kind_of_exchange(self) -> int:
        """A number for the instruction's qualifiers: threads exchange where these are the same."""
        spelling = self.instruction.spelling if self.instruction else ""
        return self._kinds.setdefault(spelling, len(self._kinds))

    def frame_size(self) -> Value:
        """Return the bytes of one thread's frame, as i64."""
        return self.ir.load("i64", Value("ptr", f"@{self._name}.frame"))

    def suspend(self, status: Status) -> None:
        """Return to the block's loop, and go on behind this when called again."""
        self.carry = None
        kept = self._kept_registers()
        self._saved_registers += len(kept)
        if self._saved_registers > MAX_SAVED_REGISTERS:
            raise self.problem(f"more than {MAX_SAVED_REGISTERS} registers are live at all waits together")
        resume = self.ir.fresh("resume")
        self._resumes.append(resume)
        head = self.waits.head_bytes
        slots = [self.ir.offset(FRAME, head + SLOT_BYTES * n) for n in range(len(kept))]
        for register, slot in zip(kept, slots, strict=True):
            self.ir.store(self._load(register), slot)
        self.ir.store(constant("i32", len(self._resumes)), FRAME)
        self.ir.ret(status)
        self.ir.block(resume)
        for number, register in enumerate(kept):
            slot = self.ir.offset(FRAME, head + SLOT_BYTES * number)
            self._store(register, self.ir.load(f"i{register.type.bits}", slot))
        self.frame_bytes = max(self.frame_bytes, head + SLOT_BYTES * len(kept))

    def _kept_registers(self) -> list[Register]:
        live = self._live[self.index]
        if self.index in self.waits.yields and self.instruction is not None:
            # The branch itself comes behind the wait.
            live |= sum({1 << r.index for operand in self.instruction.operands for r in registers_of(operand)})
        kept = [register for register in self.function.registers if live >> register.index & 1]
        if len(kept) > MAX_LIVE_REGISTERS:
            raise self.problem(f"{len(kept)} registers live where a thread waits are more than {MAX_LIVE_REGISTERS}")
        return kept

    def _find_live(self, forms: list[Form]) -> None:
        body = self.function.instructions
        effects = [effect_of(i, writes_first=form.writes) for i, form in zip(body, forms, strict=True)]
        try:
            self._live = live_after(body, effects, set(self.waits.sites))
        except TooComplex as error:
            raise self.problem(str(error)) from None

    def _check_merges(self, forms: list[Form]) -> None:
        body = self.function.instructions
        effects = [effect_of(i, writes_first=form.writes) for i, form in zip(body, forms, strict=True)]
        try:
            merges = count_merges(body, effects, waits=bool(self.waits.sites))
        except TooComplex as error:
            raise self.problem(str(error)) from None
        if merges > MAX_MERGES:
            raise self.problem(f"more than {MAX_MERGES} registers are live where control flows together")

    def _end(self) -> None:
        """Control that runs off the body's end leaves the kernel."""
        self.ir.block("end")
        self.ir.ret(Status.DONE)

    def _signature(self, name: str) -> str:
        numbers = ", ".join(f"i32 %{argument}" for argument in ARGUMENTS)
        launch = f"ptr noalias dereferenceable({PARAMETERS_OFFSET + self.function.parameter_bytes}) %launch"
        environment = f"ptr noalias dereferenceable({sizeof(Environment)}) %environment"
        return (
            f"define internal i32 @{name}({launch}, {environment}, ptr noalias %frame, ptr %local, {numbers})"
            " alwaysinline {"
        )

    def _prologue(self) -> list[str]:
        """Slots for the registers in use, all 0, and the way to where a thread waits."""
        opening = IrWriter(self.declarations, "opening.")
        opening.block("entry")
        for register in self._used_registers():
            opening.emit(f"%r{register.index} = alloca i{register.type.bits}")
            opening.emit(f"store i{register.type.bits} 0, ptr %r{register.index}")
        if self.waits.yields:
            opening.emit(f"{_TURNS_LEFT.text} = alloca i32")
            opening.emit(f"store i32 {_TURNS}, ptr {_TURNS_LEFT.text}")
        self._open(opening)
        if self._resumes:
            opening.emit("%resume = load i32, ptr %frame")
            cases = [(number + 1, label) for number, label in enumerate(self._resumes)]
            opening.switch(Value("i32", "%resume"), "start", cases)
        else:
            opening.branch("start")
        return opening.lines[1:]

    def _open(self, opening: IrWriter) -> None:
        """Write the values that calls need."""
        if self._calls_at is not None:
            opening.emit(f"%calls = getelementptr i8, ptr %local, i64 {self._calls_at}")
        elif self.function.call_bytes:
            opening.room("%calls", self.function.call_bytes)
        if self.function.call_bytes:
            opening.room("%bad", 8)
        if self._calls:
            opening.room("%passed", self.passed_bytes)
            opening.room("%returned", self.returned_bytes)
        if self._calls and self.function.is_kernel:
            name_stack_end(opening)

    def _used_registers(self) -> list[Register]:
        used: set[int] = set()
        for instruction in self.function.instructions:
            for operand in instruction.operands:
                used.update(register.index for register in registers_of(operand))
            if instruction.guard is not None:
                used.add(instruction.guard.register.index)
        return [register for register in self.function.registers if register.index in used]
