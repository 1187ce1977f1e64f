"""One-shot jobs: one kernel on a lease, in a context that ends with the call."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, Self

from gpulease.client.code_texts import image_of
from gpulease.client.core.exchange import CONNECT_LIMIT_S, FixedDeadline, answer_to, dial
from gpulease.client.core.launch import MAX_U32, dimensions
from gpulease.client.core.lease import (
    END_REASON_POLL_S,
    END_REASON_WAIT_S,
    LEASE_OVER,
    LeaseHandle,
    LeaseReport,
    SubmitReport,
    by_token,
    end_reason_of,
)
from gpulease.client.core.lease_request import milliseconds
from gpulease.client.core.waits import Procedure, Sleep
from gpulease.client.errors import Disconnected, GpuLeaseError, InvalidRequest, TimedOut, error_of
from gpulease.client.kernel_args import KernelArgs, pack_listed, type_of
from gpulease.client.memory_views import flattened, readable_view, view_of
from gpulease.client.numbers import whole
from gpulease.client.texts import kernel_name, quoted
from gpulease.client.transport.link import LinkEnded
from gpulease.protocol import Failure, Opcode, Status
from gpulease.protocol.address import Address
from gpulease.protocol.capabilities import AttachOption
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES, MAX_SUBMIT_ARGUMENTS, MAX_SUBMIT_OUTPUT_BYTES
from gpulease.protocol.messages import AttachReply, GpuSubmit, SubmitArgument, SubmitDone, SubmitRun
from gpulease.protocol.opcodes import TYPED_VALUE, ArgumentKind, ParameterType, SubmitOption
from gpulease.protocol.primitives import Tlv

Image = bytes | bytearray | memoryview | str
"""PTX text or a cubin, as bytes, a buffer or a string."""

READY_LIMIT_S: Final = 150.0
"""Longest time until a job starts, in seconds: at most 30 s for the job before it, 32 s to free the bytes of a lost
prepared context, and 60 s to make a context. A daemon that takes longer hangs."""

RUN_MARGIN_S: Final = 10.0
"""Seconds to wait for a job's reply beyond the job's own limit: for the daemon's grace and a slow host."""

RUN_FIXED_BYTES: Final = 38
"""Bytes of a SUBMIT_RUN's payload other than name, arguments and image: their lengths and the launch's shape."""

ARGUMENT_FIXED_BYTES: Final = 13
"""Bytes of an argument other than its data."""

MAY_HAVE_RUN: Final = (
    "The kernel may have run, and the submit is not repeated automatically: repeat it if running twice does no harm"
)

_NOT_ENDED: Final = frozenset({"starting", "running"})
_NOT_RUN: Final = "Nothing was run, so you can repeat the submit"


