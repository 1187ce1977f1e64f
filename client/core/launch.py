"""A session's launches: checked once per kernel, shape and argument sizes, then sent from a template."""

import struct
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Final, Protocol

from gpulease.client.core.operations import RequestPipeline
from gpulease.client.core.refused_regions import RefusedRegions
from gpulease.client.core.region_sets import RegionSet, regions_named
from gpulease.client.core.streams import StreamHandle, Streams
from gpulease.client.core.waits import MaybePending
from gpulease.client.errors import GpuLeaseError, InvalidHandle, InvalidRequest, LaunchFailed
from gpulease.client.handles import Buffer, Module
from gpulease.client.kernel_args import MATCH_HINT, ArgumentKind, KernelArgs, mismatch, pack_listed, sizes_of
from gpulease.client.memory_views import view_of
from gpulease.client.numbers import integer
from gpulease.client.texts import kernel_name, quoted
from gpulease.protocol import Failure, Opcode, ProtocolError, Status
from gpulease.protocol.errors import FramingError
from gpulease.protocol.fastpath import REGIONS, LaunchTemplate
from gpulease.protocol.limits import MAX_ARGUMENT_BYTES
from gpulease.protocol.messages import KernelEntry, Launch
from gpulease.protocol.opcodes import LaunchFlag, ParameterType

MAX_TEMPLATES: Final = 1024
"""Maximum number of launch templates in a module's cache, about half a kilobyte each. Stops a program that never uses
the same grid twice from filling memory: at this number all are dropped."""

MAX_U32: Final = 2**32 - 1
"""Largest dimension of a grid or block that fits the wire's u32."""

MAX_LISTED_KERNELS: Final = 16
"""Maximum number of kernels that a message lists; it states how many more there are."""

KernelArguments = KernelArgs | bytes | bytearray | memoryview | list[Any] | tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class LaunchAttributes:
    """The attributes of a launch, without its shape.

    Attributes:
        cooperative: Whether all blocks run at the same time, so that they may wait for each other.
        cluster: Size of a cluster of neighbouring blocks that run together, in one to three dimensions; None for no
            clusters.
    """

    cooperative: bool
    cluster: Sequence[int] | None

    def trailer(self, kernel: str) -> tuple[int, int, int, int]:
        """The integers at the end of a LAUNCH_WITH, after the regions. Raises LaunchFailed."""
        cluster = () if self.cluster is None else dimensions(kernel, "cluster", self.cluster)
        return (LaunchFlag.COOPERATIVE if self.cooperative else 0, *(cluster or (0, 0, 0)))


class LaunchCommands(Protocol):
    """The launch operations, which both a session and a recording implement."""

    def launch(
        self,
        module: Module,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        args: KernelArguments,
        arg_sizes: Iterable[int] | None,
        shared_bytes: int,
        stream: StreamHandle | None = None,
    ) -> MaybePending[int]:
        """Launch a kernel, under the session's lock; the result is the launch's number."""

    def launch_in(
        self,
        regions: RegionSet,
        position: int,
        module: Module,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        args: KernelArguments,
        arg_sizes: Iterable[int] | None,
        shared_bytes: int,
        stream: StreamHandle | None = None,
    ) -> MaybePending[int]:
        """Launch a kernel, but only if no region of the set has ended or is cancelled."""

    def launch_with(
        self,
        attributes: LaunchAttributes,
        regions: RegionSet | None,
        position: int,
        module: Module,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        args: KernelArguments,
        arg_sizes: Iterable[int] | None,
        shared_bytes: int,
        stream: StreamHandle | None = None,
    ) -> MaybePending[int]:
        """Launch a kernel with attributes. If `regions` is given, the condition of `launch_in` applies."""


class _LatestLaunch:
    """A module's last launch that was checked and sent. A later launch like this one is not checked again.

    A sequence that the caller may change is stored as a copy and compared by value, because identity proves equality
    only for immutable objects.
    """

    __slots__ = ("block", "block_type", "grid", "grid_type", "kernel", "kinds", "shared_bytes", "template")

    def __init__(
        self,
        template: LaunchTemplate,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        kinds: tuple[ArgumentKind, ...],
        shared_bytes: int,
    ) -> None:
        self.template = template
        self.kernel = kernel
        self.grid_type, self.block_type = type(grid), type(block)
        self.grid = grid if self.grid_type is tuple else copy(grid)
        self.block = block if self.block_type is tuple else copy(block)
        self.kinds = kinds
        self.shared_bytes = shared_bytes


