"""Kernels of Triton, as it writes them: for tests of what a lease must be able to run.

Compiled by Triton 3.9.0, in this folder and with no GPU (its PTX is there before it asks ptxas), by
    TRITON_DISABLE_LINE_INFO=1 TRITON_DEFAULT_FP_FUSION=1 python triton_kernels.py
and kept exactly as it wrote them. How each is called is in triton.json beside them: the arguments in their order, the
threads of a block, the bytes of dynamic shared memory. For compute_90 it writes the same but for the target's name,
except where a result goes through shared memory to be stored.
"""

import json
from pathlib import Path
from typing import Final

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    """Add the first n of x and y."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    tl.store(out + i, tl.load(x + i, mask=inside) + tl.load(y + i, mask=inside), mask=inside)


@triton.jit
def softmax(x, out, columns, BLOCK: tl.constexpr):
    """A row of x for each program, of at most BLOCK columns."""
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    inside = k < columns
    v = tl.load(x + row * columns + k, mask=inside, other=float("-inf"))
    power = tl.exp(v - tl.max(v, axis=0))
    tl.store(out + row * columns + k, power / tl.sum(power, axis=0), mask=inside)


@triton.jit
def layernorm(x, gain, bias, out, columns, eps, BLOCK: tl.constexpr):
    """A row of x for each program, of at most BLOCK columns; halves in and out, floats between."""
    row = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    inside = k < columns
    v = tl.load(x + row * columns + k, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(v, axis=0) / columns
    apart = tl.where(inside, v - mean, 0.0)
    scale = 1 / tl.sqrt(tl.sum(apart * apart, axis=0) / columns + eps)
    scaled = apart * scale * tl.load(gain + k, mask=inside) + tl.load(bias + k, mask=inside)
    tl.store(out + row * columns + k, scaled.to(tl.float16), mask=inside)


@triton.jit
def matmul(a, b, c, m, n, depth, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Multiply halves, tile by tile, to floats."""
    rows = tl.program_id(0) * M + tl.arange(0, M)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    sums = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, depth, K):
        k = start + tl.arange(0, K)
        left = tl.load(
            a + rows[:, None] * depth + k[None, :], mask=(rows[:, None] < m) & (k[None, :] < depth), other=0.0
        )
        right = tl.load(
            b + k[:, None] * n + columns[None, :], mask=(k[:, None] < depth) & (columns[None, :] < n), other=0.0
        )
        sums = tl.dot(left, right, sums)
    tl.store(c + rows[:, None] * n + columns[None, :], sums, mask=(rows[:, None] < m) & (columns[None, :] < n))


