// Models that fail, for the tests of the gateway.
//
// Compiled, from this folder, by
//     nvcc -ptx -arch=compute_75 -O3 -o kernels.ptx kernels.cu
// and kept exactly as nvcc wrote it.

// Says of each byte of output that it was written, then stores far outside of everything.
extern "C" __global__ void stray(const char* input, unsigned long long input_bytes,
                                 char* output, unsigned long long output_bytes)
{
    unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < output_bytes) output[i] = 1;
    if (i == 0) *(volatile char*)(output + (1ull << 40)) = 1;
}

// Runs until its lease ends.
extern "C" __global__ void endless(volatile char* input, unsigned long long input_bytes,
                                   volatile char* output, unsigned long long output_bytes)
{
    while (*output == 0) {}
}
