"""Solve a linear system by conjugate gradients on the card: `python -m gpulease.client.examples.solver`.

The matrix and all vectors stay on the card, and each step is one launch of a recorded graph. The host reads the
residual only now and then.
"""

import numpy as np

from gpulease.client import GpuBuilder, GpuSession

SOURCE = """
// Numbers of one step: [0] r.r, [1] p.Ap, [2] the next r.r.
extern "C" __global__ void product(const float *a, const float *p, float *ap, float *numbers, int n) {
    float sum = 0;
    for (int i = threadIdx.x; i < n; i += 32) sum += a[blockIdx.x * n + i] * p[i];
    for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
    if (threadIdx.x == 0) { ap[blockIdx.x] = sum; atomicAdd(&numbers[1], sum * p[blockIdx.x]); }
}
extern "C" __global__ void advance(float *x, float *r, const float *p, const float *ap, float *numbers, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float alpha = numbers[0] / numbers[1];
    x[i] += alpha * p[i];
    r[i] -= alpha * ap[i];
    atomicAdd(&numbers[2], r[i] * r[i]);
}
extern "C" __global__ void turn(const float *r, float *p, float *numbers, int n) {
    float beta = numbers[2] / numbers[0];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) p[i] = r[i] + beta * p[i];
    if (threadIdx.x == 0) { numbers[0] = numbers[2]; numbers[1] = numbers[2] = 0; }
}
"""


def run(n: int = 128, most_steps: int = 200, look_every: int = 10) -> float:
    """Return the largest error of the solution."""
    # Make a symmetric, positive definite matrix, and a right side with a known solution.
    random = np.random.default_rng(1)
    half = random.standard_normal((n, n)).astype(np.float32)
    matrix, expected = half @ half.T / n + np.eye(n, dtype=np.float32), random.standard_normal(n).astype(np.float32)
    right = matrix @ expected
    with GpuBuilder().min_vram("32MiB").acquire() as lease, GpuSession(lease) as session:
        module = session.compile(SOURCE)
        # Everything stays on the card: the matrix, the vectors, and the three numbers of a step.
        a, x = session.array(matrix), session.zeros(n, np.float32)
        r, p, ap = session.array(right), session.array(right), session.zeros(n, np.float32)
        numbers = session.array(np.array([right @ right, 0, 0], np.float32))
        blocks = [-(-n // 128)]
        # One step is three launches; recorded, it is a single request.
        with session.record() as step:
            session.launch(module, "product", [n], [32], [a, p, ap, numbers, n])
            session.launch(module, "advance", blocks, [128], [x, r, p, ap, numbers, n])
            session.launch(module, "turn", [1], [256], [r, p, numbers, n])
        # Read the residual only now and then, because reading waits for the card.
        for _ in range(0, most_steps, look_every):
            for _ in range(look_every):
                step.launch()
            if numbers.numpy()[0] < 1e-10:
                break
        result = x.numpy()
    return float(np.abs(result - expected).max())


if __name__ == "__main__":
    print(f"largest error {run():.1e}")
