"""Translates a kernel to a function that runs one thread, from its start or from the place at which it waits.

    i32 thread(launch, environment, frame, local, tid.x, tid.y, tid.z, ctaid.x, ctaid.y, ctaid.z)

The function returns a `ReturnStatus`. Registers are stack slots, which LLVM replaces with values. All are 0 at first,
so that a tenant's code never reads a value that is undefined for LLVM. If a thread waits for others, the function saves
the live registers in the thread's frame and returns. When it is called again, it resumes at this place.
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

# Maximum number of instructions in a basic block of the IR.
_PIECE = 64


class BodyTranslator(ThreadTranslator):
    """Translates the body of one kernel. Each instruction is translated by its form."""

    def translate(self, name: str) -> str:
        """Return the kernel's IR, as a function called `name`. Raises ImageRejected."""
        # Step 1: find the forms of all instructions, so that an unsupported one is refused before any other work.
        self._name = name
        body = self.function.instructions
        forms = [find_form(instruction, self.function.name) for instruction in body]
        # Step 2: find the registers that must be saved at waits, and check that LLVM need not merge too many values.
        if self.waits.sites:
            self._find_live([form for form, _ in forms])
        self._check_merges([form for form, _ in forms])
        # Step 3: translate the instructions in order. Each basic block of the PTX begins a block of the IR.
        starts = self.leaders = leaders(body)
        self.ir.branch("start")
        self.ir.block("start")
        for index, (instruction, (form, modifiers)) in enumerate(zip(body, forms, strict=True)):
            if index in starts:
                # The carry flag is not valid after a label.
                self.ir.block(f"at{index}")
                self.carry = None
            elif index % _PIECE == 0:
                # Without optimisation, LLVM's time grows with the square of a block's length.
                self.ir.block(self.ir.fresh("piece"))
            self.index, self.instruction = index, instruction
            self._translate_guarded(instruction, form, modifiers)
            if len(self.ir.lines) > MAX_IR_LINES:
                raise self.problem(f"the image takes more than {MAX_IR_LINES} steps")
        # Step 4: write the prologue last, because the registers and buffers in use are known only now.
        self._end()
        size = f"@{name}.frame = internal constant i64 {self.frame_bytes}"
        return "\n".join([size, self._signature(name), *self._prologue(), *self.ir.lines[1:], "}", ""])

    def _translate_guarded(self, instruction: Instruction, form: Form, modifiers: Modifiers) -> None:
        """Translate an instruction. If it has a guard, write a branch around it (PTX ISA section 9.3)."""
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
        """End the thread after the last instruction."""
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
        """Write stack slots for the registers in use, all 0, and the switch to the place at which a thread waits."""
        opening = IrWriter(self.declarations, "opening.")
        opening.block("entry")
        for register in self._used_registers():
            opening.emit(f"%r{register.index} = alloca i{register.type.bits}")
            opening.emit(f"store i{register.type.bits} 0, ptr %r{register.index}")
        if self.waits.yields:
            opening.emit(f"{TURNS_LEFT.text} = alloca i32")
            opening.emit(f"store i32 {TURNS}, ptr {TURNS_LEFT.text}")
        self._open(opening)
        # The frame's first word is the number of the place at which the thread waits; 0 in a new frame.
        if self._resumes:
            opening.emit("%resume = load i32, ptr %frame")
            cases = [(number + 1, label) for number, label in enumerate(self._resumes)]
            opening.switch(Value("i32", "%resume"), "start", cases)
        else:
            opening.branch("start")
        return opening.lines[1:]

    def _open(self, opening: IrWriter) -> None:
        # A kernel that waits returns from this function, so the variables of its calls are in its local window.
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
