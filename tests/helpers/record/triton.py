"""The launches of Triton's kernels, and what NumPy says they compute."""

import json
from collections.abc import Iterator
from typing import Final

import numpy as np

from gpulease.daemon.drivers.interface import Dim3
from helpers.record.cases import VECTORS, Array, Bound, Case, Result
from helpers.record.inputs import Draw, zeros

_CALLS: Final = json.loads((VECTORS / "triton.json").read_text())
_EX2: Final = 2.0**-22


def triton_cases() -> Iterator[tuple[Case, Array]]:
    """Each with its result in double precision."""
    d = Draw("triton")
    x, y = d.floats(1000), d.floats(1000)
    yield _case("add", (4, 1, 1), x, y, Result(zeros(1000, kind="f4")), 990), np.append(x[:990] + y[:990], np.zeros(10))
    x = d.floats(5, 100, most=20)
    near = Bound(5 * _EX2, 2.0**-125, "ex2.approx and div.full")
    yield _case("softmax", (5, 1, 1), x, Result(zeros(5, 100, kind="f4"), near), 100), _softmax(x.astype("f8"))
    x, gain, bias = d.floats(4, 200, kind="f2"), d.floats(200), d.floats(200)
    half = Bound(2.0**-10, 2.0**-18, "sqrt.approx and div.full, then one unit of a half")
    out = Result(zeros(4, 200, kind="f2"), half)
    yield _case("layernorm", (4, 1, 1), x, gain, bias, out, 200, 1e-5), _layernorm(x, gain, bias)
    a, b = d.floats(50, 70, kind="f2"), d.floats(70, 40, kind="f2")
    product = Bound(0, 70 * 16 * 3 * 2.0**-22, "mma leaves its order and inner precision open")
    out = Result(zeros(50, 40, kind="f4"), product)
    yield _case("matmul", (2, 2, 1), a, b, out, 50, 40, 70), a.astype("f8") @ b.astype("f8")
    for architecture in ("sm80", "sm90"):
        q, k, v = (d.floats(2, 40, 32, kind="f2") for _ in range(3))
        # Powers are rounded to halves before the second product.
        out = Result(zeros(2, 40, 32, kind="f2"), Bound(2.0**-9, 4 * 2.0**-10, "mma and ex2.approx, then halves"))
        case = _case("attention", (3, 2, 1), q, k, v, out, 40, 0.25, architecture=architecture)
        yield case, _attention(q.astype("f8"), k.astype("f8"), v.astype("f8"), 0.25)


def _case(name: str, grid: Dim3, *arguments: Array | Result | float, architecture: str = "sm80") -> Case:
    call = _CALLS[f"triton.{name}.{architecture}"]
    kinds = call["signature"].values()
    # Two pointers more than the kernel's own: scratch memory that these have no use for.
    packed = (*(_packed(given, kind) for given, kind in zip(arguments, kinds, strict=True)), bytes(8), bytes(8))
    image = f"triton.{name}.{architecture}"
    return Case(image, (image,), name, grid, (call["threads"], 1, 1), packed, call["shared"])


def _packed(given: Array | Result | float, kind: str) -> Array | Result | bytes:
    if isinstance(given, Result | np.ndarray):
        return given
    return np.array(given, {"i32": "i4", "fp32": "f4"}[kind]).tobytes()


def _softmax(x: Array) -> Array:
    power = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(power / power.sum(-1, keepdims=True))


def _layernorm(x: Array, gain: Array, bias: Array) -> Array:
    wide = x.astype("f8")
    scaled = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    return np.asarray(scaled * gain + bias)


def _attention(q: Array, k: Array, v: Array, scale: float) -> Array:
    scores = q @ k.transpose(0, 2, 1) * scale
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    return _softmax(scores) @ v
