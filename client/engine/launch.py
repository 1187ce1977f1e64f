"""From a launch's arguments to its frame: all that can be checked here, once per kernel, shape and argument sizes."""

from collections.abc import Iterable, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Final

from gpulease.client.errors import InvalidHandle, InvalidRequest, LaunchFailed
from gpulease.client.handles import Buffer, Module
from gpulease.client.kernel_args import MATCH_HINT, ArgumentKind, KernelArgs, mismatch, pack_listed, sizes_of
from gpulease.client.texts import kernel_name, quoted
from gpulease.protocol import Failure, ProtocolError, Status
from gpulease.protocol.fastpath import LaunchTemplate
from gpulease.protocol.limits import MAX_ARGUMENT_BYTES
from gpulease.protocol.messages import KernelEntry, Launch
from gpulease.protocol.opcodes import ParameterType

if TYPE_CHECKING:
    from gpulease.client.engine.session import SessionCore

MAX_TEMPLATES: Final = 1024
"""Launch templates kept per module, about half a kilobyte each. A tenant whose grid is never the same twice would fill
memory otherwise; past this they are dropped and made anew."""

MAX_U32: Final = 2**32 - 1
"""What a grid's or block's dimension fits in on the wire."""

MAX_LISTED_KERNELS: Final = 16
"""Kernels a message lists before it says how many more there are."""

KernelArguments = KernelArgs | bytes | bytearray | memoryview | list[Any] | tuple[Any, ...]


