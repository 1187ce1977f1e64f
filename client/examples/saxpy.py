"""Add a vector's multiple to another in CUDA C: `python -m gpulease.client.examples.saxpy`."""

import numpy as np

from gpulease.client import GpuBuilder, GpuSession

SOURCE = """
extern "C" __global__ void saxpy(float a, const float *x, float *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i];
}
"""


def run(n: int = 10_000) -> float:
    """Return the largest error of `2 x + y` against numpy."""
    x, y = np.arange(n, dtype=np.float32), np.ones(n, np.float32)
    with GpuBuilder().min_vram("16MiB").acquire() as lease, GpuSession(lease) as session:
        module, total = session.compile(SOURCE), session.array(y)
        session.launch(module, "saxpy", [-(-n // 256)], [256], [2.0, session.array(x), total, n])
        result = total.numpy()
    return float(np.abs(result - (2 * x + y)).max())


if __name__ == "__main__":
    print(f"largest error {run():.1e}")
