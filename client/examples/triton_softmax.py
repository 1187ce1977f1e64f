"""Take the softmax of each row in Triton: `python -m gpulease.client.examples.triton_softmax`."""

import numpy as np
import triton
import triton.language as tl

from gpulease.client import GpuBuilder, GpuSession


@triton.jit
def softmax(y, x, columns, BLOCK: tl.constexpr):
    """Take one row's softmax in one program. BLOCK is a power of two that is not less than the row's length."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * columns + at, mask=at < columns, other=-float("inf"))
    powers = tl.exp(values - tl.max(values, axis=0))
    tl.store(y + row * columns + at, powers / tl.sum(powers, axis=0), mask=at < columns)


def run(rows: int = 5, columns: int = 100) -> float:
    """Take the softmax on the card and in numpy; returns the largest difference."""
    batch = np.random.default_rng(1).standard_normal((rows, columns), np.float32)
    with GpuBuilder().min_vram("16MiB").acquire() as lease, GpuSession(lease) as session:
        x, y = session.array(batch), session.zeros(batch.shape, np.float32)
        session.kernel(softmax)[(rows,)](y, x, columns, BLOCK=triton.next_power_of_2(columns), num_warps=2)
        result = y.numpy()
    # Subtract the maximum first, as in the kernel, so that no power overflows.
    powers = np.exp(batch - batch.max(axis=1, keepdims=True))
    return float(np.abs(result - powers / powers.sum(axis=1, keepdims=True)).max())


if __name__ == "__main__":
    print(f"largest error {run():.1e}")
