"""One kernel as a function that runs one thread, from its start or from the barrier it waits at.

    i32 thread(launch, environment, frame, local, tid.x, tid.y, tid.z, ctaid.x, ctaid.y, ctaid.z)

It returns a `Status`. Registers are stack slots, which LLVM turns into values; all start as 0, so that nothing a tenant
writes is undefined in LLVM's sense. At a barrier the function keeps what it still needs in the thread's frame and
returns; called again, it goes on from there.
"""

from ctypes import sizeof

from gpulease.daemon.drivers.cpu.limits import MAX_LIVE_REGISTERS, MAX_LOCAL_BYTES
from gpulease.daemon.drivers.cpu.native.layout import PARAMETERS_OFFSET, Environment, Status
from gpulease.daemon.drivers.cpu.ptx.declarations import round_up
from gpulease.daemon.drivers.cpu.ptx.scalars import PREDICATE
from gpulease.daemon.drivers.cpu.ptx.syntax import Function, Instruction, Register, Signature
from gpulease.daemon.drivers.cpu.translate.callees import Callees, name_stack_end
from gpulease.daemon.drivers.cpu.translate.catalogue import find_form
from gpulease.daemon.drivers.cpu.translate.forms import Form, Modifiers
from gpulease.daemon.drivers.cpu.translate.inlining import meets
from gpulease.daemon.drivers.cpu.translate.ir import IrWriter, Value, constant
from gpulease.daemon.drivers.cpu.translate.liveness import (
    TooComplex,
    effect_of,
    leaders,
    live_after,
    registers_of,
)
from gpulease.daemon.drivers.cpu.translate.operands import OperandTranslator
from gpulease.daemon.drivers.cpu.translate.specials import ARGUMENTS

# A frame: the number of the barrier to go on behind, then one slot for each register kept.
FRAME_HEAD_BYTES = 8
FRAME_SLOT_BYTES = 8

FRAME = Value("ptr", "%frame")

_SUSPENDS = ("bar", "barrier")


class ThreadTranslator(OperandTranslator):
    """Translates one kernel's body; the families' functions work through its methods."""

    def __init__(
        self,
        function: Function,
        variable_places: dict[str, int],
        declarations: set[str],
        callees: Callees | None = None,
    ) -> None:
        super().__init__(function, variable_places, IrWriter(declarations))
        self.declarations = declarations
        self.suspends = any(i.opcode in _SUSPENDS for i in function.instructions)
        self.frame_bytes = FRAME_HEAD_BYTES
        self._resumes: list[str] = []
        self._live: dict[int, int] = {}
        self._index = 0
        self.callees = callees or Callees()
        self.passed_bytes = self.returned_bytes = 0
        self._calls = any(self.callees.calls(i) for i in function.instructions)
        # What waits at a barrier leaves the native stack, so its calls' variables lie in its local window.
        self._calls_at = round_up(function.local_bytes, FRAME_SLOT_BYTES * 2) if meets(function) else None
        if self._calls or not function.is_kernel:
            # The window of a whole stack.
            self.local_limit = MAX_LOCAL_BYTES
        elif self._calls_at is not None and function.call_bytes:
            self.local_limit = self._calls_at + function.call_bytes
        if (self._calls_at or 0) + function.call_bytes > MAX_LOCAL_BYTES and self._calls_at is not None:
            raise self.problem(f"over {MAX_LOCAL_BYTES} bytes of .local memory and .param variables")

    def translate(self, name: str) -> str:
        """The function's IR, under that name. Raises ImageRejected."""
        body = self.function.instructions
        found = [find_form(instruction, self.function.name) for instruction in body]
        if self.suspends:
            self._find_live([form for form, _ in found])
        starts = leaders(body)
        self.ir.branch("start")
        self.ir.block("start")
        for index, (instruction, (form, modifiers)) in enumerate(zip(body, found, strict=True)):
            if index in starts:
                self.ir.block(f"at{index}")
                self.carry = None
            self._index, self.instruction = index, instruction
            self._translate_guarded(instruction, form, modifiers)
        self._end()
        return "\n".join([self._signature(name), *self._prologue(), *self.ir.lines[1:], "}", ""])

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
        """Where in the local window the variables of what is called begin."""
        return constant("i64", self.function.local_bytes + self.function.call_bytes + FRAME_SLOT_BYTES * 2)

    def make_room(self, signature: Signature) -> None:
        """Have buffers for the arguments and results of such a call."""
        self.passed_bytes = max(self.passed_bytes, signature.parameter_bytes)
        self.returned_bytes = max(self.returned_bytes, signature.result_bytes)

    def suspend(self, status: Status) -> None:
        """Return to the block's loop, and go on behind this when called again."""
        self.carry = None
        kept = self._kept_registers()
        resume = self.ir.fresh("resume")
        self._resumes.append(resume)
        slots = [self.ir.offset(FRAME, FRAME_HEAD_BYTES + FRAME_SLOT_BYTES * n) for n in range(len(kept))]
        for register, slot in zip(kept, slots, strict=True):
            self.ir.store(self._load(register), slot)
        self.ir.store(constant("i32", len(self._resumes)), FRAME)
        self.ir.ret(status)
        self.ir.block(resume)
        for number, register in enumerate(kept):
            slot = self.ir.offset(FRAME, FRAME_HEAD_BYTES + FRAME_SLOT_BYTES * number)
            self._store(register, self.ir.load(f"i{register.type.bits}", slot))
        self.frame_bytes = max(self.frame_bytes, FRAME_HEAD_BYTES + FRAME_SLOT_BYTES * len(kept))

    def _kept_registers(self) -> list[Register]:
        live = self._live[self._index]
        kept = [register for register in self.function.registers if live >> register.index & 1]
        if len(kept) > MAX_LIVE_REGISTERS:
            raise self.problem(f"{len(kept)} registers live at a barrier are more than {MAX_LIVE_REGISTERS}")
        return kept

    def _find_live(self, forms: list[Form]) -> None:
        body = self.function.instructions
        effects = [effect_of(i, writes_first=form.writes) for i, form in zip(body, forms, strict=True)]
        wanted = {index for index, i in enumerate(body) if i.opcode in _SUSPENDS}
        try:
            self._live = live_after(body, effects, wanted)
        except TooComplex as error:
            raise self.problem(str(error)) from None

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
        """Slots for the registers in use, all 0, and the way to the barrier a thread waits at."""
        opening = IrWriter(self.declarations, "opening.")
        opening.block("entry")
        for register in self._used_registers():
            opening.emit(f"%r{register.index} = alloca i{register.type.bits}")
            opening.emit(f"store i{register.type.bits} 0, ptr %r{register.index}")
        self._open(opening)
        if self._resumes:
            opening.emit("%resume = load i32, ptr %frame")
            cases = [(number + 1, label) for number, label in enumerate(self._resumes)]
            opening.switch(Value("i32", "%resume"), "start", cases)
        else:
            opening.branch("start")
        return opening.lines[1:]

    def _open(self, opening: IrWriter) -> None:
        """What calls need."""
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
