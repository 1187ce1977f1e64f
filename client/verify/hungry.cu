// Kernels that make a driver take memory by itself: for `gpulease verify` on a card.
//
// Compiled, from this folder, by
//     nvcc -ptx -arch=compute_75 -O3 -o hungry.ptx hungry.cu
// and kept exactly as nvcc wrote it.
#include <cstdlib>

template <int BYTES> __device__ __forceinline__ void spread(unsigned* x, unsigned n)
{
    volatile char local[BYTES];
    for (unsigned i = 0; i < n; i++) local[i * 977u % BYTES] = (char)i;
    x[0] = local[n % BYTES];
}

extern "C" {

__global__ void from_heap(unsigned long long* x, unsigned long long bytes)
{
    char* p = (char*)malloc(bytes);
    if (p) *(volatile char*)p = 1;
    x[0] = (unsigned long long)p;
}

__global__ void local_16k(unsigned* x, unsigned n) { spread<16384>(x, n); }

__global__ void local_64k(unsigned* x, unsigned n) { spread<65536>(x, n); }

}
