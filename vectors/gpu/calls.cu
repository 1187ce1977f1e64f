// Functions, pointers to them, printing and assertions: for tests of what a kernel may call.
//
// Compiled, from this folder, for each architecture (75, 80, 90) by
//     nvcc -ptx -arch=compute_75 -O3 -o calls.sm75.ptx calls.cu
// and once more with -G instead of -O3 to calls.debug.sm75.ptx; kept exactly as nvcc wrote them.

#include <cassert>
#include <cstdio>

struct Mixed { int a; double b; signed char c[5]; };

__device__ __noinline__ int fib(int n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }

__device__ int is_odd(int n);
__device__ __noinline__ int is_even(int n) { return n == 0 ? 1 : is_odd(n - 1); }
__device__ __noinline__ int is_odd(int n) { return n == 0 ? 0 : is_even(n - 1); }

__device__ __noinline__ Mixed change(Mixed s, int k)
{
    s.a += k;
    s.b *= k;
    s.c[k & 3] += 1;
    return s;
}

typedef int (*Operation)(int, int);
__device__ int add(int a, int b) { return a + b; }
__device__ int multiply(int a, int b) { return a * b; }
__device__ Operation operations[2] = {add, multiply};
__device__ int numbers[4] = {1, 2, 3, 4};
__device__ int* pointers[2] = {numbers + 1, &numbers[3]};

extern "C" __global__ void recursion(int* out, int n) { out[threadIdx.x] = fib(n + threadIdx.x % 3) * 2 + is_even(n + threadIdx.x); }

extern "C" __global__ void structures(int* out, int n)
{
    int i = threadIdx.x;
    Mixed s = {i, 1.5 * i, {1, 2, 3, 4, 5}};
    s = change(s, n);
    out[i] = s.a + (int)s.b + s.c[n & 3];
}

extern "C" __global__ void pointed(int* out, int n) { out[threadIdx.x] = operations[threadIdx.x & 1](threadIdx.x, n) + *pointers[threadIdx.x & 1]; }

// A function with a barrier, which can't be called in the usual way.
__device__ __noinline__ int turned(int v)
{
    __shared__ int held[64];
    held[threadIdx.x] = v;
    __syncthreads();
    int found = held[blockDim.x - 1 - threadIdx.x];
    __syncthreads();
    return found;
}

extern "C" __global__ void meeting(int* out) { out[threadIdx.x] = turned(turned(threadIdx.x) * 2) + turned(1); }

extern "C" __global__ void print(int n)
{
    char text[4] = "abc";
    text[0] += threadIdx.x;
    int count = printf("%d %s %5.2f|%-4lld|%c\n", n, text, 0.5 * threadIdx.x, (long long)n << 33, 'x');
    printf("%d values\n", count);
}

extern "C" __global__ void asserted(int n) { assert(threadIdx.x < n && "too many"); }

// Endless, but for the stack. The volatile store keeps the compiler from making it a loop.
__device__ __noinline__ int deep(volatile int* p, int n)
{
    int got = deep(p, n + 1);
    *p = got;
    return got + n;
}
extern "C" __global__ void overflow(int* p) { *p = deep(p, 0); }

extern "C" __global__ void choose(int* out)
{
    int i = threadIdx.x;
    switch (i & 7) {
    case 0: out[i] = 5; break;
    case 1: out[i] = i * 3; break;
    case 2: out[i] += 7; break;
    case 3: out[i] = i - 9;
    case 4: out[i] ^= 1; break;
    case 5: out[i] = i / 3; break;
    default: out[i] = -i;
    }
}
