// The example model of `gpulease serve gateway`: y = 2 x + 1 of 32-bit floats.
//
// Compiled, from this folder, by
//     nvcc -ptx -arch=compute_75 -O3 -o affine.ptx affine.cu
// and kept exactly as nvcc wrote it.

// One thread an element; as many elements as fit both input and output.
extern "C" __global__ void affine(const float* input, unsigned long long input_bytes,
                                  float* output, unsigned long long output_bytes)
{
    unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (4 * i + 4 <= input_bytes && 4 * i + 4 <= output_bytes) output[i] = 2.0f * input[i] + 1.0f;
}
