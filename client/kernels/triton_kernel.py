"""Triton's functions as launches: the signature of a call's arguments, the PTX for it, and the packed arguments.

Triton's own binder, compiler and disk cache run, for a named target instead of the process's card, so no driver is
needed. The cache's folder is Triton's (TRITON_CACHE_DIR).
"""

import os
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from gpulease.client.errors import InvalidRequest, LaunchFailed, Unsupported
from gpulease.client.handles import Buffer
from gpulease.client.kernel_args import KEYWORDS, KernelArgs
from gpulease.client.kernels.prepared_launch import MAX_VARIANTS, CompiledKernel, PreparedLaunch, launch_failed
from gpulease.client.kernels.toolchain import checked_arch, compile_error, missing, ptx_version_of
from gpulease.client.numbers import integer
from gpulease.client.texts import quoted

Grid = Sequence[int] | Callable[[Mapping[str, Any]], Sequence[int]]

SCRATCH_PARAMETERS: Final = 2
"""Pointers that Triton 3.9 adds after every kernel's parameters: to scratch memory, which launches here don't have."""

FUSION_VARIABLE: Final = "TRITON_DEFAULT_FP_FUSION"
"""Decides whether a*b + c is rounded once. If it is not set, Triton 3.9 fuses, and warns that the next version will
not."""

_PACKED_AS: Final = {
    "i8": "<b", "i16": "<h", "i32": "<i", "i64": "<q", "u8": "<B", "u16": "<H", "u32": "<I", "u64": "<Q",
    "u1": "<B", "i1": "<B", "fp16": "<e", "fp32": "<f", "fp64": "<d",
}  # fmt: skip


class _Pointer:
    """Takes the place of a tensor in Triton's binder."""

    def __init__(self, buffer: Buffer, offset: int, dtype: str) -> None:
        self.buffer, self.offset, self.dtype = buffer, offset, dtype

    def data_ptr(self) -> int:
        """Return the device address. Triton compiles a variant for multiples of 16."""
        return self.buffer.handle + self.offset


