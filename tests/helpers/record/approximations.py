"""Launches of approximate instructions, the exact results, and the bounds on errors in the PTX ISA.

Exact results are computed in extended precision (64 bits of mantissa). Their own error is less than a thousandth of any
bound.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from helpers.record.cases import Array, Case, Result
from helpers.record.inputs import Draw, zeros

Function = Callable[..., Array]
Bounds = Callable[[tuple[Array, ...], Array], Array]

COUNT: Final = 768
_BLOCK: Final = 128
_PI: Final = 3.141592653589793


@dataclass(frozen=True, slots=True)
class Approximation:
    """One instruction.

    Attributes:
        text: The instruction with its modifiers.
        kind: The type of operands and result: f32, f64, f16, bf16, or the pairs f16x2 and bf16x2.
        function: Returns the exact results for operands.
        bound: Returns the greatest absolute errors for operands and exact results; infinite if the ISA promises
            nothing.
        arity: Number of operands.
    """

    text: str
    kind: str
    function: Function
    bound: Bounds
    arity: int = 1

    @property
    def kernel(self) -> str:
        return self.text.replace(".", "_")

    @property
    def numbers(self) -> str:
        return {"f32": "f4", "f64": "f8", "f16": "f2", "f16x2": "f2"}.get(self.kind, "u2")

    @property
    def least(self) -> Array:
        """The smallest positive number; the smallest normal one if the instruction flushes denormals to zero."""
        exponent = {"f4": -149, "f8": -1074, "f2": -24, "u2": -133}[self.numbers]
        if ".ftz" in self.text:
            exponent = {"f4": -126, "u2": -126, "f8": -1022}[self.numbers]
        return np.asarray(np.ldexp(np.longdouble(1), exponent))


def _relative(error: float, least: float = 0.0) -> Bounds:
    """Return a bound: `error` times the exact result, plus `least`.

    `least` is the type's least number if a card may flush denormal results to zero.
    """
    return lambda operands, true: error * np.abs(true) + least


def _absolute(error: float) -> Bounds:
    return lambda operands, true: np.full(true.shape, error, np.longdouble)


def _units(count: float) -> Bounds:
    """Return a bound in units in the last place of the f32 nearest to the exact result, denormal numbers included."""

    def bound(operands: tuple[Array, ...], true: Array) -> Array:
        _, exponent = np.frexp(np.abs(true))
        # Add half a unit, because the ISA's bound is relative to the correctly rounded result.
        unit = np.exp2(np.maximum(exponent.astype("f8") - 24, -149))
        return np.asarray((count + 0.5) * unit, np.longdouble)

    return bound


def _logarithm(operands: tuple[Array, ...], true: Array) -> Array:
    near_one = (operands[0] > 0.5) & (operands[0] < 2)
    return np.where(near_one, 2.0**-22, 2.0**-22 * np.abs(true))


def _wave(operands: tuple[Array, ...], true: Array) -> Array:
    """Return the bound of sine and cosine.

    The ISA rounds the bound to a tenth of a bit: 2^-20.5. An H100's cosine reaches 2^-20.46.
    """
    size = np.abs(operands[0])
    return np.where(size <= 2 * _PI, 2.0**-20.45, np.where(size <= 100 * _PI, 2.0**-14.7, np.inf))


def _quotient(operands: tuple[Array, ...], true: Array) -> Array:
    """Return the bound of a quotient. The ISA promises one for divisors between 2^-126 and 2^126; beyond, the
    reciprocal overflows or vanishes.
    """
    size = np.abs(operands[1])
    return np.where((size >= 2.0**-126) & (size <= 2.0**126), _units(2)(operands, true), np.inf)


def _single() -> Iterator[Approximation]:
    for ftz in ("", ".ftz"):
        for name, function, bound in (
            ("ex2", np.exp2, _units(2)),
            ("lg2", np.log2, _logarithm),
            ("sin", np.sin, _wave),
            ("cos", np.cos, _wave),
            ("rsqrt", lambda x: 1 / np.sqrt(x), _relative(2.0**-22.9)),
            ("sqrt", np.sqrt, _relative(2.0**-23)),
            ("rcp", lambda x: 1 / x, _units(1)),
        ):
            yield Approximation(f"{name}.approx{ftz}.f32", "f32", function, bound)
        yield Approximation(f"div.approx{ftz}.f32", "f32", np.divide, _quotient, 2)
        yield Approximation(f"div.full{ftz}.f32", "f32", np.divide, _units(2), 2)
    yield Approximation("tanh.approx.f32", "f32", np.tanh, _relative(2.0**-11))


def approximations() -> Iterator[Approximation]:
    """Yield all approximate instructions (PTX ISA sections 9.7.3 and 9.7.4)."""
    yield from _single()
    # Operand and result have 20 bits after the point. The error is the truncated part of the operand plus a unit of the
    # result.
    gross = _relative(2.0**-20 + 2.0**-20)
    yield Approximation("rcp.approx.ftz.f64", "f64", lambda x: 1 / x, gross)
    yield Approximation("rsqrt.approx.ftz.f64", "f64", lambda x: 1 / np.sqrt(x), gross)
    yield Approximation("rsqrt.approx.f64", "f64", lambda x: 1 / np.sqrt(x), _relative(2.0**-51))
    for suffix in ("", "x2"):
        yield Approximation(f"tanh.approx.f16{suffix}", f"f16{suffix}", np.tanh, _absolute(2.0**-10.987))
        yield Approximation(f"tanh.approx.bf16{suffix}", f"bf16{suffix}", np.tanh, _absolute(2.0**-7.99))
        yield Approximation(f"ex2.approx.f16{suffix}", f"f16{suffix}", np.exp2, _relative(2.0**-9.9, 2.0**-24))
        yield Approximation(f"ex2.approx.ftz.bf16{suffix}", f"bf16{suffix}", np.exp2, _relative(2.0**-7, 2.0**-133))


def _kernel(form: Approximation) -> str:
    held = {"f16": "b16", "bf16": "b16", "f16x2": "b32", "bf16x2": "b32"}.get(form.kind, form.kind)
    size = int(held[1:]) // 8
    second = f"mad.wide.u32 %from, %i, {size}, %other; ld.global.{held} %y, [%from];" if form.arity == 2 else ""
    other = "ld.param.u64 %other, [other];" if form.arity == 2 else ""
    return f"""