class Launches(LaunchCommands):
    """Sends a session's launches, each by the fastest possible of three paths.

    A launch like the module's last one is sent at once, from the same template. If only an older template fits, the
    values that may have changed are checked. Any other launch is checked completely, and gets a template.
    """

    def __init__(self, operations: RequestPipeline, streams: Streams, refused: RefusedRegions) -> None:
        self._attachment = operations.attachment
        self._refused = refused
        self._streams = streams

    def launch(
        self,
        module: Module,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        args: KernelArguments,
        arg_sizes: Iterable[int] | None,
        shared_bytes: int,
        stream: StreamHandle | None = None,
    ) -> MaybePending[int]:
        """Send a launch immediately, under the session's lock; the result is the launch's number.

        A launch like the module's last one is checked and sent inside this function, because another call or a
        generator would double the cost. Any other launch, and any error, is left to `_launch_in_full`.
        """
        attachment = self._attachment
        try:
            # In one expression, check everything that may have changed since the module's last launch. After a
            # mismatch, or at the module's first launch, use the general path below.
            latest = module.latest
            if (
                kernel == latest.kernel
                and type(args) is KernelArgs
                and args.kinds == latest.kinds
                and (grid is latest.grid or (type(grid) is latest.grid_type and grid == latest.grid))
                and (block is latest.block or (type(block) is latest.block_type and block == latest.block))
                and shared_bytes == latest.shared_bytes
                and arg_sizes is None
                and module.owner is attachment
                and attachment.end is None
                and attachment.lease.end_failure is None
                and not attachment.lease_word[0]
                and not attachment.dropped
                and not self._streams.selected
                and stream is None
            ):
                # Each buffer must still be this session's: a freed one has no owner.
                for buffer in args.buffers:
                    if buffer.owner is not attachment:
                        break
                else:
                    # Only the request id and the argument bytes must be written into the template's frame.
                    template, connection = latest.template, attachment.connection
                    number = connection.last_request_id = connection.last_request_id + 1
                    if attachment.writer.put_packed(
                        template.layout, template.head, number, template.before, args.data, template.after
                    ):
                        return number
        except (AttributeError, TypeError, ValueError, OSError, FramingError):
            pass  # a wrong type, the first launch, or the peer is gone: the general path handles it
        # Raise the error of an end here: a tenant waits for it, and each function that it passes through takes time.
        if (ended := attachment.end_error_now("launch")) is not None:
            raise ended
        try:
            return self._launch_in_full(module, kernel, grid, block, args, arg_sizes, shared_bytes, stream)
        except GpuLeaseError as error:
            raise error.with_traceback(None)  # noqa: B904  # so that the traceback begins at the caller's line

    def _launch_in_full(
        self,
        module: Module,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        args: KernelArguments,
        arg_sizes: Iterable[int] | None,
        shared_bytes: int,
        stream: StreamHandle | None,
    ) -> MaybePending[int]:
        number, frame = self.frame(module, kernel, grid, block, args, arg_sizes, shared_bytes)
        return self._streams.hand_over(stream, number, frame, "launch")

    def launch_in(
        self,
        regions: RegionSet,
        position: int,
        module: Module,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        args: KernelArguments,
        arg_sizes: Iterable[int] | None,
        shared_bytes: int,
        stream: StreamHandle | None = None,
    ) -> MaybePending[int]:
        """Send a launch in regions immediately, under the session's lock; the result is the launch's number."""
        attachment = self._attachment
        # This is the same fast path as in `launch`, for a set with all regions active. Read the words last: a launch in
        # a region that has just ended is refused without the checks of the general path, which would pass.
        try:
            latest = module.latest_in
            if (
                kernel == latest.kernel
                and type(args) is KernelArgs
                and args.kinds == latest.kinds
                and (grid is latest.grid or (type(grid) is latest.grid_type and grid == latest.grid))
                and (block is latest.block or (type(block) is latest.block_type and block == latest.block))
                and shared_bytes == latest.shared_bytes
                and arg_sizes is None
                and stream is None
                and type(regions) is RegionSet
                and type(position) is int
                and module.owner is regions.owner is attachment
                and attachment.end is None
                and attachment.lease.end_failure is None
                and not attachment.lease_word[0]
                and not attachment.dropped
                and not self._streams.selected
                and (
                    regions.epoch == attachment.regions_epoch[0]
                    or self._refused.check_set(regions, position, kernel, f"launch of {quoted(kernel)}")
                )
            ):
                for buffer in args.buffers:
                    if buffer.owner is not attachment:
                        break
                else:
                    template, connection = latest.template, attachment.connection
                    after = template.after + REGIONS.pack(regions.handle, position)
                    number = connection.last_request_id = connection.last_request_id + 1
                    if attachment.writer.put_packed(
                        template.joined, template.head, number, template.before, args.data, after
                    ):
                        return number
        except GpuLeaseError as error:
            raise error.with_traceback(None)  # noqa: B904  # a region's refusal, as below
        except (AttributeError, TypeError, ValueError, OSError, FramingError, struct.error):
            pass  # a wrong type or value, the first launch, or the peer is gone: the general path handles it
        try:
            # The general path: make each check separately, with its own error, and then check the region set against
            # the session's words.
            attachment.check_open("launch")
            operation = f"launch of {quoted(kernel)}"
            named = regions_named(regions, position, attachment, operation)
            are_active = self._refused.check_set(regions, position, kernel, operation)
            args = packed_if_listed(module, kernel, args)
            template, data = self._prepared(
                Opcode.LAUNCH_IN, module, kernel, grid, block, args, arg_sizes, shared_bytes
            )
            if isinstance(args, KernelArgs):
                module.latest_in = _LatestLaunch(template, kernel, grid, block, args.kinds, shared_bytes)
            number = attachment.connection.next_request_id()
            pending = self._streams.hand_over(stream, number, template.frame(number, data, *named), "launch")
            # A region may have ended: the worker has to confirm the launch.
            return pending if are_active else self._refused.confirmed(pending, operation)
        except GpuLeaseError as error:
            raise error.with_traceback(None)  # noqa: B904  # so that the traceback begins at the caller's line

    def launch_with(
        self,
        attributes: LaunchAttributes,
        regions: RegionSet | None,
        position: int,
        module: Module,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        args: KernelArguments,
        arg_sizes: Iterable[int] | None,
        shared_bytes: int,
        stream: StreamHandle | None = None,
    ) -> MaybePending[int]:
        """Send a launch with attributes immediately, under the session's lock; the result is the launch's number."""
        attachment = self._attachment
        attachment.check_open("launch")
        attachment.require(Opcode.LAUNCH_WITH, "launch")
        operation, are_active = f"launch of {quoted(kernel)}", True
        # (0, 0) names no region set.
        named = (0, 0)
        if regions is not None:
            named = regions_named(regions, position, attachment, operation)
            are_active = self._refused.check_set(regions, position, kernel, operation)
        args = packed_if_listed(module, kernel, args)
        template, data = self._prepared(Opcode.LAUNCH_WITH, module, kernel, grid, block, args, arg_sizes, shared_bytes)
        trailer = (*named, *attributes.trailer(kernel))
        number = attachment.connection.next_request_id()
        pending = self._streams.hand_over(stream, number, template.frame(number, data, *trailer), "launch")
        return pending if are_active else self._refused.confirmed(pending, operation)

    def frame(
        self,
        module: Module,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        args: KernelArguments,
        arg_sizes: Iterable[int] | None,
        shared_bytes: int,
    ) -> tuple[int, bytes]:
        """Check a launch. Returns the request id and frame of its quiet request.

        Raises LaunchFailed, InvalidHandle or InvalidRequest.
        """
        args = packed_if_listed(module, kernel, args)
        template, data = self._prepared(Opcode.LAUNCH, module, kernel, grid, block, args, arg_sizes, shared_bytes)
        # Only KernelArgs can be compared cheaply with those of the next launch; raw bytes take this path each time.
        if isinstance(args, KernelArgs):
            module.latest = _LatestLaunch(template, kernel, grid, block, args.kinds, shared_bytes)
        request_id = self._attachment.connection.next_request_id()
        return request_id, template.frame(request_id, data)

    def _prepared(
        self,
        op: Opcode,
        module: Module,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        args: KernelArgs | bytes | bytearray | memoryview,
        arg_sizes: Iterable[int] | None,
        shared_bytes: int,
    ) -> tuple[LaunchTemplate, bytes]:
        """Check a launch. Returns its template and its argument bytes."""
        attachment = self._attachment
        buffers: tuple[Buffer, ...]
        kinds: tuple[ArgumentKind, ...]
        # The arguments in one form: bytes, kinds and buffers.
        if isinstance(args, KernelArgs) and arg_sizes is None:
            data, kinds, buffers = args.data, args.kinds, args.buffers
        else:
            data, kinds, buffers = _raw(kernel, args, arg_sizes)
        template = self._template(op, module, kernel, grid, block, kinds, shared_bytes)
        # Check again what may have changed since the template was made: whether module and buffers are still this
        # session's.
        self._check_owner(module, kernel)
        for buffer in buffers:
            if buffer.owner is not attachment:
                buffer.check(attachment, f"launch of {kernel!r}")
        if len(data) != template.args_bytes:
            raise _failed(
                kernel, f"the arguments have {len(data)} bytes, but the sum of their sizes is {template.args_bytes}"
            )
        return template, data

    def _template(
        self,
        op: Opcode,
        module: Module,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        kinds: tuple[ArgumentKind, ...],
        shared_bytes: int,
    ) -> LaunchTemplate:
        try:
            # The second path: launches with this kernel, shape and argument sizes were checked before.
            cached = module.templates.get((op, kernel, tuple(grid), tuple(block), shared_bytes, kinds))
        except (TypeError, AttributeError):
            cached = None  # a wrong type: the checks below report it
        if cached is not None:
            return cached
        if not isinstance(module, Module):
            raise InvalidHandle(f"launch of {quoted(kernel)}: the module must be a Module, not {quoted(module)}")
        self._check_owner(module, kernel)
        if self._attachment.held:
            # A kernel's first launch may need memory.
            self._streams.operations.give_back_at_once()
        try:
            # The third path: check everything, and keep the result as a template.
            launch = _checked(module, kernel, grid, block, kinds, shared_bytes)
            template = LaunchTemplate(launch, self._attachment.session_id, op)
        except ProtocolError as error:
            raise _failed(kernel, str(error)) from None
        # Drop all templates. A program with that many shapes rarely repeats an old one, so it would not help to keep
        # some.
        if len(module.templates) >= MAX_TEMPLATES:
            module.templates.clear()
        module.templates[op, kernel, tuple(grid), tuple(block), shared_bytes, kinds] = template
        return template

    def _check_owner(self, module: Module, kernel: str) -> None:
        if module.owner is not self._attachment:
            reason = "is unloaded" if module.owner is None else "belongs to another session"
            raise _failed(kernel, f"the module {reason}", "Load it in this session with module_load()")


