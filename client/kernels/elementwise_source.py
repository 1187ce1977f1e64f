"""Elementwise kernels like CuPy's `ElementwiseKernel`, as CUDA C: their description, and a call's source and arguments.

CuPy need not be installed.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpulease.client.array_layout import ArrayLayout, ArrayView
from gpulease.client.errors import InvalidRequest
from gpulease.client.kernel_args import KernelArgs
from gpulease.client.texts import quoted

C_TYPES: Final = {
    "bool": "bool", "int8": "signed char", "uint8": "unsigned char", "int16": "short", "uint16": "unsigned short",
    "int32": "int", "uint32": "unsigned int", "int64": "long long", "uint64": "unsigned long long",
    "float16": "float16", "float32": "float", "float64": "double",
}  # fmt: skip
"""C names of numpy's dtypes. Complex numbers are missing: NVRTC's wheel has no header for them."""

_FLOAT16: Final = """
struct float16 {
    unsigned short bits;
    float16() = default;
    __device__ float16(float value) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
    __device__ operator float() const {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
};
"""
"""Half precision for operations, computed in single precision: NVRTC's wheel lacks CUDA's own header."""

_HEAD: Final = """
template <int N> struct _Space {
    long long count, lengths[N];
    __device__ long long size() const { return count; }
};
template <int N> struct _Steps { long long bytes[N]; };
template <int N> __device__ char *_at(char *data, long long i, const _Space<N> &space, const _Steps<N> &steps) {
    unsigned long long rest = i;
    for (int d = N - 1; d > 0; d--) {
        data += (long long)(rest % space.lengths[d]) * steps.bytes[d];
        rest /= space.lengths[d];
    }
    return data + (long long)rest * steps.bytes[0];
}
template <typename E, int N, bool is_packed> struct _Raw {
    char *data;
    const _Space<N> &space;
    const _Steps<N> &steps;
    __device__ long long size() const { return space.count; }
    __device__ const long long *shape() const { return space.lengths; }
    __device__ const long long *strides() const { return steps.bytes; }
    __device__ E &operator[](long long i) const {
        return is_packed ? ((E *)data)[i] : *(E *)_at(data, i, space, steps);
    }
};
"""


class SourceParameter(NamedTuple):
    """A parameter, declared as `raw T x`.

    Attributes:
        kind: The name of a numpy dtype, or a single letter for any dtype.
        name: Its name in the operation.
        is_raw: True if the operation indexes the array itself.
    """

    kind: str
    name: str
    is_raw: bool

    @property
    def is_generic(self) -> bool:
        """True if the dtype follows from the arguments of each call."""
        return len(self.kind) == 1


class ElementwiseSource:
    """The checked description of a kernel.

    Attributes:
        name: The kernel's name.
        inputs: Its parameters before the outputs.
        outputs: Its last parameters.
    """

    def __init__(
        self, in_params: Any, out_params: str = "", operation: str = "", name: str = "kernel", preamble: str = ""
    ) -> None:
        """Check the arguments of `GpuSession.elementwise`. Raises InvalidRequest."""
        # If this is a CuPy object and not text, take the description from the object.
        if not isinstance(in_params, str):
            in_params, out_params, operation, name, preamble = _of_cupy(in_params)
        texts = (in_params, out_params, operation, name, preamble)
        if not all(isinstance(text, str) for text in texts) or not name.isidentifier():
            raise InvalidRequest(
                f"elementwise: every part must be a string, and the name an identifier, not {quoted(name)}",
                'Write session.elementwise("T x, T y", "T z", "z = x + y", "sum")',
            )
        # Parse the parameters once, here; a call only fills in the types.
        self.name, self._operation, self._preamble = name, operation, preamble
        self.inputs, self.outputs = _parameters(in_params), _parameters(out_params)
        names = [parameter.name for parameter in self.parameters]
        if not self.outputs or len(set(names)) < len(names):
            raise InvalidRequest(f"elementwise {name}: it has no output, or two parameters with the same name")

    @property
    def parameters(self) -> tuple[SourceParameter, ...]:
        """Inputs, then outputs, in the order of a call's arguments."""
        return self.inputs + self.outputs