@triton.jit
def attention(q, k, v, out, tokens, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Causal attention of one head for each program of the second axis, with a running softmax; halves, WIDTH wide."""
    head = tl.program_id(1) * tokens * WIDTH
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    own = tl.load(q + head + rows[:, None] * WIDTH + d[None, :], mask=rows[:, None] < tokens, other=0.0)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, tl.minimum((tl.program_id(0) + 1) * ROWS, tokens), COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        there = columns < tokens
        keys = tl.load(k + head + columns[None, :] * WIDTH + d[:, None], mask=there[None, :], other=0.0)
        scores = tl.dot(own, keys) * scale
        scores = tl.where(rows[:, None] >= columns[None, :], scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        powers = tl.exp(scores - higher[:, None])
        shrink = tl.exp(most - higher)
        values = tl.load(v + head + columns[:, None] * WIDTH + d[None, :], mask=there[:, None], other=0.0)
        total = total * shrink + tl.sum(powers, 1)
        sums = tl.dot(powers.to(tl.float16), values, sums * shrink[:, None])
        most = higher
    tl.store(
        out + head + rows[:, None] * WIDTH + d[None, :],
        (sums / total[:, None]).to(tl.float16),
        mask=rows[:, None] < tokens,
    )


@triton.jit
def order(x, sums, ranked, greatest, n, BLOCK: tl.constexpr):
    """Running sums, sorted numbers, and the place of the greatest of n numbers of at most BLOCK."""
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=float("inf"))
    tl.store(ranked + i, tl.sort(v), mask=i < n)
    v = tl.where(i < n, v, float("-inf"))
    tl.store(greatest, tl.argmax(v, 0))
    tl.store(sums + i, tl.cumsum(tl.where(i < n, v, 0.0), 0), mask=i < n)


@triton.jit
def scatter(x, sums, counts, n, PLACES: tl.constexpr, BLOCK: tl.constexpr):
    """Atomics of all kinds: sums of x by place, and what all programs and lanes counted."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=0.0)
    tl.atomic_add(sums + i % PLACES, v, mask=i < n)
    tl.atomic_add(counts, 1)
    tl.atomic_max(counts + 1, tl.program_id(0))
    tl.atomic_cas(counts + 2, 0, 5)
    tl.atomic_xchg(counts + 3, 7)
    tl.atomic_or(counts + 4, 1 << tl.program_id(0))


HALVES: Final = {"a": "*fp16", "b": "*fp16", "c": "*fp32", "m": "i32", "n": "i32", "depth": "i32"}
ATTENTION: Final = {"q": "*fp16", "k": "*fp16", "v": "*fp16", "out": "*fp16", "tokens": "i32", "scale": "fp32"}

KERNELS: Final = (
    ("add.sm80", add, {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}, {"BLOCK": 256}),
    ("softmax.sm80", softmax, {"x": "*fp32", "out": "*fp32", "columns": "i32"}, {"BLOCK": 128}),
    (
        "layernorm.sm80",
        layernorm,
        {"x": "*fp16", "gain": "*fp32", "bias": "*fp32", "out": "*fp16", "columns": "i32", "eps": "fp32"},
        {"BLOCK": 256},
    ),
    ("matmul.sm80", matmul, HALVES, {"M": 32, "N": 32, "K": 32}),
    ("attention.sm80", attention, ATTENTION, {"ROWS": 16, "COLUMNS": 32, "WIDTH": 32}),
    ("attention.sm90", attention, ATTENTION, {"ROWS": 16, "COLUMNS": 32, "WIDTH": 32}),
    ("pipelined.sm80", matmul, {**HALVES, "a": "*bf16", "b": "*bf16"}, {"M": 32, "N": 32, "K": 32}),
    (
        "order.sm80",
        order,
        {"x": "*fp32", "sums": "*fp32", "ranked": "*fp32", "greatest": "*i32", "n": "i32"},
        {"BLOCK": 128},
    ),
    (
        "scatter.sm80",
        scatter,
        {"x": "*fp32", "sums": "*fp32", "counts": "*i32", "n": "i32"},
        {"PLACES": 7, "BLOCK": 256},
    ),
)
"""Of each: its file, the function, its arguments' types and its constants."""

ALIGNED: Final = ("pipelined.sm80",)
"""Those compiled, as programs that run do it, for arguments that all divide by 16: loads are wide and asynchronous."""

PTX_VERSION: Final = 83
"""Of CUDA 12.3: taken by every driver since."""

if __name__ == "__main__":
    calls = {}
    for name, kernel, signature, constants in KERNELS:
        divides = {(place,): [["tt.divisibility", 16]] for place in range(len(signature) * (name in ALIGNED))}
        source = ASTSource(kernel, {**signature, **dict.fromkeys(constants, "constexpr")}, constants, divides)
        target = GPUTarget("cuda", int(name[-2:]), 32)
        made = triton.compile(source, target=target, options={"num_warps": 4, "ptx_version": PTX_VERSION})
        Path(f"triton.{name}.ptx").write_text(made.asm["ptx"])
        threads, shared = 32 * made.metadata.num_warps, made.metadata.shared
        calls[name] = {"kernel": kernel.__name__, "signature": signature, "threads": threads, "shared": shared}
    Path("triton.json").write_text(json.dumps(calls, indent=1) + "\n")