def _checked(
    module: Module,
    kernel: str,
    grid: Sequence[int],
    block: Sequence[int],
    kinds: tuple[ArgumentKind, ...],
    shared_bytes: int,
) -> Launch:
    """Check a launch completely. Returns its message, with blank arguments. Raises LaunchFailed or InvalidRequest."""
    # Step 1: the kernel, and the number, sizes and kinds of its arguments.
    entry = _entry(module, kernel)
    sizes = sizes_of(kinds)
    _check_sizes(entry, sizes)
    _check_kinds(entry, kinds, module.parameter_types.get(kernel, ()))
    # Step 2: the shape, against the wire's limits and the kernel's own.
    full_grid = dimensions(kernel, "grid", grid)
    full_block = dimensions(kernel, "block", block)
    threads = full_block[0] * full_block[1] * full_block[2]
    if entry.max_threads_per_block and threads > entry.max_threads_per_block:
        raise _failed(
            kernel,
            f"a block of {threads} threads was requested; the kernel allows at most {entry.max_threads_per_block}",
        )
    if not isinstance(shared_bytes, int) or isinstance(shared_bytes, bool) or not 0 <= shared_bytes <= MAX_U32:
        raise _failed(kernel, f"shared_bytes must be an integer from 0 to {MAX_U32}, not {quoted(shared_bytes)}")
    # Step 3: the message with blank arguments, which each launch replaces. If they exceed the limit, one byte over the
    # limit is enough to cause the error.
    blank = bytes(min(sum(sizes), MAX_ARGUMENT_BYTES + 1))
    return Launch(module.handle, kernel, *full_grid, *full_block, shared_bytes, blank, sizes)


