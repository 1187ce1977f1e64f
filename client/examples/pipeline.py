"""Process batches with two modules in two streams: `python -m gpulease.client.examples.pipeline`.

The first stream copies a batch in and filters it. The second stream sums the filtered batch. While the second works on
a batch, the first already prepares the next one.
"""

import numpy as np

from gpulease.client import GpuBuilder, GpuSession

FILTER = """
extern "C" __global__ void smooth(const float *x, float *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = 0.5f * x[i] + 0.25f * (x[max(i - 1, 0)] + x[min(i + 1, n - 1)]);
}
"""
SUM = """
extern "C" __global__ void sum(const float *y, float *sums, int batch, int n) {
    float mine = 0;
    for (int i = threadIdx.x; i < n; i += 32) mine += y[i];
    for (int d = 16; d; d >>= 1) mine += __shfl_xor_sync(~0u, mine, d);
    if (threadIdx.x == 0) sums[batch] = mine;
}
"""


def run(batches: int = 6, n: int = 5000) -> float:
    """Return the largest error of the batches' sums, relative to the largest."""
    signals = np.random.default_rng(1).random((batches, n), np.float32)
    with GpuBuilder().min_vram("32MiB").acquire() as lease, GpuSession(lease) as session:
        first, second = session.compile(FILTER), session.compile(SUM)
        sums = session.zeros(batches, np.float32)
        # Make two places, so that one can be filled while the other is summed.
        places = [(session.zeros(n, np.float32), session.zeros(n, np.float32)) for _ in range(2)]
        with session.stream() as filtering, session.stream() as summing:
            for batch in range(batches):
                x, y = places[batch % 2]
                x.assign(signals[batch], stream=filtering)
                session.launch(first, "smooth", [-(-n // 256)], [256], [x, y, n], stream=filtering)
                # The sum of a batch waits for the filter in the other stream.
                summing.wait_for(filtering)
                session.launch(second, "sum", [1], [32], [y, sums, batch, n], stream=summing)
                # Reuse the place only after the sum.
                filtering.wait_for(summing)
        result = sums.numpy()
    # Compute the same in numpy, with repeated edges as in the kernel.
    padded = np.pad(signals, ((0, 0), (1, 1)), mode="edge")
    expected = (0.5 * signals + 0.25 * (padded[:, :-2] + padded[:, 2:])).sum(1)
    return float(np.abs(result - expected).max() / np.abs(expected).max())


if __name__ == "__main__":
    print(f"largest error {run():.1e}")
