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


KERNELS: Final = (
    (add, {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}, {"BLOCK": 256}),
    (softmax, {"x": "*fp32", "out": "*fp32", "columns": "i32"}, {"BLOCK": 128}),
    (
        layernorm,
        {"x": "*fp16", "gain": "*fp32", "bias": "*fp32", "out": "*fp16", "columns": "i32", "eps": "fp32"},
        {"BLOCK": 256},
    ),
    (
        matmul,
        {"a": "*fp16", "b": "*fp16", "c": "*fp32", "m": "i32", "n": "i32", "depth": "i32"},
        {"M": 32, "N": 32, "K": 32},
    ),
    (
        attention,
        {"q": "*fp16", "k": "*fp16", "v": "*fp16", "out": "*fp16", "tokens": "i32", "scale": "fp32"},
        {"ROWS": 16, "COLUMNS": 32, "WIDTH": 32},
    ),
)

PTX_VERSION: Final = 83
"""Of CUDA 12.3: taken by every driver since."""

if __name__ == "__main__":
    calls = {}
    for capability, kernels in ((80, KERNELS), (90, KERNELS[-1:])):
        for kernel, signature, constants in kernels:
            source = ASTSource(kernel, {**signature, **dict.fromkeys(constants, "constexpr")}, constants)
            options = {"num_warps": 4, "ptx_version": PTX_VERSION}
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
            name = f"triton.{kernel.__name__}.sm{capability}"
            Path(f"{name}.ptx").write_text(made.asm["ptx"])
            threads, shared = 32 * made.metadata.num_warps, made.metadata.shared
            calls[name] = {"signature": signature, "threads": threads, "shared": shared}
    Path("triton.json").write_text(json.dumps(calls, indent=1) + "\n")