    def laid_out(
        self, types: Mapping[str, np.dtype[Any]], values: Sequence[ArrayView | NDArray[Any]], shape: tuple[int, ...]
    ) -> tuple[str, KernelArgs]:
        """Write the CUDA C for the dtypes and dimensions of a call, and pack its arguments.

        Args:
            types: Element dtypes by the parameters' kinds; all are in C_TYPES.
            values: For each parameter, a device array, or a number of that dtype as an array without dimensions.
            shape: The shape over which the operation runs, with at least one element.

        Returns:
            The source, and the arguments in the order of its parameters.
        """
        # Step 1: broadcast the arrays that the kernel indexes by element to the operation's shape. Merge dimensions
        # that are contiguous in all of them, because each loop costs a division per element.
        indexed = [
            value.layout.broadcast(shape, self.name)
            for parameter, value in zip(self.parameters, values, strict=True)
            if isinstance(value, ArrayView) and not parameter.is_raw
        ]
        lengths, steps = _fewest_loops(shape, indexed)
        unused = iter(steps)
        # Step 2: declare the space of elements, then each parameter with its argument.
        text = _KernelText()
        text.push_space("_ind", math.prod(lengths), lengths)
        for number, (parameter, value) in enumerate(zip(self.parameters, values, strict=True)):
            is_input = number < len(self.inputs)
            element = ("const " if is_input else "") + C_TYPES[types[parameter.kind].name]
            if not isinstance(value, ArrayView):
                text.push(f"{element} {parameter.name}", value.tobytes())
            elif parameter.is_raw:
                text.push_raw_array(number, element, parameter.name, value)
            else:
                text.push_array(number, element, parameter.name, value, next(unused), is_input)
        return self._text(types, text), text.args

    def _text(self, types: Mapping[str, np.dtype[Any]], text: "_KernelText") -> str:
        # Make each letter a typedef, so that the operation's text needs no change.
        letters = sorted({parameter.kind for parameter in self.parameters if parameter.is_generic})
        step = "(long long)gridDim.x * blockDim.x"
        lines = [
            _FLOAT16 if np.dtype(np.float16) in types.values() else "",
            *(f"typedef {C_TYPES[types[letter].name]} {letter};" for letter in letters),
            _HEAD,
            f'#line 1 "{self.name}: preamble"',
            self._preamble,
            f'extern "C" __global__ void {self.name}({", ".join(text.signature)}) {{',
            *text.ahead,
            f"for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < _ind.count; i += {step}) {{",
            *text.inside,
            # Make the compiler's errors name the line in the operation.
            f'#line 1 "{self.name}"',
            self._operation,
            ";}}",
        ]
        return "\n".join(lines)


class _KernelText:
    """Declarations of a kernel that is being written, with the arguments for them."""

    def __init__(self) -> None:
        self.args = KernelArgs()
        self.signature: list[str] = []
        self.ahead: list[str] = []
        self.inside: list[str] = []

    def push(self, declared: str, raw: bytes) -> None:
        # Each declaration and its argument must have the same index in the two lists.
        self.signature.append(declared)
        self.args.push_raw(raw)

    def push_space(self, name: str, count: int, lengths: Sequence[int]) -> None:
        self.push(f"const _Space<{len(lengths)}> {name}", struct.pack(f"<{1 + len(lengths)}q", count, *lengths))

    def push_steps(self, number: int, strides: Sequence[int]) -> None:
        self.push(f"const _Steps<{len(strides)}> _s{number}", struct.pack(f"<{len(strides)}q", *strides))

    def push_array(
        self, number: int, element: str, name: str, array: ArrayView, strides: Sequence[int], is_input: bool
    ) -> None:
        self._push_pointer(number, array)
        self.push_steps(number, strides)
        # The element's address follows from its index and the strides; inputs are copied, outputs are references.
        place = f"*({element} *)_at(_p{number}, i, _ind, _s{number})"
        self.inside.append(f"{element} {'' if is_input else '&'}{name} = {place};")