class TritonKernel:
    """A `@triton.jit` function, compiled for each signature that its calls have."""

    def __init__(
        self, function: Any, types: Mapping[str, str] | None = None, arch: int | None = None, cuda: int = 0
    ) -> None:
        """Check the function.

        Args:
            function: A result of `@triton.jit`.
            types: By parameter, Triton's type for plain buffers: `{"x": "*fp32"}`. Arrays need none, because they have
                dtypes.
            arch: The compute capability to compile for; DEFAULT_ARCH if None.
            cuda: The CUDA version of the card's driver, 13000 for 13.0; 0 if unknown.

        Raises:
            InvalidRequest: This is not such a function, or it has no such parameters.
            Unsupported: Triton is not installed.
        """
        try:
            from triton import knobs
            from triton.backends.compiler import GPUTarget
            from triton.compiler import make_backend
            from triton.runtime.jit import JITFunction, create_function_from_signature
        except ImportError:
            raise missing("Triton", "triton") from None
        # With TRITON_INTERPRET, @triton.jit makes another kind of object, which runs in Python.
        if not isinstance(function, JITFunction):
            is_interpreted = type(function).__name__ == "InterpretedFunction"
            hint = (
                "TRITON_INTERPRET is set, so Triton runs it in Python: remove the variable from the environment"
                if is_interpreted
                else "Of an autotuned function, pass .fn and choose one config"
            )
            raise InvalidRequest(f"kernel: it must be a @triton.jit function, not {quoted(function)}", hint)
        self.function: Any = function
        self.name: str = function.__name__
        self._knobs: Any = knobs
        self._types = dict(types or {})
        # Check the names here, because the error of Triton's binder for a wrong name would be hard to understand.
        self._check_names()
        self._target = GPUTarget("cuda", checked_arch(arch), 32)
        # Ask for an older PTX version only if the card's driver needs that.
        most = ptx_version_of(cuda)
        self._ptx_version = most if most is not None and most < _own_ptx_version(self._target.arch) else None
        self._backend = make_backend(self._target)
        self._bind = create_function_from_signature(function.signature, function.params, self._backend)
        self._annotated = {param.name: param.annotation_type for param in function.params}
        self._variants: dict[tuple[str, ...], CompiledKernel] = {}

    def _check_names(self) -> None:
        names = set(self.function.arg_names)
        if taken := names & KEYWORDS:
            raise InvalidRequest(f"kernel {self.name}: a parameter's name is a keyword of launches: {sorted(taken)}")
        if unknown := set(self._types) - names:
            raise InvalidRequest(f"kernel {self.name}: it has no parameter {', '.join(sorted(unknown))}")
        for name, kind in self._types.items():
            if not isinstance(kind, str) or not kind.startswith("*"):
                raise InvalidRequest(
                    f"kernel {self.name}: {name}'s type must be a pointer, not {quoted(kind)}", 'Say "*fp32"'
                )

    def prepared(self, grid: Grid, args: Sequence[Any], keywords: Mapping[str, Any]) -> PreparedLaunch:
        """Compile for the types of a call's arguments, unless that was done before, and pack the arguments.

        This follows Triton's own call: options from the environment and from knobs, the hooks before a run, and the
        globals used by the function and those that it calls.

        Args:
            grid: The number of programs in one to three dimensions, or a function that computes it from the arguments
                by name. If it contains a 0 there is nothing to launch.
            args: Positional arguments.
            keywords: Arguments, constants and Triton's options (num_warps, num_stages) by name.

        Raises:
            LaunchFailed: The arguments do not fit the function, or a global that it uses has changed.
            LoadFailed: It does not compile for these types.
            Unsupported: It needs something that launches here don't have.
        """
        # Step 1: replace device memory with objects that Triton's binder accepts, and add the options that Triton's
        # call adds.
        arguments = [self._stand_in(index, value) for index, value in enumerate(args)]
        named = {name: self._stand_in(name, value) for name, value in keywords.items()}
        named["debug"] = named.get("debug", self.function.debug) or self._knobs.runtime.debug
        named["instrumentation_mode"] = self._knobs.compilation.instrumentation_mode
        named["fpsan_homomorphic_casts"] = self._knobs.compilation.fpsan_homomorphic_casts
        for hook in self.function.pre_run_hooks:
            hook(*args, **(dict(keywords) | {"debug": named["debug"]}))
        if self._ptx_version is not None:
            named.setdefault("ptx_version", self._ptx_version)
        if FUSION_VARIABLE not in os.environ:
            named.setdefault("enable_fp_fusion", True)
        # Step 2: bind. The results are the arguments by name, the type or constant of each, and the compiler's options.
        try:
            bound, specialization, options = self._bind(*arguments, **named)
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise self._failed(f"{error}".replace("dynamic_func", self.name)) from None
        # Step 3: find or compile the variant. numpy scalars have types that the binder does not see.
        values = self._originals(args, keywords)
        kinds = [self._typed(kind, values.get(name)) for name, kind in zip(bound, specialization, strict=True)]
        compiled = self._compiled(bound, kinds, named, options)
        self._check_globals()
        # Step 4: get the grid, which may be computed from the arguments as the program passed them.
        launch_grid = grid(dict(bound) | values) if callable(grid) else grid
        try:
            sizes = tuple(integer(size) for size in launch_grid)
        except TypeError:
            raise self._failed(
                f"the grid must be a sequence of integers, not {quoted(launch_grid)}", "Write kernel[(n,)](...)"
            ) from None
        packed = self._packed(bound, kinds)
        # Triton's own launcher does nothing for such a grid, and ignores numbers after the third.
        is_empty = 0 in sizes[:3] and min(sizes) >= 0
        return PreparedLaunch(compiled, sizes, (compiled.threads,), packed, compiled.shared_bytes, is_empty=is_empty)

    def _check_globals(self) -> None:
        """Raise LaunchFailed for a global that changed after Triton first compiled a function that uses it.

        Triton's own call does this: the compiled variants, in memory and on disk, are keyed by the first values.
        """
        missing = object()
        # Triton records the value of each global that a compiled function has used.
        for (name, _), (compiled_value, variables) in self.function.used_global_vals.items():
            now = variables.get(name, missing)
            if now is missing or now != compiled_value:
                state = "gone" if now is missing else quoted(now)
                reason = (
                    f"global variable {name} has changed since it was compiled, from {quoted(compiled_value)} to"
                    f" {state}"
                )
                raise self._failed(
                    reason, "Triton uses a global's first value: pass a value that changes as a tl.constexpr argument"
                )

    def _originals(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
        return dict(zip(self.function.arg_names, args, strict=False)) | dict(keywords)

    def _stand_in(self, place: int | str, value: Any) -> Any:
        """Return an object for the value that Triton's binder accepts: a tensor's substitute, or a Python number."""
        names = self.function.arg_names
        name = place if isinstance(place, str) else names[place] if place < len(names) else ""
        # Step 1: handle values on the host. Step 2: handle device memory, an offset into it, or an array. Step 3: find
        # its element type.
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, np.ndarray):
            raise self._failed(f"{name} is an array in host memory", "Copy it to the card, and pass the copy")
        offset = 0
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Buffer):
            value, offset = value
        dtype = getattr(value, "dtype", None)
        buffer = value if isinstance(value, Buffer) else getattr(value, "buffer", None)
        if not isinstance(buffer, Buffer):
            return value
        if buffer is not value:
            offset = value.address - buffer.handle
        # The element type is the array's own or, for a plain buffer, the annotation's or that in `types`. If both
        # exist, they must agree.
        declared = (self._annotated.get(name) or self._types.get(name) or "").removeprefix("*").removeprefix("k")
        element = self._element(name, dtype) if dtype is not None else declared
        if not element:
            hint = f'Pass an array, which has a dtype, or use session.kernel(fn, types={{"{name}": "*fp32"}})'
            raise self._failed(f"{name} is a buffer, whose elements have no type", hint)
        if declared and element != declared:
            raise self._failed(f"{name} has elements of {element}, but the kernel's parameter is *{declared}")
        return _Pointer(buffer, offset, element)

    def _element(self, name: str, dtype: Any) -> str:
        from triton.runtime.jit import type_canonicalisation_dict

        element = type_canonicalisation_dict.get(str(np.dtype(dtype)))
        if element is None:
            raise self._failed(f"{name}: Triton doesn't support elements of {dtype}")
        return str(element)

    def _typed(self, kind: tuple[str, Any], value: Any) -> tuple[str, Any]:
        """Correct the type of a numpy scalar, which Triton's binder does not see."""
        if not isinstance(value, np.generic) or kind[0] == "constexpr":
            return kind
        letter = {"i": "i", "u": "u", "f": "fp", "b": "u"}.get(value.dtype.kind)
        if letter is None:
            raise self._failed(f"a kernel can't take {quoted(value)}")
        name = "u1" if value.dtype.kind == "b" else f"{letter}{8 * value.itemsize}"
        return name, kind[1]

    def _compiled(
        self, bound: Mapping[str, Any], kinds: list[tuple[str, Any]], keywords: dict[str, Any], options: Any
    ) -> CompiledKernel:
        from triton.runtime.jit import _replace_jit_callables

        # A function among the constants is identified by its source, because another function may have the same name.
        key = [str(_replace_jit_callables(kinds)), repr(sorted(options.items()))]
        if self._knobs.runtime.add_stages_inspection_hook is not None:
            key += map(str, self._knobs.runtime.add_stages_inspection_hook())
        variant = self._variants.get(tuple(key))
        if variant is None:
            if len(self._variants) >= MAX_VARIANTS:
                self._variants.clear()
            variant = self._variants[tuple(key)] = self._compile(bound, kinds, keywords, options)
        return variant

    def _compile(
        self, bound: Mapping[str, Any], kinds: list[tuple[str, Any]], keywords: dict[str, Any], options: Any
    ) -> CompiledKernel:
        import triton
        from triton.compiler import ASTSource

        try:
            # Triton's own preparation, as in its call: constants, signature and options.
            settings, signature, constants, attributes = self.function._pack_args(
                self._backend, keywords, bound, kinds, options
            )
        except (KeyError, TypeError, ValueError, AssertionError, RuntimeError, OSError) as error:
            raise self._failed(str(error)) from None
        source = ASTSource(self.function, signature, constants, attributes)
        try:
            # With an ASTSource and a target, Triton finds or compiles the kernel without asking for a current card.
            compiled = triton.compile(source, target=self._target, options=settings.__dict__)
        except Exception as error:
            # Triton's passes raise all kinds of exceptions. The user gets one kind of error, with the full text.
            raise compile_error(f"Triton's kernel {self.name}", f"{type(error).__name__}: {error}") from None
        metadata = compiled.metadata
        # Refuse features that launches here don't have, with their names, because the launch would fail on the card.
        if metadata.global_scratch_size or metadata.profile_scratch_size:
            raise Unsupported(f"kernel {self.name} needs scratch memory, which launches don't provide")
        if settings.num_ctas > 1:
            raise Unsupported(f"kernel {self.name} needs clusters, but num_ctas must be 1 here")
        is_cooperative = bool(settings.launch_cooperative_grid)
        return CompiledKernel(
            compiled.asm["ptx"], metadata.name, 32 * metadata.num_warps, metadata.shared, is_cooperative
        )

    def _packed(self, bound: Mapping[str, Any], kinds: list[tuple[str, Any]]) -> KernelArgs:
        args = KernelArgs()
        for (name, value), (kind, _) in zip(bound.items(), kinds, strict=True):
            # Constants are compiled in, so they have no argument.
            if kind == "constexpr":
                continue
            if isinstance(value, _Pointer):
                args.push_buffer(value.buffer, value.offset)
                continue
            try:
                args.push_raw(struct.pack(_PACKED_AS[kind], value))
            except (KeyError, struct.error, OverflowError):
                raise self._failed(f"{name} must be of Triton's type {kind}, not {quoted(value)}") from None
        # The compiled kernel has these parameters even if it uses no scratch memory.
        for _ in range(SCRATCH_PARAMETERS):
            args.push_u64(0)
        return args

    def _failed(self, reason: str, hint: str = "") -> LaunchFailed:
        return launch_failed(self.name, reason, hint)


def _own_ptx_version(arch: int) -> int:
    """Return the PTX version that Triton writes by default, its assembler's: 94 for 9.4."""
    from triton.backends.nvidia.compiler import get_ptxas, ptx_get_version

    return int(ptx_get_version(get_ptxas(arch).version))
