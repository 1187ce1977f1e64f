// Kernels that break every rule, and one that keeps them: for `gpulease verify`.
//
// Compiled, from this folder, by
//     nvcc -ptx -arch=compute_75 -O3 -o kernels.ptx kernels.cu
// and kept exactly as nvcc wrote it.
#include <cassert>

__device__ __noinline__ int sink(volatile int* x, int n)
{
    volatile int frame[64];
    frame[n & 63] = n;
    int got = sink(x, n + 1);
    *x = got;
    return got + frame[n & 63];
}

extern "C" {

__global__ void scale(float* x, unsigned n, float a)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= a;
}

__global__ void fill(unsigned* x, unsigned long long n, unsigned v)
{
    unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) x[i] = v;
}

__global__ void count_set(const unsigned* x, unsigned long long n, unsigned* count)
{
    unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    unsigned found = 0;
    for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) found += x[i] != 0;
    if (found) atomicAdd(count, found);
}

__global__ void stray(unsigned* x, unsigned long long byte_offset) { *(unsigned*)((char*)x + byte_offset) = 1; }

__global__ void misaligned(unsigned* x) { *(volatile unsigned*)((char*)x + 1) = 1; }

__global__ void trapped(unsigned* x)
{
    if (*(volatile unsigned*)x == 0) __trap();
}

__global__ void asserted(unsigned* x) { assert(*(volatile unsigned*)x != 0); }

__global__ void beyond_shared(unsigned* x, unsigned n)
{
    extern __shared__ unsigned shared[];
    *(volatile unsigned*)(shared + n) = 1;
    x[0] = *(volatile unsigned*)shared;
}

__global__ void sinking(int* x) { x[0] = sink(x, 0); }

__global__ void endless(unsigned* flag)
{
    while (*(volatile unsigned*)flag == 0) { }
}

}