    def push_raw_array(self, number: int, element: str, name: str, array: ArrayView) -> None:
        # An array without dimensions has one element, like one of length 1.
        shape, strides = (array.shape, array.strides) if array.ndim else ((1,), (0,))
        self._push_pointer(number, array)
        self.push_space(f"_r{number}", array.size, shape)
        self.push_steps(number, strides)
        kind = f"_Raw<{element}, {len(shape)}, {'true' if array.is_contiguous else 'false'}>"
        self.ahead.append(f"const {kind} {name} = {{_p{number}, _r{number}, _s{number}}};")

    def _push_pointer(self, number: int, array: ArrayView) -> None:
        self.signature.append(f"char *_p{number}")
        self.args.push_buffer(array)


def _fewest_loops(shape: Sequence[int], layouts: Sequence[ArrayLayout]) -> tuple[list[int], list[list[int]]]:
    """Merge dimensions that are contiguous in every layout.

    Returns:
        The lengths of the loops, outermost first; and for each layout its strides, in bytes, in the same order.
    """
    loops: list[tuple[int, list[int]]] = []
    # Go from the last dimension to the first. A dimension that continues the loop inside it in every layout extends
    # that loop.
    for length, *strides in reversed(list(zip(shape, *(layout.strides for layout in layouts), strict=True))):
        if length == 1:
            continue
        # Merge this dimension into the inner loop if, in every layout, one step of the dimension has as many bytes as
        # that whole loop.
        if loops and all(outer == loops[-1][0] * inner for outer, inner in zip(strides, loops[-1][1], strict=True)):
            loops[-1] = loops[-1][0] * length, loops[-1][1]
        else:
            loops.append((length, strides))
    # A single element has no loop.
    loops = loops[::-1] or [(1, [0] * len(layouts))]
    return [length for length, _ in loops], [[strides[index] for _, strides in loops] for index in range(len(layouts))]


def _parameters(text: str) -> tuple[SourceParameter, ...]:
    """Parse a list of parameters: "raw T x, float32 y". Raises InvalidRequest."""
    parameters = []
    for declared in text.split(",") if text.strip() else ():
        words = declared.split()
        is_raw = words[:1] == ["raw"]
        if len(words) != 2 + is_raw:
            raise InvalidRequest(
                f"elementwise: a parameter must be a type and a name, not {quoted(declared)}",
                'Write "T x", or "raw float32 x"',
            )
        kind, name = words[is_raw:]
        # Names that begin with an underscore, and `i`, are used by the generated code.
        if not name.isidentifier() or name.startswith("_") or name == "i":
            raise InvalidRequest(
                f"elementwise: a parameter can't have the name {quoted(name)}", "i and _names are the kernel's"
            )
        if len(kind) > 1 and kind not in C_TYPES:
            raise InvalidRequest(
                f"elementwise: a type must be one letter or one of {', '.join(C_TYPES)}, not {quoted(kind)}"
            )
        if len(kind) == 1 and not kind.isalpha():
            raise InvalidRequest(f"elementwise: a type's placeholder must be a single letter, not {quoted(kind)}")
        parameters.append(SourceParameter(kind, name, is_raw))
    return tuple(parameters)


def _of_cupy(kernel: Any) -> tuple[Any, ...]:
    """Return the description in a CuPy `ElementwiseKernel`, readable without a driver. Raises InvalidRequest."""
    try:
        # Refuse an object with options, because ignoring them could silently give another kernel.
        if kernel.kwargs:
            keywords = ", ".join(sorted(kernel.kwargs))
            raise InvalidRequest(f"elementwise {kernel.name}: CuPy's {keywords} is not taken from its object")
        lists = [
            ", ".join(
                f"{'raw ' if item.raw else ''}{item.ctype if item.dtype is None else np.dtype(item.dtype)} {item.name}"
                for item in parameters
            )
            for parameters in (kernel.in_params, kernel.out_params)
        ]
        return *lists, kernel.operation, kernel.name, kernel.preamble
    except (AttributeError, TypeError):
        hint = "Pass the parameters as strings; compile a RawKernel's code with session.compile"
        raise InvalidRequest(
            f"elementwise: the argument must be an ElementwiseKernel, not {quoted(kernel)}", hint
        ) from None
