"""Numba kernels as in its documentation, each with numpy's result."""

import math
from typing import Any, Final

import numpy as np
from numba import cuda, float32, int32

from .trial import Cases, Trial

CASES: Final = Cases("numba")
case = CASES.add


def run(t: Trial, function: Any, place: Any, *args: Any) -> list[Any]:
    """Compile and launch a function. Returns the contents of its arrays afterwards."""
    given = [t.session.array(value) if isinstance(value, np.ndarray) else value for value in args]
    kernel = t.session.kernel(function)
    with t.compiling():
        kernel._kernel.prepared(place, given, {})
    with t.launching():
        kernel[place](*given)
        t.session.sync()
    return [value.numpy() for value in given if hasattr(value, "numpy")]


@case()
def saxpy(t: Trial) -> Any:
    def kernel(a, x, y):
        i = cuda.grid(1)
        if i < x.size:
            y[i] += a * x[i]

    x, y = t.floats(1000), t.floats(1000)
    return [(run(t, kernel, (4, 256), np.float32(2), x, y)[1], 2 * x + y)]


@case("shared")
def reduction(t: Trial) -> Any:
    def kernel(x, total):
        held = cuda.shared.array(128, float32)
        i = cuda.threadIdx.x
        held[i] = x[cuda.grid(1)]
        step = 64
        while step:
            cuda.syncthreads()
            if i < step:
                held[i] += held[i + step]
            step //= 2
        if i == 0:
            cuda.atomic.add(total, 0, held[0])

    x = t.floats(1024) + 1
    return [(run(t, kernel, (8, 128), x, np.zeros(1, np.float32))[1], [x.sum()])]


@case("shared, 2-d")
def matmul(t: Trial) -> Any:
    def kernel(a, b, c):
        left, right = cuda.shared.array((8, 8), float32), cuda.shared.array((8, 8), float32)
        x, y = cuda.grid(2)
        i, j = cuda.threadIdx.x, cuda.threadIdx.y
        total = float32(0)
        for tile in range(a.shape[1] // 8):
            left[i, j], right[i, j] = a[x, j + tile * 8], b[i + tile * 8, y]
            cuda.syncthreads()
            for k in range(8):
                total += left[i, k] * right[k, j]
            cuda.syncthreads()
        c[x, y] = total

    a, b = t.floats(32, 48), t.floats(48, 32)
    return [(run(t, kernel, ((4, 4), (8, 8)), a, b, np.zeros((32, 32), np.float32))[2], a @ b)]


@case("strides")
def strided_views(t: Trial) -> Any:
    def kernel(x, y):
        i, j = cuda.grid(2)
        if i < x.shape[0] and j < x.shape[1]:
            y[i, j] = x[i, j] * 2

    x = t.floats(20, 30)
    given, out = t.session.array(x), t.session.zeros((10, 10), np.float32)
    with t.launching():
        t.session.kernel(kernel)[(1, 1), (16, 16)](given[::2, ::-3], out)
    return [(out.numpy(), x[::2, ::-3] * 2)]


@case("special functions, doubles", tolerance=1e-9)
def mathematics(t: Trial) -> Any:
    def kernel(x):
        i = cuda.grid(1)
        if i < x.size:
            x[i] = math.sin(x[i]) * math.exp(x[i]) + math.sqrt(abs(x[i])) + math.atan2(x[i], 2.0)

    x = t.floats(500).astype(np.float64)
    wanted = np.sin(x) * np.exp(x) + np.sqrt(abs(x)) + np.arctan2(x, 2)
    return [(run(t, kernel, (2, 256), x)[0], wanted)]


@case("complex numbers")
def julia_set(t: Trial) -> Any:
    def kernel(out, c, size):
        x, y = cuda.grid(2)
        if x < size and y < size:
            z = complex(3 * x / size - 1.5, 3 * y / size - 1.5)
            steps = 0
            while steps < 50 and z.real * z.real + z.imag * z.imag < 4:
                z = z * z + c
                steps += 1
            out[x, y] = steps

    n, c = 32, -0.7 + 0.27j
    axis = 3 * np.arange(n) / n - 1.5
    z, steps = axis[:, None] + 1j * axis[None, :], np.zeros((n, n), int)
    for _ in range(50):
        inside = z.real**2 + z.imag**2 < 4
        z = np.where(inside, z * z + c, z)
        steps += inside
    found = run(t, kernel, ((2, 2), (16, 16)), np.zeros((n, n), np.int32), c, n)[0]
    return [(np.mean(found != steps) < 0.02, True)]


@case("atomics")
def histogram(t: Trial) -> Any:
    def kernel(x, bins):
        for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
            cuda.atomic.add(bins, x[i], 1)

    x = t.integers(32, 3000)
    return [(run(t, kernel, (2, 128), x, np.zeros(32, np.int32))[1], np.bincount(x, minlength=32))]


@case("local memory, tuples")
def local_polynomial(t: Trial) -> Any:
    def kernel(x, weights):
        held = cuda.local.array(4, float32)
        i = cuda.grid(1)
        if i < x.size:
            for k in range(4):
                held[k] = weights[k]
            total = float32(0)
            for k in range(4):
                total = total * x[i] + held[3 - k]
            x[i] = total

    x = t.floats(100)
    wanted = np.polyval([4, 3, 2, 1], x)
    return [(run(t, kernel, (1, 128), x, (1.0, 2.0, 3.0, 4.0))[0], wanted)]


@case("dynamic shared")
def dynamic_reverse(t: Trial) -> Any:
    def kernel(x):
        held = cuda.shared.array(0, int32)
        i = cuda.threadIdx.x
        held[i] = x[i]
        cuda.syncthreads()
        x[i] = held[x.size - 1 - i]

    x = t.integers(1000, 256)
    return [(run(t, kernel, (1, 256, 0, 1024), x)[0], x[::-1])]


@case("shuffle")
def warp_sum(t: Trial) -> Any:
    def kernel(x, out):
        value = x[cuda.grid(1)]
        step = 16
        while step:
            value += cuda.shfl_down_sync(0xFFFFFFFF, value, step)
            step //= 2
        if cuda.laneid == 0:
            out[cuda.blockIdx.x] = value

    x = t.integers(100, 320)
    return [(run(t, kernel, (10, 32), x, np.zeros(10, np.int32))[1], x.reshape(10, 32).sum(1))]