class SubmissionBase:
    """Base of both APIs' one-shot jobs; every method except `launch` returns the job itself.

    A numpy scalar is passed by value, like the arguments in `KernelArgs`. A buffer of bytes is copied to the card, and
    the kernel gets a pointer to it. If the image is PTX, a float for an integer parameter, or the reverse, raises
    LaunchFailed before the kernel starts.
    """

    def __init__(self, kernel: str, image: Image) -> None:
        self._kernel = kernel_name(kernel, "submit")
        self._image = image_of(image, "submit")
        self._grid = self._block = (1, 1, 1)
        self._shared_bytes = 0
        self._arguments: list[SubmitArgument] = []
        self._types: dict[int, ParameterType] = {}
        self._output_bytes = 0
        self._timeout_ms: int | None = None

    def grid(self, blocks: Sequence[int]) -> Self:
        """Set the number of blocks in one to three dimensions; one block if this is not called."""
        self._grid = dimensions(self._kernel, "grid", blocks)
        return self

    def block(self, threads: Sequence[int]) -> Self:
        """Set the number of threads in one to three dimensions; one thread if this is not called."""
        self._block = dimensions(self._kernel, "block", threads)
        return self

    def shared_bytes(self, size_bytes: int) -> Self:
        """Set the dynamic shared memory per block, in bytes; 0 if this is not called."""
        self._shared_bytes = whole(size_bytes, "shared_bytes", least=0, most=MAX_U32)
        return self

    def arg(self, data: Any) -> Self:
        """Add an argument: bytes that the kernel reads (bytes, an array), or a number with a size (np.uint32(7)).

        Raises InvalidRequest for a Python number, which has no size.
        """
        try:
            # A scalar's buffer has no dimensions; any other buffer is a sequence of bytes.
            is_value = view_of(data).ndim == 0
        except (TypeError, ValueError):
            hint = "Numbers need a size: np.uint32(n), or .args(KernelArgs().push_u32(n))"
            raise InvalidRequest(f"arg: it must be bytes, or a number with a size, not {quoted(data)}", hint) from None
        return self.args([data]) if is_value else self._push(ArgumentKind.INPUT, data)

    def args(self, args: KernelArgs | list[Any] | tuple[Any, ...]) -> Self:
        """Add several arguments, numbers and raw bytes, in the forms that a launch accepts.

        Raises InvalidRequest for buffers.
        """
        if isinstance(args, list | tuple):
            args = pack_listed(args, why_undeclared="the image of a submit is not inspected before it is sent")
        if not isinstance(args, KernelArgs) or args.buffers:
            hint = "A submit has a separate context: pass the bytes with .arg(data)"
            raise InvalidRequest("args: a submit must have KernelArgs without buffers of a session", hint)
        at = 0
        # Split the packed bytes into arguments, because a job sends each with its own length.
        for kind, size in zip(args.kinds, args.sizes, strict=True):
            self._types[len(self._arguments)] = type_of(kind)
            self._push(ArgumentKind.VALUE, args.data[at : at + size])
            at += size
        return self

    def out(self, size_bytes: int) -> Self:
        """Add an output argument of `size_bytes` zeros; `launch` returns its bytes."""
        # The worker makes the zeroed bytes, so none are sent.
        size = whole(size_bytes, "out: size_bytes", least=1, most=MAX_SUBMIT_OUTPUT_BYTES)
        return self._add(SubmitArgument(ArgumentKind.OUTPUT, size, b""), size)

    def inout(self, data: Any) -> Self:
        """Add an argument that the kernel reads and writes; `launch` returns its bytes."""
        return self._push(ArgumentKind.INOUT, data)

    def timeout_secs(self, seconds: float) -> Self:
        """Set how many seconds the job may take once its context exists; by default it may run until the lease ends."""
        self._timeout_ms = milliseconds(seconds, "timeout_secs", least_ms=1)
        return self

    def _push(self, kind: ArgumentKind, data: Any) -> Self:
        # Copy the bytes now, because the program may change them before the job runs.
        view = readable_view(data, "arg")
        # Check the size first: flattening a view that is not contiguous copies it.
        if view.nbytes > MAX_PAYLOAD_BYTES:
            raise _too_large(view.nbytes)
        raw = bytes(flattened(view))
        if not raw:
            raise InvalidRequest(f"argument {len(self._arguments)} must be at least one byte, not none")
        return self._add(SubmitArgument(kind, 0, raw), len(raw) if kind is ArgumentKind.INOUT else 0)

    def _add(self, argument: SubmitArgument, output_bytes: int) -> Self:
        if len(self._arguments) >= MAX_SUBMIT_ARGUMENTS:
            raise InvalidRequest(f"a submit must have at most {MAX_SUBMIT_ARGUMENTS} arguments")
        # Outputs come back in one frame.
        if self._output_bytes + output_bytes > MAX_SUBMIT_OUTPUT_BYTES:
            hint = "Use a session for more, which can read its buffers in pieces"
            raise InvalidRequest(f"a submit's outputs must have at most {MAX_SUBMIT_OUTPUT_BYTES} bytes together", hint)
        self._output_bytes += output_bytes
        self._arguments.append(argument)
        return self

    def _body(self) -> SubmitRun:
        return SubmitRun(
            self._kernel, *self._grid, *self._block, self._shared_bytes, tuple(self._arguments), self._image
        )

    def _typed(self, body: SubmitRun) -> SubmitRun:
        """Add the values' types to the body, for a daemon that compares them with the image's."""
        types = [self._types.get(index, ParameterType.UNTOLD) for index in range(len(body.arguments))]
        pairs = zip(body.arguments, types, strict=True)
        return replace(
            body,
            arguments=tuple(replace(a, kind=TYPED_VALUE + type_code) if type_code else a for a, type_code in pairs),
        )

    def _run_on(self, lease: LeaseHandle) -> Procedure[list[bytes]]:
        """Run the job; returns the outputs in the order of their arguments."""
        if lease.end_failure is not None:
            raise error_of(lease.end_failure, "submit")
        # If `timeout_secs` was not called, the job may run until the end of the lease.
        limit_s = lease.remaining_s if self._timeout_ms is None else self._timeout_ms / 1000
        # Check the size before anything is sent, so that the error names this program's mistake.
        body = self._body()
        _check_size(body)
        timeout_ms = milliseconds(max(limit_s, 0.001), "timeout_secs", least_ms=1)
        return (yield from _run(lease, body, self._typed(body), GpuSubmit(timeout_ms, _options(lease)), limit_s))

    def _run_by(self, address: Address, token: bytes, lock: Any) -> Procedure[list[bytes]]:
        """Run the job on another tenant's lease; returns the outputs in the order of their arguments."""
        lease = yield from by_token(address, token, lock)
        try:
            return (yield from self._run_on(lease))
        finally:
            lease.channel.close()


def _options(lease: LeaseHandle) -> tuple[Tlv, ...]:
    return (Tlv(AttachOption.TOKEN, lease.token),) if lease.token else ()


