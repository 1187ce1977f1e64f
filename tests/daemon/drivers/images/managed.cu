// With nvcc 13.0, in this folder:
//   nvcc -ptx -arch=sm_75 managed.cu -o managed.sm75.ptx
//   nvcc -cubin -arch=sm_75 managed.cu -o managed.sm75.cubin   (and sm_90)
//   nvcc -fatbin -arch=sm_75 managed.cu -o managed.sm75.fatbin
extern "C" {
__device__ int plain;
__managed__ int counter;
__global__ void count(int *p) { p[0] = ++counter + plain; }
}
