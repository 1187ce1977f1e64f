"""Translate a kernel to a function that runs one thread, from its start or from where it waits.

    i32 thread(launch, environment, frame, local, tid.x, tid.y, tid.z, ctaid.x, ctaid.y, ctaid.z)

It returns a `ReturnStatus`. Registers are stack slots, which LLVM turns into values; all start as 0, so that nothing a
tenant writes is undefined in LLVM's sense. Where a thread waits for others, the function keeps what it still needs in
the thread's frame and returns; called again, it resumes there.
"""

from ctypes import sizeof

from gpulease.daemon.ptx.limits import MAX_IR_LINES, MAX_MERGES
from gpulease.daemon.ptx.native.structures import PARAMETERS_OFFSET, BlockEnvironment, ReturnStatus
from gpulease.daemon.ptx.parse.syntax import PREDICATE, Instruction, Register
from gpulease.daemon.ptx.translate.callees import name_stack_end
from gpulease.daemon.ptx.translate.form_table import find_form
from gpulease.daemon.ptx.translate.forms import Form, Modifiers
from gpulease.daemon.ptx.translate.ir import IrWriter, Value
from gpulease.daemon.ptx.translate.liveness import (
    TooComplex,
    count_merges,
    effect_of,
    leaders,
    live_after,
    registers_of,
)
from gpulease.daemon.ptx.translate.specials import ARGUMENTS
from gpulease.daemon.ptx.translate.thread import ThreadTranslator
from gpulease.daemon.ptx.translate.wait_points import TURNS, TURNS_LEFT

# Instructions per block of IR, in code without labels.
_PIECE = 64


class BodyTranslator(ThreadTranslator):
    """Translates one kernel's body, each instruction by the form of its family."""

    def translate(self, name: str) -> str:
        """Return the function's IR, under that name. Raises ImageRejected."""
        # Step 1: find every instruction's form, so that an unsupported one refuses the kernel before any work.
        self._name = name
        body = self.function.instructions
        forms = [find_form(instruction, self.function.name) for instruction in body]
        # Step 2: find the values that must be kept at waits, and check the bounds on the values that LLVM must merge.
        if self.waits.sites:
            self._find_live([form for form, _ in forms])
        self._check_merges([form for form, _ in forms])
        # Step 3: one block of IR for each piece of straight code, in PTX's order.
        starts = self.leaders = leaders(body)
        self.ir.branch("start")
        self.ir.block("start")
        for index, (instruction, (form, modifiers)) in enumerate(zip(body, forms, strict=True)):
            if index in starts:
                # The carry flag does not survive a label.
                self.ir.block(f"at{index}")
                self.carry = None
            elif index % _PIECE == 0:
                # LLVM without optimisation takes time in the square of a block's length.
                self.ir.block(self.ir.fresh("piece"))
            self.index, self.instruction = index, instruction
            self._translate_guarded(instruction, form, modifiers)
            if len(self.ir.lines) > MAX_IR_LINES:
                raise self.problem(f"the image takes more than {MAX_IR_LINES} steps")
        # Step 4: the prologue comes last, as only now it is known which registers and buffers are used.
        self._end()
        size = f"@{name}.frame = internal constant i64 {self.frame_bytes}"
        return "\n".join([size, self._signature(name), *self._prologue(), *self.ir.lines[1:], "}", ""])

    def _translate_guarded(self, instruction: Instruction, form: Form, modifiers: Modifiers) -> None:
        """Translate an instruction, with a branch around it if it has a guard (PTX ISA section 9.3)."""
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
        """Leave the kernel when control runs off the end of the body."""
        self.ir.block("end")
        self.ir.ret(ReturnStatus.DONE)

    def _signature(self, name: str) -> str:
        numbers = ", ".join(f"i32 %{argument}" for argument in ARGUMENTS)
        launch = f"ptr noalias dereferenceable({PARAMETERS_OFFSET + self.function.parameter_bytes}) %launch"
        environment = f"ptr noalias dereferenceable({sizeof(BlockEnvironment)}) %environment"
        return (
            f"define internal i32 @{name}({launch}, {environment}, ptr noalias %frame, ptr %local, {numbers})"
            " alwaysinline {"
        )

    def _prologue(self) -> list[str]:
        """Write slots for the registers in use, all 0, and the switch to where a thread waits."""
        opening = IrWriter(self.declarations, "opening.")
        opening.block("entry")
        for register in self._used_registers():
            opening.emit(f"%r{register.index} = alloca i{register.type.bits}")
            opening.emit(f"store i{register.type.bits} 0, ptr %r{register.index}")
        if self.waits.yields:
            opening.emit(f"{TURNS_LEFT.text} = alloca i32")
            opening.emit(f"store i32 {TURNS}, ptr {TURNS_LEFT.text}")
        self._open(opening)
        # The frame's first word says where the thread stopped; 0, a new frame, goes to the start.
        if self._resumes:
            opening.emit("%resume = load i32, ptr %frame")
            cases = [(number + 1, label) for number, label in enumerate(self._resumes)]
            opening.switch(Value("i32", "%resume"), "start", cases)
        else:
            opening.branch("start")
        return opening.lines[1:]

    def _open(self, opening: IrWriter) -> None:
        # A kernel that waits leaves the native stack, so its call variables are in its local window.
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