def _entry(module: Module, kernel: str) -> KernelEntry:
    """Return a kernel of a module. Raises LaunchFailed if it has no such kernel, InvalidRequest for an invalid name."""
    entry = module.kernels.get(kernel_name(kernel, "launch"))
    if entry is None:
        raise _failed(kernel, f"the module has no such kernel; it has {_listed(module)}")
    return entry


def packed_if_listed(module: Module, kernel: str, args: KernelArguments) -> KernelArgs | bytes | bytearray | memoryview:
    """Pack a list of arguments as KernelArgs; return other forms unchanged.

    Raises the errors of `pack_listed`, or LaunchFailed if one of them is due to a wrong number of arguments.
    """
    if not isinstance(args, list | tuple):
        return args
    entry: KernelEntry | None = None
    types: tuple[ParameterType, ...] = ()
    if isinstance(module, Module):
        # Check the name first: the types of the arguments depend on it.
        entry = _entry(module, kernel)
        types = module.parameter_types.get(entry.name, ())
    try:
        return pack_listed(args, types)
    except (LaunchFailed, InvalidRequest, InvalidHandle) as error:
        # A missing or additional argument shifts the others to parameters of other types: report the number instead.
        if entry is not None and len(args) != len(entry.parameter_sizes):
            raise _wrong_number(entry, len(args)) from None
        if isinstance(error, LaunchFailed):
            raise _failed(kernel, error.message, error.hint) from None
        raise type(error)(f"launch of {quoted(kernel)}: {error.message}", error.hint) from None


