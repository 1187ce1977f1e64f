// Kernels that use several families at once: warps and barriers beside approximate functions, calls and printing.
//
// Compiled, from this folder, by
//     nvcc -ptx -arch=compute_75 -O3 -o together.sm75.ptx together.cu
// and once more with -G instead of -O3 to together.debug.sm75.ptx; kept exactly as nvcc wrote them.
#include <cassert>
#include <cstdio>
#include <cuda_fp16.h>
#include <math_constants.h>

constexpr unsigned ALL = 0xffffffffu;

__device__ __forceinline__ float warp_sum(float v)
{
    for (int d = 16; d; d /= 2) v += __shfl_xor_sync(ALL, v, d);
    return v;
}

// A function at whose instructions threads wait, called more than once.
__device__ __noinline__ float block_sum(float v)
{
    __shared__ float sums[32];
    int t = threadIdx.x;
    v = warp_sum(v);
    __syncthreads();
    if (t % 32 == 0) sums[t / 32] = v;
    __syncthreads();
    float all = 0;
    for (int k = 0; k < (blockDim.x + 31) / 32; k++) all += sums[k];
    return all;
}

__device__ __noinline__ int fib(int n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }

// Endless, but for the stack. The volatile store keeps the compiler from making it a loop.
__device__ __noinline__ int deep(volatile int* p, int n)
{
    int got = deep(p, n + 1);
    *p = got;
    return got + n;
}

__device__ __noinline__ bool take(int* lock) { return atomicCAS(lock, 0, 1) == 0; }

extern "C" {

__global__ void layernorm(const float* x, const float* gain, const float* bias, float* y, int n)
{
    const float* row = x + blockIdx.x * n;
    float s = 0, q = 0;
    for (int k = threadIdx.x; k < n; k += blockDim.x) s += row[k];
    float mean = block_sum(s) / n;
    for (int k = threadIdx.x; k < n; k += blockDim.x) q += (row[k] - mean) * (row[k] - mean);
    float scale = rsqrtf(block_sum(q) / n + 1e-5f);
    for (int k = threadIdx.x; k < n; k += blockDim.x) y[blockIdx.x * n + k] = (row[k] - mean) * scale * gain[k] + bias[k];
}

// Rows of halves; the block's greatest element by an atomic in shared memory, as bits of a float of at least 0.
__global__ void softmax(const __half* x, __half* y, int n)
{
    __shared__ int most;
    const __half* row = x + blockIdx.x * n;
    float greatest = 0, sum = 0;
    if (threadIdx.x == 0) most = 0;
    __syncthreads();
    for (int k = threadIdx.x; k < n; k += blockDim.x) greatest = fmaxf(greatest, __half2float(row[k]));
    atomicMax(&most, __float_as_int(greatest));
    __syncthreads();
    greatest = __int_as_float(most);
    for (int k = threadIdx.x; k < n; k += blockDim.x) sum += __expf(__half2float(row[k]) - greatest);
    sum = block_sum(sum);
    for (int k = threadIdx.x; k < n; k += blockDim.x)
        y[blockIdx.x * n + k] = __float2half(__expf(__half2float(row[k]) - greatest) / sum);
}

// Recursion, barriers, a warp's vote, and an array in local memory that outlives them.
__global__ void recursion(int* out, int n)
{
    __shared__ int found[64];
    int kept[8], t = threadIdx.x;
    for (int k = 0; k < 8; k++) kept[k] = fib(k + t % 3);
    found[t] = fib(n + t % 5);
    __syncthreads();
    int other = found[blockDim.x - 1 - t];
    unsigned odd = __ballot_sync(ALL, other & 1);
    other += fib(t % 7);
    __syncthreads();
    out[t] = other + kept[(other + n) & 7] * 1000 + __popc(odd) * 100000;
}

// Prints and asserts between what threads wait at.
__global__ void report(int n)
{
    int sum = threadIdx.x;
    for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(ALL, sum, d);
    char text[4] = "abc";
    text[0] += threadIdx.x % 3;
    int count = printf("%d %s\n", sum, text);
    count = __shfl_sync(ALL, count, 3);
    if (threadIdx.x == 0) printf("%d values\n", count);
    assert(__any_sync(ALL, (int)threadIdx.x > n) && "too few");
}

__global__ void overflow(int* p)
{
    int first = __shfl_sync(ALL, p[threadIdx.x], 0);
    *p = deep(p, first);
}

// A lock whose holders wait for one another, taken by a function.
__global__ void locked(int* count, int* lock)
{
    while (!take(lock)) {}
    int seen = *(volatile int*)count;
    for (int k = 0; k < 50000; k++) __threadfence();
    *(volatile int*)count = seen + 1;
    atomicExch(lock, 0);
}
}
