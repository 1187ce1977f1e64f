// Kernels on numbers of fewer than 32 bits: for tests against a real card.
//
// Compiled, from this folder, by
//     for cc in 75 80 90; do nvcc -ptx -arch=compute_$cc -O3 -o narrow.sm$cc.ptx narrow.cu; done
// and once with -G instead of -O3 for compute_90 to narrow.debug.sm90.ptx; kept exactly as nvcc wrote them.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

constexpr unsigned ALL = 0xffffffffu;

__device__ __forceinline__ float warp_sum(float v)
{
    for (int d = 16; d; d /= 2) v += __shfl_xor_sync(ALL, v, d);
    return v;
}

extern "C" {

__global__ void gelu_half(const __half* __restrict__ x, __half* __restrict__ y, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v = __half2float(x[i]);
    y[i] = __float2half(0.5f * v * (1.f + tanhf(0.79788456f * (v + 0.044715f * v * v * v))));
}

// Two halves at a time: a polynomial, comparisons, and their selection. A product is kept from becoming part of an fma.
__global__ void polynomial_half2(const __half2* __restrict__ x, __half2* __restrict__ y, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    __half2 v = x[i], p = __hfma2(v, v, __float2half2_rn(1.f));
    p = __hsub2(__hmul2_rn(p, v), __habs2(v));
    y[i] = __hfma2(__hgt2(v, __float2half2_rn(0.5f)), p, __hmin2(v, p));
}

// Turns pairs of each token's numbers by an angle that falls with their place.
__global__ void rope_bf16(__nv_bfloat16* x, int tokens, int width, float base)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x, half = width / 2;
    if (i >= tokens * half) return;
    int token = i / half, d = i % half;
    float s, c, angle = token * powf(base, -2.f * d / width);
    sincosf(angle, &s, &c);
    __nv_bfloat16* at = x + (size_t)token * width + d;
    float a = __bfloat162float(at[0]), b = __bfloat162float(at[half]);
    at[0] = __float2bfloat16(a * c - b * s);
    at[half] = __float2bfloat16(a * s + b * c);
}

// y = W x for bytes with a half as scale for each 32 of a row.
__global__ void quantised_gemv(const signed char* __restrict__ w, const __half* __restrict__ scales,
                               const float* __restrict__ x, float* __restrict__ y, int k)
{
    __shared__ float parts[32];
    int t = threadIdx.x;
    float sum = 0;
    for (int i = t; i < k; i += blockDim.x) {
        size_t at = (size_t)blockIdx.x * k + i;
        sum += (float)w[at] * __half2float(scales[at / 32]) * x[i];
    }
    sum = warp_sum(sum);
    if (t % 32 == 0) parts[t / 32] = sum;
    __syncthreads();
    if (t == 0) {
        float all = 0;
        for (int p = 0; p < blockDim.x / 32; p++) all += parts[p];
        y[blockIdx.x] = all;
    }
}
}