def dimensions(kernel: str, subject: str, lengths: Any) -> tuple[int, int, int]:
    """Complete a grid, block or cluster of one to three numbers to three.

    Args:
        kernel: The kernel, for messages.
        subject: "grid", "block" or "cluster", for messages.
        lengths: The program's value.

    Raises LaunchFailed.
    """
    try:
        numbers = [integer(item) for item in lengths]
    except TypeError:
        is_integer = hasattr(lengths, "__index__") and not isinstance(lengths, bool)
        hint = f"Write [{quoted(lengths)}]" if is_integer else ""
        raise _failed(kernel, f"the {subject} must be a sequence of integers, not {quoted(lengths)}", hint) from None
    if not 1 <= len(numbers) <= 3:
        raise _failed(kernel, f"the {subject} must have 1 to 3 dimensions, not {len(numbers)}: {quoted(lengths)}")
    for number in numbers:
        if not 1 <= number <= MAX_U32:
            raise _failed(
                kernel, f"the {subject}'s numbers must be from 1 to {MAX_U32}, not {quoted(number)}: {quoted(lengths)}"
            )
    # Missing dimensions are 1, as in CUDA.
    x, y, z = (*numbers, 1, 1)[:3]
    return x, y, z


def _raw(
    kernel: str, args: KernelArgs | bytes | bytearray | memoryview, arg_sizes: Iterable[int] | None
) -> tuple[bytes, tuple[ArgumentKind, ...], tuple[Buffer, ...]]:
    # KernelArgs come here only if the caller also gave arg_sizes, but they contain their sizes.
    if isinstance(args, KernelArgs):
        raise InvalidRequest(
            f"launch of {quoted(kernel)}: arg_sizes must be left out, unless the arguments are raw bytes: "
            "KernelArgs and lists contain their sizes"
        )
    if arg_sizes is None:
        raise InvalidRequest(
            f"launch of {quoted(kernel)}: arguments that are raw bytes need arg_sizes, the size of each argument"
        )
    try:
        return bytes(view_of(args)), tuple(integer(size) for size in arg_sizes), ()
    except (TypeError, ValueError):
        raise InvalidRequest(
            f"launch of {quoted(kernel)}: the arguments must be KernelArgs, a list, or bytes with arg_sizes"
        ) from None


def _wrong_number(entry: KernelEntry, given: int) -> LaunchFailed:
    expected = len(entry.parameter_sizes)
    return _failed(entry.name, f"{given} arguments were given, but the kernel has {expected} parameters")


def _check_sizes(entry: KernelEntry, sizes: tuple[int, ...]) -> None:
    if len(sizes) != len(entry.parameter_sizes):
        raise _wrong_number(entry, len(sizes))
    for index, (size, parameter) in enumerate(zip(sizes, entry.parameter_sizes, strict=True)):
        if size != parameter:
            raise _failed(
                entry.name, f"argument {index} has {quoted(size)} bytes, but the kernel's parameter has {parameter}"
            )


def _check_kinds(entry: KernelEntry, kinds: tuple[ArgumentKind, ...], types: tuple[ParameterType, ...]) -> None:
    # Types are known only for PTX; for a cubin only the sizes were compared.
    for index, (kind, declared) in enumerate(zip(kinds, types, strict=False)):
        if mismatch(kind, declared):
            actual = "a buffer" if kind == "buffer" else f"{'an' if str(kind)[0] in 'if' else 'a'} {kind}"
            raise _failed(
                entry.name,
                f"argument {index} is {actual}, but the kernel's parameter is {declared.text}",
                MATCH_HINT,
            )


def _listed(module: Module) -> str:
    names = sorted(module.kernels)
    omitted = f" and {len(names) - MAX_LISTED_KERNELS} more" if len(names) > MAX_LISTED_KERNELS else ""
    return ", ".join(names[:MAX_LISTED_KERNELS]) + omitted or "none"


def _failed(kernel: str, reason: str, hint: str = "") -> LaunchFailed:
    message = f"launch of {quoted(kernel)}: {reason}"
    return LaunchFailed(message, hint, Failure(Status.LAUNCH_FAILED, message, hint, kernel=str(kernel)))
