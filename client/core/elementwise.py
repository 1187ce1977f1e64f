"""Calls of elementwise kernels: check the arguments, make the outputs, compile CUDA C for them once, and launch.

Everything here is written as `Calls`, so that both APIs share it.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpulease.client.array_layout import ArrayView
from gpulease.client.core.arrays import BLOCK_THREADS, MAX_BLOCKS, Call, Calls, SessionArray, host_value, new
from gpulease.client.core.session import SessionView
from gpulease.client.errors import InvalidRequest, LaunchFailed
from gpulease.client.kernels.elementwise_source import C_TYPES, ElementwiseSource, SourceParameter
from gpulease.client.kernels.prepared_launch import MAX_VARIANTS, launch_failed
from gpulease.client.texts import quoted
from gpulease.protocol.counts import counted


class ElementwiseOperation:
    """A kernel, and its loaded modules for the dtypes and dimensions of its calls."""

    def __init__(self, source: ElementwiseSource, options: Sequence[str] = (), arch: int | None = None) -> None:
        """Store a description; `options` and `arch` are those of the session's `compile`."""
        self._source = source
        self._parameters = source.parameters
        self._compile = {"options": options, "arch": arch}
        self._modules: dict[str, Any] = {}

    def called(
        self,
        session: SessionView,
        kind: type[SessionArray],
        args: Sequence[Any],
        size: int | None,
        place: Sequence[Any],
    ) -> Calls[Any]:
        """Run the kernel once.

        Args:
            session: The session.
            kind: The API's class of arrays.
            args: Inputs; then all outputs, or none of them, in which case they are made.
            size: Number of elements if all arrays are raw.
            place: Stream, regions and position, as in the session's launch.

        Returns:
            The output array, or a tuple of several.

        Raises LaunchFailed, LoadFailed, AllocFailed or Unsupported.
        """
        source = self._source
        # Check everything before anything is allocated, compiled or launched.
        self._check_count_and_kinds(args)
        types = self._types(args)
        shape = self._shape(args, size)
        inputs = [
            value if isinstance(value, ArrayView) else self._number(parameter, value, types[parameter.kind])
            for parameter, value in zip(source.inputs, args, strict=False)
        ]
        outputs = list(args[len(inputs) :])
        # If outputs were not given, make them with the broadcast shape of the inputs.
        if not outputs:
            for parameter in source.outputs:
                outputs.append((yield from new(session, kind, shape, types[parameter.kind], source.name)))
        # Without elements, don't compile: an empty call succeeds even if no compiler is installed.
        count = math.prod(shape)
        if count:
            # The text depends on dtypes and dimensions, so it is the key of the compiled module.
            text, packed = source.laid_out(types, [*inputs, *outputs], shape)
            module = yield from self._module(text)
            blocks = min(-(-count // BLOCK_THREADS), MAX_BLOCKS)
            yield Call("launch", (module, source.name, (blocks,), (BLOCK_THREADS,), packed, None, 0, *place))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _module(self, text: str) -> Calls[Any]:
        module = self._modules.get(text)
        if module is None or not module.is_alive:
            # If a program keeps using new shapes, drop all variants at once; those in use are compiled again.
            if len(self._modules) >= MAX_VARIANTS:
                self._modules.clear()
            module = self._modules[text] = yield Call("compile", (text,), self._compile)
        return module

    def _check_count_and_kinds(self, args: Sequence[Any]) -> None:
        inputs, outputs = len(self._source.inputs), self._source.outputs
        if len(args) not in (inputs, len(self._parameters)):
            takes = f"{counted(inputs, 'argument')}, or {len(self._parameters)} with its outputs"
            raise self._failed(f"it takes {takes}; {len(args)} were given")
        # Inputs may be numbers; a parameter that the kernel writes or indexes itself must be an array on the card.
        for number, (parameter, value) in enumerate(zip(self._parameters, args, strict=False)):
            self._check_kind(parameter, value, needs_array=parameter.is_raw or number >= inputs)
        if len(args) == inputs and any(parameter.is_raw for parameter in outputs):
            raise self._failed(
                "a raw output has no shape of its own, so it must be given",
                "Create the array, and pass it after the inputs",
            )

    def _check_kind(self, parameter: SourceParameter, value: Any, needs_array: bool) -> None:
        if isinstance(value, SessionArray):
            return
        # This is a common mistake, so it has its own hint.
        if isinstance(value, np.ndarray) and value.ndim:
            hint = f"Copy it to the card: {parameter.name} = session.array({parameter.name})"
            raise self._failed(f"{parameter.name} is an array in host memory", hint)
        is_number = isinstance(value, int | float | np.generic | np.ndarray)
        if needs_array or not is_number:
            expected = "an array on the card" if needs_array else "an array on the card or a number"
            raise self._failed(
                f"{parameter.name} must be {expected}, not {quoted(value)}", "Make one with session.array(values)"
            )

    def _types(self, args: Sequence[Any]) -> dict[str, np.dtype[Any]]:
        """Return the dtype of each type letter: from arrays and numpy scalars, otherwise from Python numbers."""
        dtype_by_kind = {
            parameter.kind: np.dtype(parameter.kind) for parameter in self._parameters if not parameter.is_generic
        }
        untyped: dict[str, list[Any]] = {}
        # Arrays and numpy scalars have a dtype, which must be the same for each type letter. Python numbers decide only
        # if no array or scalar does.
        for parameter, value in zip(self._parameters, args, strict=False):
            dtype = getattr(value, "dtype", None)
            if dtype is None:
                untyped.setdefault(parameter.kind, []).append(np.asarray(value).dtype)
            elif dtype_by_kind.setdefault(parameter.kind, dtype) != dtype:
                expected = (
                    f"{parameter.kind} is {dtype_by_kind[parameter.kind]}" if parameter.is_generic else parameter.kind
                )
                raise self._failed(f"{parameter.name} has elements of {dtype}, the kernel's are {expected}")
        for kind, dtypes in untyped.items():
            dtype_by_kind.setdefault(kind, np.result_type(*dtypes))
        # If a type letter still has no dtype, no argument determines it.
        for parameter in self._parameters:
            dtype = dtype_by_kind.get(parameter.kind)
            if dtype is None:
                raise self._failed(
                    f"no argument determines the type {parameter.kind}", "Pass the output arrays as well"
                )
            if dtype.name not in C_TYPES:
                raise self._failed(f"{parameter.name}: such kernels have no elements of {dtype}")
        return dtype_by_kind

    def _shape(self, args: Sequence[Any], size: int | None) -> tuple[int, ...]:
        shaped = [
            value.shape
            for parameter, value in zip(self._parameters, args, strict=False)
            if isinstance(value, ArrayView) and not parameter.is_raw
        ]
        # The number of elements comes from arrays or from `size`, never from both.
        if shaped and size is not None:
            raise self._failed("size must be left out, because the arrays determine it")
        if not shaped and size is None:
            raise self._failed("no array determines the size, because all of them are raw", "Use kernel(..., size=n)")
        if size is not None:
            if type(size) is not int or size < 0:
                raise self._failed(f"size must be a number of elements, not {quoted(size)}")
            return (size,)
        # Broadcast the inputs by numpy's rules; outputs that were given must have exactly the resulting shape.
        try:
            shape = np.broadcast_shapes(*shaped)
        except ValueError:
            raise self._failed(f"arrays of shapes {', '.join(map(str, shaped))} can't be combined") from None
        for parameter, value in zip(self._source.outputs, args[len(self._source.inputs) :], strict=False):
            if not parameter.is_raw and value.shape != shape:
                raise self._failed(f"{parameter.name} has the shape {value.shape}, but the operation runs over {shape}")
        return shape

    def _number(self, parameter: SourceParameter, value: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
        try:
            return host_value(value, dtype, self._source.name)
        except InvalidRequest as error:
            raise self._failed(f"{parameter.name}: {error}") from None

    def _failed(self, reason: str, hint: str = "") -> LaunchFailed:
        return launch_failed(self._source.name, reason, hint)
