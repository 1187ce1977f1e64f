// Matrix products by whole warps: wmma in every type and shape, and mma.sync fed by ldmatrix.
//
// Compiled, from this folder, by
//     nvcc -std=c++20 -ptx -arch=compute_75 -O3 -o matrices.sm75.ptx matrices.cu
//     nvcc -std=c++20 -ptx -arch=compute_80 -O3 -o matrices.sm80.ptx matrices.cu
//     nvcc -std=c++20 -ptx -arch=compute_80 -G -DFEW -o matrices.debug.sm80.ptx matrices.cu
// and kept exactly as nvcc wrote it.
#include <cuda_bf16.h>
#include <mma.h>
#include <type_traits>

using namespace nvcuda;

// D = A B + C by one warp. All matrices are tight; A and B lie as their layouts say, C and D by rows.
template <int M, int N, int K, typename T, typename S, typename LA, typename LB>
__device__ void product(const S* a, const S* b, const auto* c, auto* d) {
    using R = std::remove_pointer_t<decltype(d)>;
    wmma::fragment<wmma::matrix_a, M, N, K, T, LA> fa;
    wmma::fragment<wmma::matrix_b, M, N, K, T, LB> fb;
    wmma::fragment<wmma::accumulator, M, N, K, R> fc;
    wmma::load_matrix_sync(fa, a, std::is_same_v<LA, wmma::row_major> ? K : M);
    wmma::load_matrix_sync(fb, b, std::is_same_v<LB, wmma::row_major> ? N : K);
    wmma::load_matrix_sync(fc, c, N, wmma::mem_row_major);
    wmma::mma_sync(fc, fa, fb, fc);
    wmma::store_matrix_sync(d, fc, N, wmma::mem_row_major);
}

using wmma::col_major;
using wmma::row_major;

