// What `gpulease bench` measures kernels with: one that moves memory, one that computes, two that work together.
//
// Compiled, from this folder, by
//     nvcc -ptx -arch=compute_75 -O3 -o kernels.ptx kernels.cu
// and kept exactly as nvcc wrote it.
#include <math_constants.h>

constexpr int TILE = 16;
constexpr unsigned ALL = 0xffffffffu;

// y[i] += a * x[i] for i < n; one thread an element.
extern "C" __global__ void saxpy(float* __restrict__ y, const float* __restrict__ x, unsigned n, float a)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i];
}

// c = a b for square matrices of n rows, a multiple of the tile; blocks of TILE x TILE threads.
extern "C" __global__ void matmul(float* __restrict__ c, const float* __restrict__ a, const float* __restrict__ b,
                                  unsigned n)
{
    __shared__ float left[TILE][TILE], right[TILE][TILE];
    unsigned x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * TILE + y, column = blockIdx.x * TILE + x;
    float sum = 0.0f;
    for (unsigned start = 0; start < n; start += TILE) {
        left[y][x] = a[row * n + start + x];
        right[y][x] = b[(start + y) * n + column];
        __syncthreads();
        for (int k = 0; k < TILE; k++) sum += left[y][k] * right[k][x];
        __syncthreads();
    }
    c[row * n + column] = sum;
}

// The softmax of each row of n values; a block a row, with a float of shared memory for each thread.
extern "C" __global__ void softmax(float* __restrict__ out, const float* __restrict__ in, unsigned n)
{
    extern __shared__ float part[];
    const float* row = in + (size_t)blockIdx.x * n;
    unsigned t = threadIdx.x;
    float most = -CUDART_INF_F, sum = 0.0f;
    for (unsigned i = t; i < n; i += blockDim.x) most = fmaxf(most, row[i]);
    part[t] = most;
    __syncthreads();
    for (unsigned half = blockDim.x / 2; half; half /= 2) {
        if (t < half) part[t] = fmaxf(part[t], part[t + half]);
        __syncthreads();
    }
    most = part[0];
    __syncthreads();
    for (unsigned i = t; i < n; i += blockDim.x) sum += expf(row[i] - most);
    part[t] = sum;
    __syncthreads();
    for (unsigned half = blockDim.x / 2; half; half /= 2) {
        if (t < half) part[t] += part[t + half];
        __syncthreads();
    }
    sum = part[0];
    for (unsigned i = t; i < n; i += blockDim.x) out[(size_t)blockIdx.x * n + i] = expf(row[i] - most) / sum;
}

// A value's sum over the block, of at most 32 whole warps, for all its threads.
__device__ __forceinline__ float block_sum(float value, float* part)
{
    for (int d = 16; d; d /= 2) value += __shfl_xor_sync(ALL, value, d);
    __syncthreads();
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = value;
    __syncthreads();
    value = threadIdx.x % 32 < blockDim.x / 32 ? part[threadIdx.x % 32] : 0.0f;
    for (int d = 16; d; d /= 2) value += __shfl_xor_sync(ALL, value, d);
    return value;
}

// Each row of n values with its mean taken off, divided by its deviation, times a weight, plus a bias.
extern "C" __global__ void layernorm(float* __restrict__ out, const float* __restrict__ in,
                                     const float* __restrict__ weight, const float* __restrict__ bias, unsigned n)
{
    __shared__ float part[32];
    const float* row = in + (size_t)blockIdx.x * n;
    float sum = 0.0f, squares = 0.0f;
    for (unsigned i = threadIdx.x; i < n; i += blockDim.x) sum += row[i];
    float mean = block_sum(sum, part) / n;
    for (unsigned i = threadIdx.x; i < n; i += blockDim.x) squares += (row[i] - mean) * (row[i] - mean);
    float scale = rsqrtf(block_sum(squares, part) / n + 1e-5f);
    for (unsigned i = threadIdx.x; i < n; i += blockDim.x)
        out[(size_t)blockIdx.x * n + i] = (row[i] - mean) * scale * weight[i] + bias[i];
}
