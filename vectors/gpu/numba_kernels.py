"""Kernels of numba-cuda, as it writes them: for tests of what a lease must be able to run.

Compiled by numba-cuda 0.30.4 (numba 0.68.1, CUDA 13.0's libNVVM), in this folder and with no GPU, by
    python numba_kernels.py
and kept exactly as it wrote them.
"""

from pathlib import Path

from numba import cuda, float32, int32, int64, void


def saxpy(n, a, x, y):
    """Add a x to y for the first n."""
    i = cuda.grid(1)
    if i < n:
        y[i] = a * x[i] + y[i]


def steps(x, out):
    """How many of Collatz's steps it takes from each number to 1."""
    i = cuda.grid(1)
    if i < x.size:
        n = x[i]
        count = 0
        while n != 1:
            n = n // 2 if n % 2 == 0 else 3 * n + 1
            count += 1
        out[i] = count


def reverse(x):
    """Each block's elements in the other order, through shared memory."""
    held = cuda.shared.array(128, float32)
    i = cuda.threadIdx.x
    held[i] = x[i]
    cuda.syncthreads()
    x[i] = held[cuda.blockDim.x - 1 - i]


def report(x):
    """Print each element."""
    i = cuda.grid(1)
    print("value", i, x[i])


if __name__ == "__main__":
    for function, signature in (
        (saxpy, void(int32, float32, float32[:], float32[:])),
        (steps, void(int64[:], int64[:])),
        (reverse, void(float32[:])),
        (report, void(float32[:])),
    ):
        text, _ = cuda.compile_ptx(function, signature, cc=(8, 0))
        Path(f"numba.{function.__name__}.sm80.ptx").write_text(text)
