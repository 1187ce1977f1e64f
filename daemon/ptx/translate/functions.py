"""Translates a .func to a native function (PTX ISA sections 7.1 and 9.7.12.5).

    i32 func(launch, environment, local, tid.x, ..., ctaid.z, arguments, results, stack, stack_end)

The function runs for one thread and never suspends it, because functions with instructions at which threads wait have
been inlined (inliner.py). Its local variables are in the thread's local window from `stack` on. Its native frame must
not extend below the address `stack_end`. If there is no room for either, the kernel ends with a stack overflow.
"""

from gpulease.daemon.ptx.limits import (
    FRAME_BYTES_PER_LINE,
    MAX_FRAME_BYTES,
    MAX_LOCAL_BYTES,
    OPTIMISED_FRAME_BYTES_PER_LINE,
)
from gpulease.daemon.ptx.native.structures import Access, ReturnStatus
from gpulease.daemon.ptx.parse.syntax import DeclaredVariable, Function, Space
from gpulease.daemon.ptx.translate.access import RECORD_FAULT, SPACE_NUMBERS
from gpulease.daemon.ptx.translate.callees import SIGNATURE, STACK, STACK_END, Callees, frame_address
from gpulease.daemon.ptx.translate.inliner import MEETINGS
from gpulease.daemon.ptx.translate.ir import IrWriter, Value, constant
from gpulease.daemon.ptx.translate.operand_values import ENVIRONMENT
from gpulease.daemon.ptx.translate.thread_body import BodyTranslator
from gpulease.daemon.ptx.translate.waits import Waits, find_waits

_OWN_STACK = Value("i64", "%own_stack")


class FunctionTranslator(BodyTranslator):
    def __init__(
        self,
        function: Function,
        address_indices: dict[str, int],
        declarations: set[str],
        callees: Callees,
        *,
        is_optimised: bool,
    ) -> None:
        super().__init__(function, address_indices, declarations, callees)
        self._line_bytes = OPTIMISED_FRAME_BYTES_PER_LINE if is_optimised else FRAME_BYTES_PER_LINE
        # Functions with these instructions are inlined, so this function could not be.
        for self.instruction in function.instructions:
            if self.instruction.opcode in MEETINGS:
                raise self.problem(
                    f"{self.instruction.spelling[:60]} in a function that calls itself or is called through a pointer"
                    " is not supported"
                )

    def _find_waits(self) -> Waits:
        # A loop here can't let other threads run, because a native frame can't be suspended and resumed.
        return find_waits(())

    def address_of(self, variable: DeclaredVariable, offset: int) -> Value:
        """Return a variable's address. Local variables are in this call's part of the local window."""
        if variable.space is Space.LOCAL:
            return self.ir.binary("add", _OWN_STACK, variable.offset + offset)
        return super().address_of(variable, offset)

    def stack(self) -> Value:
        """Return the address at which a callee's local variables begin."""
        return self.ir.binary("add", _OWN_STACK, self.function.local_bytes)

    def leave(self, *, is_exit: bool) -> None:
        """Return to the caller. If the thread exits, the caller also ends."""
        self.ir.ret(ReturnStatus.EXITED if is_exit else ReturnStatus.DONE)

    def _signature(self, name: str) -> str:
        # Prevent inlining, because the bound of the caller's frame would not include this function. Compared with a
        # body that nvcc did not inline, the cost of a call is small.
        return f"define internal i32 @{name}({SIGNATURE}) noinline {{"

    def _open(self, opening: IrWriter) -> None:
        """Write the check that both stacks have room for this call, then reserve the buffers for its own calls."""
        # Step 1: compute an upper bound of the native frame from the length of the code.
        frame = (
            self._line_bytes * len(self.ir.lines) + self.function.call_bytes + self.passed_bytes + self.returned_bytes
        )
        if frame > MAX_FRAME_BYTES:
            self.instruction = None
            raise self.problem("the function is too large to be called")
        # Step 2: align this call's local variables, and compare both stacks with their limits.
        alignment = self.function.local_alignment
        rounded = opening.binary("add", STACK, alignment - 1)
        opening.emit(f"{_OWN_STACK.text} = and {rounded}, {-alignment}")
        top = opening.binary("add", _OWN_STACK, self.function.local_bytes)
        fits = opening.compare("icmp ule", top, MAX_LOCAL_BYTES)
        room = opening.binary("sub", frame_address(opening), STACK_END)
        valid = opening.binary("and", fits, opening.compare("icmp sge", room, frame))
        opening.branch_if(valid, "fits", "overflow")
        # Step 3: make an overflow a fault of the kernel.
        opening.block("overflow")
        details = (0, Access.STACK_OVERFLOW, SPACE_NUMBERS[Space.LOCAL], self.function.line)
        arguments = ", ".join(map(str, (ENVIRONMENT, top, *(constant("i32", n) for n in details))))
        opening.emit(f"call void @{RECORD_FAULT}({arguments})")
        opening.ret(ReturnStatus.FAULT)
        opening.block("fits")
        super()._open(opening)
