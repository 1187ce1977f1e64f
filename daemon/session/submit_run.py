"""The run of a submit in a separate context: load an image, fill buffers, launch one kernel, read the outputs."""

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from gpulease.daemon.contract.control_page import Counter
from gpulease.daemon.drivers.interface import DriverError, DriverModule
from gpulease.daemon.session.launches import Planner, launch_failed
from gpulease.daemon.session.modules import ModuleOperations, parameter_types
from gpulease.daemon.session.operations import LeaseOver, OperationHandler, SessionResources, serves
from gpulease.daemon.session.replies import done
from gpulease.protocol.codec import build_body, parse_body
from gpulease.protocol.errors import BodyError
from gpulease.protocol.failures import Refused
from gpulease.protocol.framing import Frame
from gpulease.protocol.limits import MAX_ARGUMENT_BYTES, MAX_SUBMIT_OUTPUT_BYTES
from gpulease.protocol.messages import Launch, SubmitArgument, SubmitDone, SubmitRun
from gpulease.protocol.opcodes import TYPED_VALUE, ArgumentKind, Opcode, ParameterType

_MORE: Final = "Acquire the lease with more memory for submits: GpuBuilder().submits(bytes)."
_POINTER: Final = struct.Struct("<Q")
_TYPED: Final = {TYPED_VALUE + kind: kind for kind in ParameterType if kind}
_KINDS: Final = frozenset(int(kind) for kind in ArgumentKind)
# The kinds of arguments that are copied into a buffer before the run, and those that are read back after it.
_FILLED: Final = frozenset({ArgumentKind.INPUT, ArgumentKind.INOUT})
_ANSWERED: Final = frozenset({ArgumentKind.OUTPUT, ArgumentKind.INOUT})


class SubmitOperations(OperationHandler):
    """Serves SUBMIT_RUN.

    Attributes:
        is_spent: Whether the submit has run, successfully or not: nothing more is done in this context.
        is_peer_gone: Returns whether the client that waits for the outputs has disconnected; called during every wait.
        on_growth: Called after the context has done something for which it may need more card memory.
    """

    def __init__(self, resources: SessionResources, planner: Planner, modules: ModuleOperations) -> None:
        super().__init__(resources)
        self.is_spent = False
        self.is_peer_gone: Callable[[], bool] = lambda: False
        self.on_growth: Callable[[], None] = lambda: None
        self._planner = planner
        self._modules = modules

    @serves(Opcode.SUBMIT_RUN)
    def run(self, frame: Frame) -> bytes:
        """Serve SUBMIT_RUN. The reply has all outputs; a failure has none."""
        if frame.flags:
            raise BodyError("SUBMIT_RUN can't be quiet: its outputs are its reply")
        if self.is_spent:
            raise BodyError("this submit has already run: its context runs only one")
        # A submit has one run, even if it fails.
        self.is_spent = True
        body = parse_body(SubmitRun, frame.payload)
        # A typed VALUE is an ordinary VALUE plus a type, which is checked once the image's types are known.
        types = tuple(map(_type_of, body.arguments))
        body = replace(body, arguments=tuple(map(_untyped, body.arguments)))
        # Check what can be checked before anything is loaded, then load, fill the buffers, launch, wait, and read.
        _check(body.arguments)
        module, loaded = self._modules.load_image(body.image)
        self.on_growth()
        # Now the kernel's types are known. Check them before anything is allocated.
        _check_types(body, types, loaded)
        # From now on the card works: its time limits apply, and its time is accounted for.
        self._resources.admit_work(frame.op)
        addresses = [self._buffer(argument) for argument in body.arguments]
        self._launch(module, body, addresses, frame.request_id)
        self._wait()
        outputs = tuple(
            self._read(address, _size(argument))
            for argument, address in zip(body.arguments, addresses, strict=True)
            if argument.kind in _ANSWERED
        )
        return done(frame, SubmitDone(outputs))

    def _wait(self) -> None:
        try:
            self._context.sync(self._poll)
        except DriverError:
            self._counters[Counter.SYNC_ERRORS] += 1
            raise
        self._counters[Counter.SYNCS] += 1

    def _poll(self) -> None:
        """Raise LeaseOver if the lease is over or the client has disconnected."""
        self._check_lease()
        if self.is_peer_gone():
            raise LeaseOver

    def _buffer(self, argument: SubmitArgument) -> int:
        """Return the device address of a buffer with the argument's data; 0 for a VALUE, which has no buffer."""
        if argument.kind == ArgumentKind.VALUE:
            return 0
        size_bytes, ledger = _size(argument), self._ledger
        # A submit's slice is the memory that the lease's holder reserved for submits, so replace the hint.
        try:
            ledger.check_alloc(size_bytes)
        except Refused as refused:
            raise Refused(replace(refused.failure, hint=_MORE)) from None
        # As for MEM_ALLOC: check, allocate, record.
        address = self._context.mem_alloc(size_bytes, ledger.cacheable_bytes(size_bytes), self._poll)
        ledger.add_allocation(address, size_bytes)
        self._record_usage()
        if argument.kind in _FILLED:
            self._context.mem_write(address, memoryview(argument.data), self._poll)
            self._count_copy(size_bytes)
        return address

    def _launch(self, module: int, body: SubmitRun, addresses: list[int], tag: int) -> None:
        # A buffer is passed as its address, a VALUE as its bytes.
        packed = [
            _POINTER.pack(address) if address else argument.data
            for argument, address in zip(body.arguments, addresses, strict=True)
        ]
        launch = Launch(
            module,
            body.kernel,
            body.grid_x,
            body.grid_y,
            body.grid_z,
            body.block_x,
            body.block_y,
            body.block_z,
            body.shared_bytes,
            b"".join(packed),
            tuple(map(len, packed)),
        )
        # Use the same plan as a session's launch, with all its checks.
        plan, args = self._planner.plan(memoryview(build_body(launch)))
        self._context.launch(plan.kernel, plan.grid, plan.block, plan.shared_bytes, plan.lay_out(args), tag)
        self._counters[Counter.LAUNCHES] += 1
        self.on_growth()

    def _read(self, address: int, size_bytes: int) -> bytes:
        into = bytearray(size_bytes)
        self._context.mem_read(address, memoryview(into), self._poll)
        self._count_copy(size_bytes)
        return bytes(into)


