"""Let heat spread over a plate, with a stencil in numba: `python -m gpulease.client.examples.numba_stencil`."""

import numpy as np
from numba import cuda

from gpulease.client import GpuBuilder, GpuSession


def spread(after, before, rate):
    """Move each inner point of the plate towards the mean of its four neighbours, by `rate`."""
    row, column = cuda.grid(2)
    if 0 < row < before.shape[0] - 1 and 0 < column < before.shape[1] - 1:
        around = before[row - 1, column] + before[row + 1, column] + before[row, column - 1] + before[row, column + 1]
        after[row, column] = before[row, column] + rate * (around - 4 * before[row, column])


def run(size: int = 40, steps: int = 20, rate: float = 0.2) -> float:
    """Spread heat on the card and in numpy; returns the largest difference."""
    plate = np.zeros((size, size), np.float32)
    plate[0] = 100
    with GpuBuilder().min_vram("16MiB").acquire() as lease, GpuSession(lease) as session:
        before, after = session.array(plate), session.array(plate)
        # The signature compiles the kernel once, for contiguous arrays.
        kernel = session.kernel(spread, "void(float32[:, ::1], float32[:, ::1], float32)")
        blocks = -(-size // 16)
        for _ in range(steps):
            # Each step reads one array and writes the other. Then the two are exchanged.
            kernel[(blocks, blocks), (16, 16)](after, before, rate)
            before, after = after, before
        result = before.numpy()
    # Compute the same steps in numpy, for comparison.
    for _ in range(steps):
        around = plate[:-2, 1:-1] + plate[2:, 1:-1] + plate[1:-1, :-2] + plate[1:-1, 2:]
        plate[1:-1, 1:-1] += np.float32(rate) * (around - 4 * plate[1:-1, 1:-1])
    return float(np.abs(result - plate).max())


if __name__ == "__main__":
    print(f"largest error {run():.1e}")
