"""The interface for functions that translate instructions: a thread's registers, frame, exits and calls."""

from gpulease.daemon.ptx.limits import (
    MAX_LIVE_REGISTERS,
    MAX_LOCAL_BYTES,
    MAX_SAVED_REGISTERS,
)
from gpulease.daemon.ptx.native.structures import SLOT_BYTES, ReturnStatus
from gpulease.daemon.ptx.parse.declarations import round_up
from gpulease.daemon.ptx.parse.syntax import SCALARS, Function, Register, Signature
from gpulease.daemon.ptx.translate.callees import Callees
from gpulease.daemon.ptx.translate.ir import IrWriter, Value, constant
from gpulease.daemon.ptx.translate.liveness import (
    registers_of,
)
from gpulease.daemon.ptx.translate.operand_values import OperandTranslator
from gpulease.daemon.ptx.translate.waits import FRAME, Waits, find_waits


class ThreadTranslator(OperandTranslator):
    """The translation of one kernel or function. The functions of the instruction families call its methods.

    Attributes:
        declarations: The declarations and definitions that the module needs.
        callees: The functions that the code calls.
        waits: The places at which the kernel's threads wait.
        frame_bytes: The size of one thread's frame. It grows until everything is translated.
        index: The index of the current instruction.
        shown_before: The `mma` instructions with A and B that an earlier one has shown (matrix.py), by index: the
            offsets of A and B in the shown words.
        leaders: The instructions at which basic blocks begin.
        passed_bytes, returned_bytes: The sizes of the buffers for arguments and results of calls.
    """

    WORD = SCALARS["b32"]

    def __init__(
        self,
        function: Function,
        address_indices: dict[str, int],
        declarations: set[str],
        callees: Callees | None = None,
    ) -> None:
        super().__init__(function, address_indices, IrWriter(declarations))
        self.declarations = declarations
        self.callees = callees or Callees()
        self.waits = self._find_waits()
        self.frame_bytes = self.waits.head_bytes
        self.index = 0
        # The labels at which the thread resumes, in the order of their numbers.
        self._resumes: list[str] = []
        self._saved_registers = 0
        self._live: dict[int, int] = {}
        self._kinds: dict[str, int] = {}
        self._name = ""
        self.shown_before: dict[int, tuple[int, int]] = {}
        self.leaders: set[int] = set()
        self.passed_bytes = self.returned_bytes = 0
        self._calls = any(self.callees.calls(i) for i in function.instructions)
        # A thread that waits returns from the native function, so the variables of its calls are in its local window.
        self._calls_at = round_up(function.local_bytes, SLOT_BYTES * 2) if self.waits.sites else None
        if self._calls or not function.is_kernel:
            # The variables of callees are in the same window, so its limit is that of the whole stack.
            self.local_limit = MAX_LOCAL_BYTES
        elif self._calls_at is not None and function.call_bytes:
            self.local_limit = self._calls_at + function.call_bytes
        if (self._calls_at or 0) + function.call_bytes > MAX_LOCAL_BYTES and self._calls_at is not None:
            raise self.problem(f"over {MAX_LOCAL_BYTES} bytes of .local memory and .param variables")

    def _find_waits(self) -> Waits:
        return find_waits(self.function.instructions, self.callees.watching)

    def jump(self, index: int) -> None:
        """Continue at an instruction. If the index is after the last one, end the thread."""
        if index < len(self.function.instructions):
            self.ir.branch(f"at{index}")
        else:
            self.ir.ret(ReturnStatus.DONE)

    def leave(self, *, is_exit: bool) -> None:
        """End the thread. In a kernel, `ret` and `exit` are the same."""
        self.ir.ret(ReturnStatus.DONE)

    def pass_on(self, status: Value) -> None:
        """End the thread after its callee has returned this status, which is an exit or a fault."""
        is_exit = self.ir.compare("icmp eq", status, ReturnStatus.EXITED)
        self.ir.ret_value(self.ir.select(is_exit, constant("i32", ReturnStatus.DONE), status))

    def stack(self) -> Value:
        """Return the offset in the local window at which a callee's variables begin."""
        return constant("i64", self.function.local_bytes + self.function.call_bytes + SLOT_BYTES * 2)

    def make_room(self, signature: Signature) -> None:
        """Make the buffers large enough for the arguments and results of a call with this signature."""
        self.passed_bytes = max(self.passed_bytes, signature.parameter_bytes)
        self.returned_bytes = max(self.returned_bytes, signature.result_bytes)

    def kind_of_exchange(self) -> int:
        """Return a number for the current instruction's opcode and modifiers, which must be equal in an exchange."""
        spelling = self.instruction.spelling if self.instruction else ""
        return self._kinds.setdefault(spelling, len(self._kinds))

    def frame_size(self) -> Value:
        """Return the size of one thread's frame in bytes, as i64."""
        return self.ir.load("i64", Value("ptr", f"@{self._name}.frame"))

    def suspend(self, status: ReturnStatus) -> None:
        """Write code that returns to the loop over the block, and resumes here when the function is called again."""
        # Step 1: find the registers that must be saved because a later instruction may read them.
        self.carry = None
        saved = self._registers_to_save()
        self._saved_registers += len(saved)
        if self._saved_registers > MAX_SAVED_REGISTERS:
            raise self.problem(f"more than {MAX_SAVED_REGISTERS} registers are live at all waits together")
        resume = self.ir.fresh("resume")
        self._resumes.append(resume)
        # Step 2: save the registers and the place at which to resume, and return.
        head = self.waits.head_bytes
        slots = [self.ir.offset(FRAME, head + SLOT_BYTES * n) for n in range(len(saved))]
        for register, slot in zip(saved, slots, strict=True):
            self.ir.store(self._load(register), slot)
        self.ir.store(constant("i32", len(self._resumes)), FRAME)
        self.ir.ret(status)
        # Step 3: when the function is called again, load the registers.
        self.ir.block(resume)
        for number, register in enumerate(saved):
            slot = self.ir.offset(FRAME, head + SLOT_BYTES * number)
            self._store(register, self.ir.load(f"i{register.type.bits}", slot))
        self.frame_bytes = max(self.frame_bytes, head + SLOT_BYTES * len(saved))

    def _registers_to_save(self) -> list[Register]:
        live_bits = self._live[self.index]
        if self.index in self.waits.yields and self.instruction is not None:
            # A yield comes before its branch, so the registers in the branch are also needed.
            live_bits |= sum({1 << r.index for operand in self.instruction.operands for r in registers_of(operand)})
        saved = [register for register in self.function.registers if live_bits >> register.index & 1]
        if len(saved) > MAX_LIVE_REGISTERS:
            raise self.problem(f"{len(saved)} registers live where a thread waits are more than {MAX_LIVE_REGISTERS}")
        return saved
