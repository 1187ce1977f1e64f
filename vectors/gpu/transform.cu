// Two elementwise transforms, the product's first demonstration.
//
// Compiled, from this folder, by
//     for cc in 75 80 90; do nvcc -ptx -arch=compute_$cc -O3 -o transform.sm$cc.ptx transform.cu; done
//     nvcc -ptx -G -arch=compute_75 -o transform.debug.sm75.ptx transform.cu
// and kept exactly as nvcc wrote it.

// x[i] *= a for i < n; one thread an element.
extern "C" __global__ void scale(float* x, unsigned int n, float a)
{
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= a;
}

// x[i] += b for i < n; one thread an element.
extern "C" __global__ void bias(float* x, unsigned int n, float b)
{
    unsigned int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += b;
}
