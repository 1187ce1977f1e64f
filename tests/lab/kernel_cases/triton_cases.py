"""Triton functions as in its tutorials and in kernels for language models."""

from typing import Any, Final

import numpy as np
import triton
import triton.language as tl

from .trial import Cases, Trial

CASES: Final = Cases("Triton")
case = CASES.add


def run(t: Trial, function: Any, grid: Any, *args: Any, **constants: Any) -> list[Any]:
    """Compile and launch a function. Returns the contents of its arrays afterwards."""
    given = [t.session.array(value) if isinstance(value, np.ndarray) else value for value in args]
    kernel = t.session.kernel(function)
    with t.compiling():
        kernel._kernel.prepared(grid, given, constants)
    with t.launching():
        kernel[grid](*given, **constants)
        t.session.sync()
    return [value.numpy() for value in given if hasattr(value, "numpy")]


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(out + at, tl.load(x + at, mask=mask) + tl.load(y + at, mask=mask), mask=mask)


@case()
def add(t: Trial) -> Any:
    x, y = t.floats(3000), t.floats(3000)
    return [(run(t, add_kernel, (3,), x, y, x, 3000, BLOCK=1024)[2], x + y)]


@triton.jit
def softmax_kernel(y, x, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    v = tl.load(x + row * n + at, mask=at < n, other=-float("inf"))
    p = tl.exp(v - tl.max(v, axis=0))
    tl.store(y + row * n + at, p / tl.sum(p, axis=0), mask=at < n)


@case("shuffle")
def softmax(t: Trial) -> Any:
    x = t.floats(10, 200) * 4
    p = np.exp(x - x.max(1, keepdims=True))
    found = run(t, softmax_kernel, (10,), x, x, 200, BLOCK=256)
    return [(found[0], p / p.sum(1, keepdims=True))]


@triton.jit
def layer_norm_kernel(x, g, b, y, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    mask = at < n
    v = tl.load(x + row * n + at, mask=mask, other=0.0)
    mean = tl.sum(v, axis=0) / n
    d = tl.where(mask, v - mean, 0.0)
    scale = 1 / tl.sqrt(tl.sum(d * d, axis=0) / n + 1e-5)
    tl.store(y + row * n + at, d * scale * tl.load(g + at, mask=mask) + tl.load(b + at, mask=mask), mask=mask)


@case("shared, shuffle")
def layer_norm(t: Trial) -> Any:
    x, g, b = t.floats(12, 300), t.floats(300), t.floats(300)
    wanted = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5) * g + b
    return [(run(t, layer_norm_kernel, (12,), x, g, b, x, 300, BLOCK=512, num_warps=8)[3], wanted)]


@triton.jit
def matmul_kernel(c, a, b, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    columns = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        across, down = start + tl.arange(0, BK)[None, :], start + tl.arange(0, BK)[:, None]
        left = tl.load(a + rows * K + across, mask=(rows < M) & (across < K), other=0.0)
        total = tl.dot(left, tl.load(b + down * N + columns, mask=(down < K) & (columns < N), other=0.0), total)
    tl.store(c + rows * N + columns, total, mask=(rows < M) & (columns < N))


def product(t: Trial, **constants: int) -> Any:
    """Multiply two matrices of halves."""
    a, b = t.floats(60, 70).astype(np.float16), t.floats(70, 50).astype(np.float16)
    grid = (-(-60 // constants["BM"]), -(-50 // constants["BN"]))
    found = run(t, matmul_kernel, grid, np.zeros((60, 50), np.float32), a, b, 60, 50, 70, **constants)
    return [(found[0], a.astype(np.float32) @ b.astype(np.float32))]


@case("tensor cores, shared", tolerance=2e-3)
def matmul_small_tiles(t: Trial) -> Any:
    return product(t, BM=16, BN=16, BK=16, num_warps=1, num_stages=1)


@case("tensor cores, asynchronous copies, dynamic shared", tolerance=2e-3)
def matmul_pipelined(t: Trial) -> Any:
    return product(t, BM=64, BN=64, BK=32, num_warps=4, num_stages=3)


@triton.jit
def attention_kernel(q, k, v, out, n, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    rows, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    queries = tl.load(q + rows[:, None] * D + d[None, :], mask=rows[:, None] < n, other=0.0)
    top = tl.full((BM,), -1e30, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for start in range(0, n, BN):
        at = start + tl.arange(0, BN)
        keys = tl.load(k + at[None, :] * D + d[:, None], mask=at[None, :] < n, other=0.0)
        s = tl.dot(queries, keys) * scale
        s = tl.where((at[None, :] <= rows[:, None]) & (at[None, :] < n), s, -1e30)
        new = tl.maximum(top, tl.max(s, axis=1))
        p = tl.exp(s - new[:, None])
        keep = tl.exp(top - new)
        total = total * keep + tl.sum(p, axis=1)
        values = tl.load(v + at[:, None] * D + d[None, :], mask=at[:, None] < n, other=0.0)
        acc = acc * keep[:, None] + tl.dot(p.to(tl.float16), values)
        top = new
    tl.store(out + rows[:, None] * D + d[None, :], acc / total[:, None], mask=rows[:, None] < n)


@case("tensor cores, shared, online softmax", tolerance=5e-3)
def flash_attention(t: Trial) -> Any:
    q, k, v = (t.floats(80, 32).astype(np.float16) for _ in range(3))
    s = q.astype(np.float32) @ k.astype(np.float32).T * 32**-0.5
    p = np.exp(np.where(np.tri(80, dtype=bool), s, -1e30))
    wanted = p / p.sum(1, keepdims=True) @ v.astype(np.float32)
    out = np.zeros((80, 32), np.float32)
    return [(run(t, attention_kernel, (3,), q, k, v, out, 80, 32**-0.5, D=32, BM=32, BN=32)[3], wanted)]


@triton.jit
def swiglu_kernel(gate, up, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + at, mask=at < n).to(tl.float32)
    tl.store(out + at, g * tl.sigmoid(g) * tl.load(up + at, mask=at < n), mask=at < n)


@case("special functions")
def swiglu(t: Trial) -> Any:
    gate, up = t.floats(2000) * 4, t.floats(2000)
    return [(run(t, swiglu_kernel, (4,), gate, up, up, 2000, BLOCK=512)[2], gate / (1 + np.exp(-gate)) * up)]


@triton.jit
def dropout_kernel(x, out, n, p, seed, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = tl.rand(seed, at) > p
    tl.store(out + at, tl.where(keep, tl.load(x + at, mask=at < n) / (1 - p), 0.0), mask=at < n)


@case("random numbers")
def dropout(t: Trial) -> Any:
    x = t.floats(4000) + 2
    found = run(t, dropout_kernel, (4,), x, x, 4000, 0.25, 123, BLOCK=1024)[1]
    kept = found != 0
    return [(abs(kept.mean() - 0.75) < 0.03, True), (found[kept], x[kept] / 0.75)]


@triton.jit
def cross_entropy_kernel(x, to, loss, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    v = tl.load(x + row * n + at, mask=at < n, other=-float("inf"))
    top = tl.max(v, axis=0)
    target = tl.load(x + row * n + tl.load(to + row))
    tl.store(loss + row, tl.log(tl.sum(tl.exp(v - top), axis=0)) + top - target)


@case("special functions, gather")
def cross_entropy(t: Trial) -> Any:
    x, to = t.floats(16, 500) * 3, t.integers(500, 16)
    p = np.exp(x - x.max(1, keepdims=True))
    wanted = -np.log(p[np.arange(16), to] / p.sum(1))
    return [(run(t, cross_entropy_kernel, (16,), x, to, np.zeros(16, np.float32), 500, BLOCK=512)[2], wanted)]


@triton.jit
def histogram_kernel(x, bins, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(bins + tl.load(x + at, mask=at < n, other=0), 1, mask=at < n)


@case("atomics")
def histogram(t: Trial) -> Any:
    x = t.integers(64, 3000)
    found = run(t, histogram_kernel, (3,), x, np.zeros(64, np.int32), 3000, BLOCK=1024)[1]
    return [(found, np.bincount(x, minlength=64))]


@triton.jit
def scan_kernel(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.cumsum(tl.load(x + at), 0))


@case("scan")
def cumulative_sum(t: Trial) -> Any:
    x = t.integers(100, 1024)
    return [(run(t, scan_kernel, (1,), x, x, BLOCK=1024)[1], np.cumsum(x))]


@triton.jit
def sort_kernel(x, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.sort(tl.load(x + at)))


@case("sort")
def sort(t: Trial) -> Any:
    x = t.floats(256)
    return [(run(t, sort_kernel, (1,), x, BLOCK=256)[0], np.sort(x))]
