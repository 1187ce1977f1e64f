"""The launches of Triton's kernels, and their results computed by NumPy."""

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
    """Yield the launches that a card has run, each with its result in double precision."""
    d = Draw("triton")
    x, y = d.floats(1000), d.floats(1000)
    yield (
        _case("add.sm80", (4, 1, 1), x, y, Result(zeros(1000, kind="f4")), 990),
        np.append(x[:990] + y[:990], np.zeros(10)),
    )
    x = d.floats(5, 100, most=20)
    near = Bound(5 * _EX2, 2.0**-125, "ex2.approx and div.full")
    yield _case("softmax.sm80", (5, 1, 1), x, Result(zeros(5, 100, kind="f4"), near), 100), _softmax(x.astype("f8"))
    x, gain, bias = d.floats(4, 200, kind="f2"), d.floats(200), d.floats(200)
    half = Bound(2.0**-10, 2.0**-18, "sqrt.approx and div.full, then one unit of a half")
    out = Result(zeros(4, 200, kind="f2"), half)
    yield _case("layernorm.sm80", (4, 1, 1), x, gain, bias, out, 200, 1e-5), _layernorm(x, gain, bias)
    a, b = d.floats(50, 70, kind="f2"), d.floats(70, 40, kind="f2")
    out = Result(zeros(50, 40, kind="f4"), _product(70))
    yield _case("matmul.sm80", (2, 2, 1), a, b, out, 50, 40, 70), a.astype("f8") @ b.astype("f8")
    for name in ("attention.sm80", "attention.sm90"):
        q, k, v = (d.floats(2, 40, 32, kind="f2") for _ in range(3))
        # Powers are rounded to halves before the second product.
        out = Result(zeros(2, 40, 32, kind="f2"), Bound(2.0**-9, 4 * 2.0**-10, "mma and ex2.approx, then halves"))
        case = _case(name, (3, 2, 1), q, k, v, out, 40, 0.25)
        yield case, _attention(q.astype("f8"), k.astype("f8"), v.astype("f8"), 0.25)


def unrecorded_cases() -> Iterator[tuple[Case, tuple[Array, ...]]]:
    """Yield the launches that no card has run, each with its results."""
    d = Draw("unrecorded")
    a, b = (d.floats(48, 80).view("u4") >> 16).astype("u2"), (d.floats(80, 48).view("u4") >> 16).astype("u2")
    wide = [(array.astype("u4") << 16).view("f4").astype("f8") for array in (a, b)]
    out = Result(zeros(48, 48, kind="f4"), _product(80))
    yield _case("pipelined.sm80", (2, 2, 1), a, b, out, 48, 48, 80), (wide[0] @ wide[1],)
    x, n = d.integers(128).astype("f4"), 100
    results = (
        np.append(np.cumsum(x[:n]), np.zeros(28)),
        np.append(np.sort(x[:n]), np.zeros(28)),
        np.array([x[:n].argmax()]),
    )
    places = [Result(zeros(128, kind="f4")), Result(zeros(128, kind="f4")), Result(zeros(1))]
    yield _case("order.sm80", (1, 1, 1), x, *places, n), results
    x, n = d.integers(1000).astype("f4"), 999
    counted = np.array([4, 3, 5, 7, 15])
    places = [Result(zeros(7, kind="f4")), Result(zeros(5))]
    yield _case("scatter.sm80", (4, 1, 1), x, *places, n), (np.bincount(np.arange(n) % 7, x[:n]), counted)


def _product(depth: int) -> Bound:
    return Bound(0, depth * 16 * 3 * 2.0**-22, "mma leaves its order and inner precision open")


def _case(name: str, grid: Dim3, *arguments: Array | Result | float) -> Case:
    call = _CALLS[name]
    kinds = call["signature"].values()
    # Triton adds two pointers to scratch memory, which these kernels do not use.
    packed = (*(_packed(given, kind) for given, kind in zip(arguments, kinds, strict=True)), bytes(8), bytes(8))
    image = f"triton.{name}"
    return Case(image, (image,), call["kernel"], grid, (call["threads"], 1, 1), packed, call["shared"])


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
