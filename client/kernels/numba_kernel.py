"""Numba's CUDA kernels as launches: the signature of a call's arguments, the PTX for it, and the packed arguments.

Numba's own compiler runs, for a named target instead of the process's card, so no driver is needed. It also compiles
the device functions that a kernel calls. NVRTC compiles those that numba has as CUDA C (for float16).

Arguments are laid out as in numba-cuda's dispatcher (`_prepare_args`): an array is null, null, the number of elements,
the item size, the address, the shape and the strides, each in 8 bytes.
"""

import re
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from gpulease.client.array_layout import ArrayView
from gpulease.client.errors import InvalidRequest, LaunchFailed, Unsupported
from gpulease.client.handles import Buffer, Handle
from gpulease.client.kernel_args import KernelArgs
from gpulease.client.kernels.cuda_c import ptx_of
from gpulease.client.kernels.joined_ptx import joined, undefined
from gpulease.client.kernels.prepared_launch import MAX_VARIANTS, CompiledKernel, PreparedLaunch, launch_failed
from gpulease.client.kernels.toolchain import checked_arch, compile_error, missing
from gpulease.client.numbers import integer
from gpulease.client.texts import quoted
from gpulease.protocol.fast_dataclass import dataclass

Signature = str | tuple[Any, ...]

_ENTRY: Final = re.compile(r"\.visible\s+\.entry\s+([\w$]+)")

_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")

_PASSED_ON: Final = ("debug", "lineinfo", "fastmath", "opt", "launch_bounds")
"""Options of `@cuda.jit` that numba's PTX compiler also accepts."""

_REFUSED: Final = ("link", "extensions")
"""Options of `@cuda.jit` that need numba's own linker or dispatcher. `lto` is not among them: it only changes speed,
and numba sets it by itself if nvJitLink is installed."""


@dataclass(frozen=True, slots=True)
class _NamedDevice:
    """Replaces the process's card when numba asks for the target of a device function."""

    compute_capability: tuple[int, int]


@contextmanager
def _device_functions_for(arch: tuple[int, int]) -> Iterator[None]:
    """Let numba compile device functions for an architecture while this thread is in the block.

    Numba's dispatcher (`compile_device`) asks the driver for the card, and has no parameter for it.
    """
    from numba.cuda import dispatcher
    from numba.cuda.core.compiler_lock import global_compiler_lock

    named, thread = _NamedDevice(arch), threading.get_ident()
    with global_compiler_lock:
        ask_driver = dispatcher.get_current_device
        # Another thread may ask for the card without holding the lock, and gets the driver's answer.
        dispatcher.get_current_device = lambda: named if threading.get_ident() == thread else ask_driver()
        try:
            yield
        finally:
            dispatcher.get_current_device = ask_driver


NVRTC_MAJOR: Final = "13"
"""Major version of NVRTC, which the extra pins. numba-cuda has a folder of headers for each major version."""


