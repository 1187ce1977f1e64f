// Kernels that misbehave on purpose, or keep a device busy: for tests of what a lease must survive.
//
// Compiled, from this folder, by
//     nvcc -ptx -arch=compute_75 -O3 -o faults.sm75.ptx faults.cu
// and kept exactly as nvcc wrote it.

// Stores 1.0f at x + byte_offset, whatever lies there.
extern "C" __global__ void stray_store(float* x, unsigned long long byte_offset)
{
    *(float*)((char*)x + byte_offset) = 1.0f;
}

// Loads from x + byte_offset, whatever lies there, and keeps the value in x[0].
extern "C" __global__ void stray_load(float* x, unsigned long long byte_offset)
{
    x[0] = *(volatile float*)((char*)x + byte_offset);
}

// Stores a float one byte past its natural alignment.
extern "C" __global__ void misaligned(float* x)
{
    *(volatile float*)((char*)x + 1) = 1.0f;
}

// Spins for as long as *flag is 0.
extern "C" __global__ void endless(unsigned int* flag)
{
    while (*(volatile unsigned int*)flag == 0) { }
}

// Keeps each thread busy for n dependent steps; the result goes to x[i], so that nothing can be left out.
extern "C" __global__ void slow(unsigned int* x, unsigned int n)
{
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned int v = i;
#pragma unroll 1
    for (unsigned int k = 0; k < n; k++) v = (v ^ (v >> 7)) * 1664525u + 1013904223u;
    x[i] = v;
}

// x[i] = v for i < n.
extern "C" __global__ void fill_u32(unsigned int* x, unsigned int n, unsigned int v)
{
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = v;
}