def _check_size(body: SubmitRun) -> None:
    """Raise InvalidRequest if the body does not fit into one frame."""
    data_bytes = sum(ARGUMENT_FIXED_BYTES + len(argument.data) for argument in body.arguments)
    size_bytes = RUN_FIXED_BYTES + len(body.kernel.encode()) + data_bytes + len(body.image)
    if size_bytes > MAX_PAYLOAD_BYTES:
        raise _too_large(size_bytes)


def _too_large(size_bytes: int) -> InvalidRequest:
    return InvalidRequest(
        f"submit: image and arguments must have at most {MAX_PAYLOAD_BYTES} bytes together, not {size_bytes}",
        "Use a session for more, which can write its buffers in pieces",
    )


def _run(
    lease: LeaseHandle, body: SubmitRun, typed: SubmitRun, opening: GpuSubmit, limit_s: float
) -> Procedure[list[bytes]]:
    """Run a job over a connection of its own; returns the outputs.

    Args:
        lease: The lease.
        body: The job.
        typed: The job with its values' types, for a daemon that accepts them.
        opening: The request that opens the job.
        limit_s: How long the job may take, in seconds.
    """
    # Open a separate connection, which carries this job only and ends with it.
    channel, _ = yield from dial(lease.address, FixedDeadline(CONNECT_LIMIT_S, "connect", lease.address))
    number: int | None = None
    try:
        deadline = FixedDeadline(READY_LIMIT_S, "submit", lease.address)
        # Step 1: GPU_SUBMIT waits for the job before it, and makes the context. Until its reply nothing has run.
        opened = yield from answer_to(channel, Opcode.GPU_SUBMIT, opening, deadline, lease.grant.lease_id)
        if isinstance(opened, Failure):
            raise error_of(lease.note_failure(opened), "submit")
        # If the connection ends, this number identifies the job in the lease's report.
        number = _number_of(opened)
        if any(option.type == SubmitOption.TYPED_VALUES for option in opened.options):
            body = typed
        deadline = FixedDeadline(limit_s + RUN_MARGIN_S, "submit", lease.address)
        # Step 2: SUBMIT_RUN runs the kernel. If the connection ends from here on, the kernel may have run.
        done = yield from answer_to(channel, Opcode.SUBMIT_RUN, body, deadline, lease.grant.lease_id)
        if isinstance(done, SubmitDone):
            return list(done.outputs)
        raise error_of(lease.note_failure(done), "submit", own_requests=(channel.link.connection.last_request_id,))
    except LinkEnded as ended:
        failure, is_explained = ended.failure, channel.link.received_goodbye
    finally:
        channel.close()
    # Raise this outside the except block, so that the tenant's traceback shows one error, not two.
    raise (yield from _end_error(lease, failure, number, is_explained=is_explained))


def _number_of(opened: AttachReply) -> int:
    """Return the job's number; -1 if the daemon does not report one."""
    numbers = [option.value for option in opened.options if option.type == SubmitOption.NUMBER]
    return int.from_bytes(numbers[0], "big") if numbers else -1


def _end_error(
    lease: LeaseHandle, failure: Failure, number: int | None, *, is_explained: bool
) -> Procedure[GpuLeaseError]:
    """Return the error of a job whose connection ended without a reply.

    Args:
        lease: The lease.
        failure: How the connection ended.
        number: The job's number; None if it never started.
        is_explained: Whether the peer sent a goodbye with the reason.
    """
    hint = _NOT_RUN if number is None else MAY_HAVE_RUN
    # A goodbye has the reason. The hint about repeating makes sense only if the lease has not ended.
    if is_explained:
        noted = lease.note_failure(failure)
        is_lease_over = noted.status in LEASE_OVER or noted.status is Status.TIMED_OUT
        return error_of(noted if is_lease_over else replace(noted, hint=hint), "submit")
    # The daemon may find out why the connection ended only a moment later, so query the lease until it has.
    deadline_s = time.monotonic() + END_REASON_WAIT_S
    reason = failure.message
    try:
        while True:
            report = yield from lease.query()
            # The lease's end explains more than the submit's, so report it first.
            lease_end, submit = end_reason_of(report), _submit_in(report, number)
            if lease_end is not None:
                lease.end_failure = lease_end
                return error_of(lease_end, "submit")
            if submit is not None and submit.get("timed_out"):
                return TimedOut(f"submit: {submit.get('reason')}")
            if submit is None or submit.get("state", "ending") not in _NOT_ENDED or time.monotonic() > deadline_s:
                break
            yield Sleep(END_REASON_POLL_S)
    except Disconnected as error:
        return Disconnected(f"submit: {reason}; then {error.message}", hint)
    except GpuLeaseError as error:
        return error
    if submit is not None and submit.get("reason"):
        reason = f"{reason}: {submit['reason']}"
    return Disconnected(f"submit: {reason}, but its lease is still active", hint)


def _submit_in(report: LeaseReport, number: int | None) -> SubmitReport | None:
    """Return the job with that number from a lease's report; None if the report has no such job."""
    submits = (report.get("submit"), report.get("last_submit"))
    return next((submit for submit in submits if submit is not None and submit["number"] == number), None)