class NumbaKernel:
    """A `@numba.cuda.jit` function, or a plain one, compiled for each signature that its calls have."""

    def __init__(self, function: Any, types: Signature | None = None, arch: int | None = None) -> None:
        """Check the function.

        Args:
            function: A result of `@cuda.jit`, or a Python function.
            types: Its signature in numba's notation, "void(float32, float32[:])"; if None, each call's arguments
                determine it.
            arch: The compute capability to compile for; DEFAULT_ARCH if None.

        Raises:
            InvalidRequest: This is not such a function, or numba does not support the types.
            Unsupported: Numba or a CUDA library that it needs is not installed, or an option needs numba's linker.
        """
        try:
            # Import numba only here, because that takes seconds, and most programs do not need it.
            import numba
            import numba.cuda.core  # only numba-cuda, NVIDIA's package, has it; numba alone has an older compiler
            from numba import cuda
            from numba.core import sigutils
        except ImportError as error:
            raise missing("numba-cuda" if "numba.cuda" in str(error) else "Numba", "numba") from None
        self._numba, self._cuda, self._types = numba, cuda, numba.types
        # Take the Python function inside the decorated object, which numba compiles for another target.
        self.function: Any = getattr(function, "py_func", function)
        if not callable(self.function) or not hasattr(self.function, "__code__"):
            raise InvalidRequest(f"kernel: it must be a function of Triton's or numba's, not {quoted(function)}")
        self.name: str = self.function.__name__
        # Options that numba's linker would apply can't be honoured; the others go to its compiler.
        options = dict(getattr(function, "targetoptions", None) or {})
        for name in _REFUSED:
            if options.get(name):
                raise Unsupported(f"kernel {self.name}: @cuda.jit's option {name!r} needs numba's own linker")
        self._options = {name: options[name] for name in _PASSED_ON if options.get(name) is not None}
        self._arch = divmod(checked_arch(arch), 10)
        self._declared: tuple[Any, ...] | None = None
        if types is not None:
            try:
                self._declared = tuple(sigutils.normalize_signature(types)[0])
            except Exception as error:
                # Numba evaluates the string, which can raise anything.
                raise InvalidRequest(
                    f"kernel {self.name}: types must be a signature of numba's, not {quoted(types)}: {error}"
                ) from None
        self._variants: dict[tuple[Any, ...], CompiledKernel] = {}

    def prepared(self, place: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> PreparedLaunch:
        """Implement FunctionKernel; `place` is numba's [grid, block], [.., stream] or [.., stream, shared bytes]."""
        grid, block, stream, shared_bytes = self._place(place)
        if keywords:
            raise self._failed(f"numba's kernels take no arguments by name: {', '.join(map(quoted, keywords))}")
        names = self.function.__code__.co_varnames[: self.function.__code__.co_argcount]
        if len(args) != len(names):
            raise self._failed(f"it takes {len(names)} arguments; {len(args)} were given")
        kinds = self._kinds(names, args)
        # One variant for each tuple of types, compiled on its first call.
        compiled = self._variants.get(kinds)
        if compiled is None:
            if len(self._variants) >= MAX_VARIANTS:
                self._variants.clear()
            compiled = self._variants[kinds] = self._compile(kinds)
        packed = KernelArgs()
        for name, kind, value in zip(names, kinds, args, strict=True):
            self._pack(packed, name, kind, value)
        return PreparedLaunch(compiled, grid, block, packed, shared_bytes, stream)

    def _place(self, place: Any) -> tuple[tuple[int, ...], tuple[int, ...], Handle | None, int]:
        if not isinstance(place, tuple) or not 2 <= len(place) <= 4:
            raise self._failed(f"write kernel[blocks, threads](...), not kernel[{quoted(place)}]")
        grid, block = place[:2]
        stream = place[2] if len(place) > 2 else None
        shared_bytes = place[3] if len(place) > 3 else 0
        # numba's default stream is 0.
        if stream is not None and stream != 0 and not isinstance(stream, Handle):
            raise self._failed(
                f"the stream must be one of the session's, not {quoted(stream)}", "Make one with session.stream()"
            )
        sizes = [self._sizes(dimensions) for dimensions in (grid, block)]
        (bytes_shared,) = self._sizes(shared_bytes)
        return sizes[0], sizes[1], stream or None, bytes_shared

    def _sizes(self, args: Any) -> tuple[int, ...]:
        try:
            return tuple(integer(size) for size in (args if isinstance(args, tuple | list) else (args,)))
        except TypeError:
            raise self._failed(
                f"blocks and threads must each be an integer or a tuple of them, not {quoted(args)}"
            ) from None

    # --- types ---

    def _kinds(self, names: Sequence[str], args: Sequence[Any]) -> tuple[Any, ...]:
        if self._declared is None:
            return tuple(self._kind(name, value) for name, value in zip(names, args, strict=True))
        if len(self._declared) != len(args):
            raise self._failed(f"its signature has {len(self._declared)} types, but {len(args)} arguments were given")
        for name, declared, value in zip(names, self._declared, args, strict=True):
            self._check(name, declared, value)
        return self._declared

    def _kind(self, name: str, value: Any) -> Any:
        """Return numba's type of a value. Raises LaunchFailed for a value that a kernel can't take."""
        # Layout "C" lets numba compile simpler addressing; layout "A" is correct for any strides.
        if isinstance(value, ArrayView):
            layout = "C" if value.is_contiguous else "A"
            try:
                element = self._numba.from_dtype(value.dtype)
            except self._numba.core.errors.NumbaError:
                hint = f"Numba has no type for these elements: use CUDA C, or convert {name} to float16 or float32"
                raise self._failed(f"{name} is an array of {value.dtype}", hint) from None
            return self._types.Array(element, len(value.shape), layout)
        if isinstance(value, Buffer):
            hint = f"Give an array: session.array(x), or session.zeros(shape, dtype) for {name}"
            raise self._failed(f"{name} is a buffer, whose elements have no type", hint)
        if isinstance(value, np.ndarray):
            hint = f"Copy it to the card: {name} = session.array({name})"
            raise self._failed(f"{name} is an array in host memory", hint)
        try:
            kind = self._numba.typeof(value)
        except (ValueError, TypeError):
            raise self._failed(f"{name}: a kernel can't take {quoted(value)}") from None
        self._check_packable(name, kind)
        return kind

    def _check_packable(self, name: str, kind: Any) -> None:
        # A tuple is packed member by member. Members other than numbers would need numba's own data model.
        types = self._types
        if isinstance(kind, types.BaseTuple):
            for member_kind in kind:
                self._check_packable(name, member_kind)
        elif not isinstance(kind, types.Integer | types.Float | types.Boolean | types.Complex):
            raise self._failed(f"{name}: a launch can't take {kind}")

    def _check(self, name: str, declared: Any, value: Any) -> None:
        """Raise LaunchFailed unless numba would convert the value to the declared type without loss."""
        kind = self._kind(name, value)
        if isinstance(declared, self._types.Array) != isinstance(kind, self._types.Array):
            raise self._failed(f"{name} is {kind}, but the signature declares {declared}")
        if isinstance(kind, self._types.Array):
            # An array must have the declared dtype and dimensions; layout "A" accepts any strides.
            is_like = (kind.dtype, kind.ndim) == (declared.dtype, declared.ndim)
            if not is_like or (declared.layout != "A" and declared.layout != kind.layout):
                raise self._failed(f"{name} is {kind}, but the signature declares {declared}")
            return
        ranks = [self._rank(checked) for checked in (kind, declared)]
        # A Python number has no size. Packing it shows whether it fits.
        is_narrowed = isinstance(value, np.generic) and kind.bitwidth > declared.bitwidth if ranks[1] >= 1 else False
        if ranks[0] > ranks[1] or is_narrowed:
            raise self._failed(f"{name} is {kind}, but the signature declares {declared}")

    def _rank(self, kind: Any) -> int:
        """Return the rank of a kind of number. A type accepts numbers of its own rank and below."""
        kinds = (self._types.Boolean, self._types.Integer, self._types.Float, self._types.Complex)
        return next((rank for rank, kind_of_rank in enumerate(kinds) if isinstance(kind, kind_of_rank)), len(kinds))

    # --- compiling ---

    def _compile(self, kinds: tuple[Any, ...]) -> CompiledKernel:
        from numba.cuda import compiler

        try:
            with _device_functions_for(self._arch):
                # This repeats numba's `compile_ptx`, which does not return the list of code to link.
                library, _ = compiler._compile_pyfunc_with_fixup(
                    self.function, kinds, device=False, abi="numba", cc=self._arch, **self._options
                )
                texts = library.get_asm_strs(cc=self._arch)
        except Exception as error:
            # Numba's passes raise all kinds of exceptions. The user gets one kind of error, with the full text.
            if type(error).__name__ in ("DynamicLibNotFoundError", "NvvmSupportError"):
                raise missing("CUDA's compiler library", "numba") from None
            reason = _COLOURS.sub("", f"{type(error).__name__}: {error}")
            lines = [line for line in reason.splitlines() if line.strip()]
            # If there are several lines, the first only names the compiler's step.
            raise compile_error(f"numba's kernel {self.name}", reason, lines[min(1, len(lines) - 1)]) from None
        if len(texts) > 1:
            hint = "Use lineinfo=True instead, or compile the device functions into the kernel with inline='always'"
            raise Unsupported(f"kernel {self.name}: debug=True with device functions needs numba's own linker", hint)
        text = self._linked(texts[0], library)
        match = _ENTRY.search(text)
        if match is None:
            raise compile_error(f"numba's kernel {self.name}", "numba made no kernel of it: it returns a value")
        return CompiledKernel(text, match[1], is_cooperative=bool(library.use_cooperative))

    def _linked(self, text: str, library: Any) -> str:
        """Add the functions that numba implements in CUDA C. Raises Unsupported if a function needs another linker."""
        from numba.cuda.cudadrv.linkable_code import LinkableCode

        sources = [LinkableCode.from_path_or_obj(linked) for linked in library._linking_files]
        in_c = [linked.data for linked in sources if linked.kind == "cu"]
        if in_c:
            # Compile them as one source, so that no name is defined twice. Numba brings the headers that its own
            # functions need.
            source = "\n".join(linked.decode() if isinstance(linked, bytes) else linked for linked in in_c)
            headers = Path(self._cuda.__file__).parent / "include" / NVRTC_MAJOR
            options = [f"-I{headers}", "--relocatable-device-code=true"]
            major, minor = self._arch
            text = joined(text, ptx_of(source, options, 10 * major + minor).decode())
        if lacking := undefined(text):
            raise Unsupported(
                f"kernel {self.name} calls {', '.join(lacking)}, which numba's own linker would have to add",
                "Device functions in Python and in CUDA C (cuda.CUSource) need no linker",
            )
        return text

    # --- packing ---

    def _pack(self, packed: KernelArgs, name: str, kind: Any, value: Any) -> None:
        types = self._types
        if isinstance(kind, types.Array):
            # Write numba's array struct, in which meminfo and parent are null on the device.
            packed.push_u64(0).push_u64(0).push_u64(value.size).push_u64(value.dtype.itemsize).push_buffer(value)
            for number in (*value.shape, *value.strides):
                packed.push_i64(number)
        elif isinstance(kind, types.BaseTuple):
            for member_kind, part in zip(kind, value, strict=True):
                self._pack(packed, name, member_kind, part)
        else:
            try:
                for raw in self._raw(kind, value):
                    packed.push_raw(raw)
            except (struct.error, OverflowError, ValueError):
                raise self._failed(f"{name}: {quoted(value)} does not fit {kind}") from None

    def _raw(self, kind: Any, value: Any) -> list[bytes]:
        types = self._types
        if isinstance(kind, types.Boolean):
            return [bytes([bool(value)])]
        if isinstance(kind, types.Integer):
            return [int(value).to_bytes(kind.bitwidth // 8, "little", signed=kind.signed)]
        if isinstance(kind, types.Float):
            return [struct.pack({16: "<e", 32: "<f", 64: "<d"}[kind.bitwidth], value)]
        # A complex number consists of two floats of half its width.
        number, part = complex(value), "<f" if kind.bitwidth == 64 else "<d"
        return [struct.pack(part, number.real), struct.pack(part, number.imag)]

    def _failed(self, reason: str, hint: str = "") -> LaunchFailed:
        return launch_failed(self.name, reason, hint)