extern "C" {

#ifndef FEW
// C = relu(scale * A B + bias) of half matrices in f32, a block of four warps for each 32 x 32, through shared memory.
__global__ void gemm(const half* a, const half* b, const float* bias, float* c, int m, int n, int k, float scale) {
    __shared__ half sa[32][24], sb[16][40];
    __shared__ float sc[4][16][20];
    int warp = threadIdx.x / 32, row = blockIdx.y * 32, column = blockIdx.x * 32;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum;
    wmma::fill_fragment(sum, 0.0f);
    for (int start = 0; start < k; start += 16) {
        for (int i = threadIdx.x; i < 512; i += blockDim.x) {
            sa[i / 16][i % 16] = a[(row + i / 16) * k + start + i % 16];
            sb[i / 32][i % 32] = b[(start + i / 32) * n + column + i % 32];
        }
        __syncthreads();
        wmma::fragment<wmma::matrix_a, 16, 16, 16, half, row_major> left;
        wmma::fragment<wmma::matrix_b, 16, 16, 16, half, row_major> right;
        wmma::load_matrix_sync(left, &sa[warp / 2 * 16][0], 24);
        wmma::load_matrix_sync(right, &sb[0][warp % 2 * 16], 40);
        wmma::mma_sync(sum, left, right, sum);
        __syncthreads();
    }
    for (int i = 0; i < sum.num_elements; i++) sum.x[i] = fmaxf(sum.x[i] * scale, 0.0f);
    wmma::store_matrix_sync(&sc[warp][0][0], sum, 20, wmma::mem_row_major);
    __syncwarp();
    for (int i = threadIdx.x % 32; i < 256; i += 32) {
        int r = row + warp / 2 * 16 + i / 16, s = column + warp % 2 * 16 + i % 16;
        c[r * n + s] = sc[warp][i / 16][i % 16] + bias[s];
    }
}

#endif

// A fragment's elements are changed one by one: every element once, whatever the layout.
__global__ void elementwise(const half* a, half* d) {
    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, row_major> left;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, half, col_major> right;
    wmma::fragment<wmma::accumulator, 16, 16, 16, half> sum;
    wmma::load_matrix_sync(left, a, 16);
    wmma::load_matrix_sync(right, a, 16);
    wmma::fill_fragment(sum, __float2half(1.0f));
    for (int i = 0; i < left.num_elements; i++) left.x[i] = left.x[i] * __float2half(2.0f);
    for (int i = 0; i < right.num_elements; i++) right.x[i] = right.x[i] + __float2half(1.0f);
    wmma::mma_sync(sum, left, right, sum);
    for (int i = 0; i < sum.num_elements; i++) sum.x[i] = sum.x[i] * __float2half(0.5f);
    wmma::store_matrix_sync(d, sum, 16, wmma::mem_col_major);
}

#ifndef FEW
#define PRODUCT(NAME, M, N, K, T, S, LA, LB, R) \
    __global__ void NAME(const S* a, const S* b, const R* c, R* d) { product<M, N, K, T, S, LA, LB>(a, b, c, d); }
PRODUCT(half_16x16, 16, 16, 16, half, half, row_major, col_major, float)
PRODUCT(half_32x8, 32, 8, 16, half, half, col_major, row_major, float)
PRODUCT(half_8x32, 8, 32, 16, half, half, row_major, row_major, half)
PRODUCT(s8_16x16, 16, 16, 16, signed char, signed char, row_major, col_major, int)
PRODUCT(s8_32x8, 32, 8, 16, signed char, signed char, col_major, row_major, int)
PRODUCT(u8_8x32, 8, 32, 16, unsigned char, unsigned char, row_major, row_major, int)
#endif

#if __CUDA_ARCH__ >= 800 && !defined FEW
PRODUCT(bf16_16x16, 16, 16, 16, __nv_bfloat16, __nv_bfloat16, col_major, row_major, float)
PRODUCT(bf16_32x8, 32, 8, 16, __nv_bfloat16, __nv_bfloat16, row_major, col_major, float)
PRODUCT(bf16_8x32, 8, 32, 16, __nv_bfloat16, __nv_bfloat16, row_major, row_major, float)
PRODUCT(tf32_16x16, 16, 16, 8, wmma::precision::tf32, float, row_major, col_major, float)
PRODUCT(f64_8x8, 8, 8, 4, double, double, row_major, row_major, double)
// C = A B of half matrices in f32, one warp for each 16 x 16: cp.async, ldmatrix, mma.sync.
__global__ void pipelined_gemm(const half* a, const half* b, float* c, int n, int k) {
    __shared__ __align__(16) half sa[2][16][24], sb[2][16][24];
    int lane = threadIdx.x, row = blockIdx.y * 16, column = blockIdx.x * 16;
    auto fetch = [&](int stage, int start) {
        int r = lane / 2, s = lane % 2 * 8;
        unsigned ta = __cvta_generic_to_shared(&sa[stage][r][s]), tb = __cvta_generic_to_shared(&sb[stage][r][s]);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(ta), "l"(a + (row + r) * k + start + s));
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(tb), "l"(b + (start + r) * n + column + s));
        asm volatile("cp.async.commit_group;");
    };
    float sum[2][4] = {};
    fetch(0, 0);
    for (int start = 0, stage = 0; start < k; start += 16, stage ^= 1) {
        if (start + 16 < k) fetch(stage ^ 1, start + 16);
        else asm volatile("cp.async.commit_group;");
        asm volatile("cp.async.wait_group 1;");
        __syncwarp();
        unsigned fa[4], fb[4];
        unsigned ta = __cvta_generic_to_shared(&sa[stage][lane % 16][lane / 16 * 8]);
        unsigned tb = __cvta_generic_to_shared(&sb[stage][lane % 16][lane / 16 * 8]);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(fa[0]), "=r"(fa[1]), "=r"(fa[2]), "=r"(fa[3]) : "r"(ta));
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(fb[0]), "=r"(fb[1]), "=r"(fb[2]), "=r"(fb[3]) : "r"(tb));
        for (int tile = 0; tile < 2; tile++)
            asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                         "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                         : "+f"(sum[tile][0]), "+f"(sum[tile][1]), "+f"(sum[tile][2]), "+f"(sum[tile][3])
                         : "r"(fa[0]), "r"(fa[1]), "r"(fa[2]), "r"(fa[3]), "r"(fb[2 * tile]), "r"(fb[2 * tile + 1]));
        __syncwarp();
    }
    for (int tile = 0; tile < 2; tile++)
        for (int i = 0; i < 4; i++)
            c[(row + lane / 4 + i / 2 * 8) * n + column + tile * 8 + lane % 4 * 2 + i % 2] = sum[tile][i];
}
#endif

}  // extern "C"