class Latest:
    """A launch that was checked and sent, to know its like by.

    A sequence that its caller may change is kept as a copy, and compared; the same object is the same only where it
    can't change.
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


def launch_frame(
    session: "SessionCore",
    module: Module,
    kernel: str,
    grid: Sequence[int],
    block: Sequence[int],
    args: KernelArguments,
    arg_sizes: Iterable[int] | None,
    shared_bytes: int,
) -> tuple[int, bytes]:
    """(number, frame) of a quiet launch. Raises LaunchFailed, InvalidHandle or InvalidRequest; nothing is sent then."""
    buffers: tuple[Buffer, ...]
    kinds: tuple[ArgumentKind, ...]
    args = in_order(module, kernel, args)
    if isinstance(args, KernelArgs) and arg_sizes is None:
        data, kinds, buffers = args.data, args.kinds, args.buffers
    else:
        data, kinds, buffers = _raw(kernel, args, arg_sizes)
    template: LaunchTemplate | None
    try:
        template = module.templates.get((kernel, tuple(grid), tuple(block), shared_bytes, kinds))
    except (TypeError, AttributeError):
        template = None  # a wrong type: what is wrong with it is found out below
    if template is None:
        template = _make_template(session, module, kernel, grid, block, kinds, shared_bytes)
    # What may have changed since the template was made.
    if module.owner is not session:
        raise _foreign(session, module, kernel)
    for buffer in buffers:
        if buffer.owner is not session:
            buffer.check(session, f"launch of {kernel!r}")
    if len(data) != template.args_bytes:
        raise _failed(kernel, f"the arguments have {len(data)} bytes, their sizes add up to {template.args_bytes}")
    if isinstance(args, KernelArgs):
        module.latest = Latest(template, kernel, grid, block, kinds, shared_bytes)
    request_id = session.connection.next_request_id()
    return request_id, template.frame(request_id, data)


def _raw(
    kernel: str, args: KernelArgs | bytes | bytearray | memoryview, arg_sizes: Iterable[int] | None
) -> tuple[bytes, tuple[ArgumentKind, ...], tuple[Buffer, ...]]:
    if isinstance(args, KernelArgs):
        raise InvalidRequest(
            f"launch of {quoted(kernel)}: KernelArgs and lists know their sizes; arg_sizes is for raw bytes"
        )
    if arg_sizes is None:
        raise InvalidRequest(
            f"launch of {quoted(kernel)}: raw argument bytes need arg_sizes, the size of each argument"
        )
    try:
        return bytes(memoryview(args)), tuple(size.__index__() for size in arg_sizes), ()
    except (TypeError, AttributeError):
        raise InvalidRequest(
            f"launch of {quoted(kernel)}: arguments are KernelArgs, a list, or bytes and arg_sizes"
        ) from None


def _make_template(
    session: "SessionCore",
    module: Module,
    kernel: str,
    grid: Sequence[int],
    block: Sequence[int],
    kinds: tuple[ArgumentKind, ...],
    shared_bytes: int,
) -> LaunchTemplate:
    if not isinstance(module, Module):
        raise InvalidHandle(f"launch of {quoted(kernel)}: {quoted(module)} is not a Module")
    if module.owner is not session:
        raise _foreign(session, module, kernel)
    entry = module.kernels.get(kernel_name(kernel, "launch"))
    if entry is None:
        raise _failed(kernel, f"the module has no such kernel; it has {_listed(module)}")
    sizes = sizes_of(kinds)
    _check_sizes(entry, sizes)
    _check_kinds(entry, kinds, module.parameter_types.get(kernel, ()))
    full_grid = dimensions(kernel, "grid", grid)
    full_block = dimensions(kernel, "block", block)
    threads = full_block[0] * full_block[1] * full_block[2]
    if entry.max_threads_per_block and threads > entry.max_threads_per_block:
        raise _failed(kernel, f"a block of {threads} threads; the kernel takes at most {entry.max_threads_per_block}")
    if not isinstance(shared_bytes, int) or not 0 <= shared_bytes <= MAX_U32:
        raise _failed(kernel, f"shared_bytes of {quoted(shared_bytes)} is not an integer from 0 to {MAX_U32}")
    blank = bytes(min(sum(sizes), MAX_ARGUMENT_BYTES + 1))
    try:
        template = LaunchTemplate(
            Launch(module.handle, kernel, *full_grid, *full_block, shared_bytes, blank, sizes), session.session_id
        )
    except ProtocolError as error:
        raise _failed(kernel, str(error)) from None
    if len(module.templates) >= MAX_TEMPLATES:
        module.templates.clear()
    module.templates[kernel, tuple(grid), tuple(block), shared_bytes, kinds] = template
    return template


def _check_sizes(entry: KernelEntry, sizes: tuple[int, ...]) -> None:
    wanted = entry.parameter_sizes
    if len(sizes) != len(wanted):
        raise _failed(entry.name, f"{len(sizes)} arguments are given, the kernel has {len(wanted)} parameters")
    for index, (size, parameter) in enumerate(zip(sizes, wanted, strict=True)):
        if size != parameter:
            raise _failed(entry.name, f"argument {index} has {size!r} bytes, the kernel's parameter has {parameter}")


def _check_kinds(entry: KernelEntry, kinds: tuple[ArgumentKind, ...], types: tuple[ParameterType, ...]) -> None:
    for index, (kind, told) in enumerate(zip(kinds, types, strict=False)):
        if mismatch(kind, told):
            given = "a buffer" if kind == "buffer" else f"{'an' if str(kind)[0] in 'if' else 'a'} {kind}"
            raise _failed(
                entry.name,
                f"argument {index} is {given}, the kernel's parameter is {told.text}",
                MATCH_HINT,
            )


def in_order(module: Module, kernel: str, args: KernelArguments) -> KernelArgs | bytes | bytearray | memoryview:
    """Arguments that are a list, as KernelArgs; any others as they are. Raises what `pack_listed` does."""
    if not isinstance(args, list | tuple):
        return args
    types: tuple[ParameterType, ...] = ()
    if isinstance(module, Module) and isinstance(kernel, str):
        types = module.parameter_types.get(kernel, ())
    try:
        return pack_listed(args, types)
    except LaunchFailed as error:
        raise _failed(kernel, error.message, error.hint) from None
    except (InvalidRequest, InvalidHandle) as error:
        raise type(error)(f"launch of {quoted(kernel)}: {error.message}", error.hint) from None


def dimensions(kernel: str, what: str, given: Any) -> tuple[int, int, int]:
    """A grid or block of one to three numbers, as three. Raises LaunchFailed."""
    try:
        numbers = [item.__index__() for item in given]
    except (TypeError, AttributeError):
        raise _failed(kernel, f"{what} {quoted(given)} is not a sequence of integers") from None
    if not 1 <= len(numbers) <= 3:
        raise _failed(kernel, f"{what} {quoted(given)} has {len(numbers)} dimensions instead of 1 to 3")
    for number in numbers:
        if not 1 <= number <= MAX_U32:
            raise _failed(kernel, f"{what} {given!r}: {number} is not between 1 and {MAX_U32}")
    x, y, z = (*numbers, 1, 1)[:3]
    return x, y, z


def _listed(module: Module) -> str:
    names = sorted(module.kernels)
    more = f" and {len(names) - MAX_LISTED_KERNELS} more" if len(names) > MAX_LISTED_KERNELS else ""
    return ", ".join(names[:MAX_LISTED_KERNELS]) + more or "none"


def _foreign(session: "SessionCore", module: Module, kernel: str) -> LaunchFailed:
    why = "is unloaded" if module.owner is None else "belongs to another session"
    return _failed(kernel, f"the module {why}", "Load it in this session with module_load()")


def _failed(kernel: str, why: str, hint: str = "") -> LaunchFailed:
    message = f"launch of {quoted(kernel)}: {why}"
    return LaunchFailed(message, hint, Failure(Status.LAUNCH_FAILED, message, hint, kernel=str(kernel)))
