// Division of integers of 128 bits, whose code takes borrows as carries: for tests of whatever executes it.
//
// Compiled, from this folder, by
//     nvcc -ptx -arch=compute_75 -O3 -o quotients.sm75.ptx quotients.cu
// and kept exactly as nvcc wrote it.

extern "C" __global__ void wide_integers(const unsigned __int128* x, const __int128* y, unsigned __int128* u, __int128* s,
                                         int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned __int128 a = x[i], b = x[i ^ 1] | 1;
    __int128 c = y[i], d = y[i ^ 1] | 1;
    u[i] = a / b + a % b * 5;
    s[i] = c / d - c % d * 3;
}