def _size(argument: SubmitArgument) -> int:
    return argument.size_bytes if argument.kind == ArgumentKind.OUTPUT else len(argument.data)


def _type_of(argument: SubmitArgument) -> ParameterType:
    """Return the type that the client gave a VALUE; a pointer for any other argument."""
    if argument.kind in _TYPED:
        return _TYPED[argument.kind]
    return ParameterType.UNTOLD if argument.kind == ArgumentKind.VALUE else ParameterType.POINTER


def _untyped(argument: SubmitArgument) -> SubmitArgument:
    return replace(argument, kind=int(ArgumentKind.VALUE)) if argument.kind in _TYPED else argument


def _check_types(body: SubmitRun, types: tuple[ParameterType, ...], module: DriverModule) -> None:
    """Raise Refused if a VALUE is a float where the image's PTX declares an integer or a pointer, or vice versa."""
    # The declared types of this kernel, or none if the text could not be parsed.
    declared = dict(zip(module.kernels, parameter_types(body.image, module.kernels), strict=True)).get(body.kernel, b"")
    for index, (passed, byte) in enumerate(zip(types, declared, strict=False)):
        declared_type = ParameterType(byte)
        if passed.clashes_with(declared_type):
            raise launch_failed(
                f"{body.kernel}: argument {index} is {passed.text}, the kernel's parameter is {declared_type.text}",
                kernel=body.kernel,
                hint="Give a float for a float, and an integer or bytes for an integer or a pointer.",
            )


def _check(arguments: tuple[SubmitArgument, ...]) -> None:
    """Raise BodyError if the arguments are invalid, before anything is allocated for them."""
    passed_bytes = output_bytes = 0
    for index, argument in enumerate(arguments):
        if argument.kind not in _KINDS:
            raise BodyError(f"argument {index}: kind {argument.kind} is not known")
        is_output = argument.kind == ArgumentKind.OUTPUT
        # Each argument has either data or a size: an OUTPUT has a size, all others have data.
        if bool(argument.data) == is_output or bool(argument.size_bytes) != is_output:
            raise BodyError(
                f"argument {index}: an OUTPUT must have a size and no data; every other kind must have data and no size"
            )
        passed_bytes += len(argument.data) if argument.kind == ArgumentKind.VALUE else _POINTER.size
        output_bytes += _size(argument) if argument.kind in _ANSWERED else 0
    if passed_bytes > MAX_ARGUMENT_BYTES:
        raise BodyError(f"the arguments have {passed_bytes} bytes; at most {MAX_ARGUMENT_BYTES} are allowed")
    if output_bytes > MAX_SUBMIT_OUTPUT_BYTES:
        raise BodyError(f"the outputs have {output_bytes} bytes; at most {MAX_SUBMIT_OUTPUT_BYTES} are allowed")
