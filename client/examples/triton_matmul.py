"""Multiply matrices of halves on tensor cores, in Triton: `python -m gpulease.client.examples.triton_matmul`."""

import numpy as np
import triton
import triton.language as tl

from gpulease.client import GpuBuilder, GpuSession


@triton.jit
def matmul(c, a, b, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Compute one tile of C = A B in one program. All three are stored by rows."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)[:, None]
    columns = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        across, down = start + tl.arange(0, BK)[None, :], start + tl.arange(0, BK)[:, None]
        left = tl.load(a + rows * K + across, mask=(rows < M) & (across < K), other=0.0)
        right = tl.load(b + down * N + columns, mask=(down < K) & (columns < N), other=0.0)
        total = tl.dot(left, right, total)
    tl.store(c + rows * N + columns, total, mask=(rows < M) & (columns < N))


def run(m: int = 50, n: int = 70, k: int = 40) -> float:
    """Return the largest error against numpy, in units of the largest result."""
    random = np.random.default_rng(1)
    left, right = random.standard_normal((m, k)).astype("f2"), random.standard_normal((k, n)).astype("f2")
    with GpuBuilder().min_vram("16MiB").acquire() as lease, GpuSession(lease) as session:
        a, b, c = session.array(left), session.array(right), session.zeros((m, n), np.float32)
        kernel = session.kernel(matmul)

        # Compute the grid from the arguments, as in Triton itself.
        def tiles(meta):
            return triton.cdiv(meta["M"], meta["BM"]), triton.cdiv(meta["N"], meta["BN"])

        kernel[tiles](c, a, b, m, n, k, BM=32, BN=32, BK=32, num_warps=4, num_stages=2)
        result = c.numpy()
    # numpy multiplies the same halves in single precision.
    expected = left.astype(np.float32) @ right.astype(np.float32)
    return float(np.abs(result - expected).max() / np.abs(expected).max())


if __name__ == "__main__":
    print(f"largest error {run():.1e}")