.visible .entry {form.kernel}(.param .u64 operands, {".param .u64 other, " * (form.arity - 1)}.param .u64 results)
{{
    .reg .b64 %from, %other, %to; .reg .b32 %i, %n; .reg .{held} %x, %y, %d;
    mov.u32 %i, %ctaid.x; mov.u32 %n, %tid.x; mad.lo.u32 %i, %i, {_BLOCK}, %n;
    ld.param.u64 %from, [operands]; {other} ld.param.u64 %to, [results];
    mad.wide.u32 %from, %i, {size}, %from; mad.wide.u32 %to, %i, {size}, %to;
    ld.global.{held} %x, [%from];
    {second}
    {form.text} %d, %x{", %y" * (form.arity - 1)};
    st.global.{held} [%to], %d;
    ret;
}}
"""


APPROXIMATIONS: Final = {form.text: form for form in approximations()}
PTX: Final = ".version 8.0\n.target sm_90\n.address_size 64\n" + "".join(map(_kernel, APPROXIMATIONS.values()))


def approximation_cases() -> Iterator[Case]:
    """Return a case for each instruction, in the order of APPROXIMATIONS."""
    return map(approximation_case, APPROXIMATIONS.values())


def approximation_case(form: Approximation) -> Case:
    """Return a case for an instruction.

    Its operands are special values, denormal numbers, and numbers of all sizes around the function's interesting ones.
    """
    operands = [_operand(f"{form.text} {n}", form) for n in range(form.arity)]
    result = Result(zeros(COUNT, kind=form.numbers), is_bf16=form.numbers == "u2")
    blocks = COUNT // _BLOCK // (2 if form.kind.endswith("x2") else 1)
    name = f"approximation.{form.text}"
    return Case(name, ("approximations",), form.kernel, (blocks, 1, 1), (_BLOCK, 1, 1), (*operands, result))


def _operand(name: str, form: Approximation) -> Array:
    d = Draw(name)
    if form.numbers == "u2":
        array = (_spread(d, "f4").view("u4") >> 16).astype("u2")
        array[:32] = d.bf16(32, with_specials=True)
        return array
    array = _spread(d, form.numbers)
    array[:32] = d.specials(32, kind=form.numbers)
    return array


def _spread(d: Draw, kind: str) -> Array:
    """Return numbers: a third is small, a third is larger, and a third has any bits, with denormal numbers and NaNs."""
    array = d.floats(COUNT, kind=kind, most=8)
    array[COUNT // 3 :] = d.floats(COUNT - COUNT // 3, kind=kind, most=320)
    array[2 * COUNT // 3 :] = d.bits(COUNT - 2 * COUNT // 3, kind=f"u{array.itemsize}").view(kind)
    return array


def true_values(form: Approximation, case: Case) -> tuple[Array, Array]:
    """Return the exact results and the greatest absolute errors, both in extended precision."""
    operands = tuple(wide(argument, form) for argument in case.arguments[:-1] if isinstance(argument, np.ndarray))
    with np.errstate(all="ignore"):
        operands = tuple(np.where(np.abs(operand) < form.least, 0 * operand, operand) for operand in operands)
        true = form.function(*operands)
        return true, form.bound(operands, true)


def wide(array: Array, form: Approximation) -> Array:
    """Return numbers of a form's type in extended precision."""
    held = (array.astype("u4") << 16).view("f4") if form.numbers == "u2" else array
    with np.errstate(all="ignore"):
        return held.astype(np.longdouble)


def beyond(form: Approximation, got: Array, true: Array, bound: Array) -> Array:
    """Return which results exceed their bound. A result that overflows may be infinite; one that underflows may be 0 or
    the least number.
    """
    value = wide(got, form)
    exponent = {"f4": 128, "f8": 1024, "f2": 16, "u2": 128}[form.numbers]
    with np.errstate(all="ignore"):
        near = np.abs(value - true) <= bound
        # A zero or an infinity must have the right sign.
        alike = (np.isfinite(value) & (value != 0)) | (np.signbit(value) == np.signbit(true))
        overflown = (
            np.isinf(value) & (value * true > 0) & (np.abs(true) + bound >= np.ldexp(np.longdouble(1), exponent))
        )
        vanished = (np.abs(value) <= form.least) & (np.abs(true) <= form.least + bound)
    right = (near | overflown | vanished | (value == true)) & alike
    return np.asarray(~(right | (np.isnan(value) & np.isnan(true)) | np.isinf(bound)))
