// Matrix products by CUDA's matrix fragments: for tests against a real card.
//
// Compiled, from this folder, by
//     nvcc -ptx -arch=compute_80 -O3 -o tensor.sm80.ptx tensor.cu
// and kept exactly as nvcc wrote them.
#include <mma.h>

using namespace nvcuda;

extern "C" {

// C = max(A B + C, 0) of m x k and k x n halves, all multiples of 16; B column by column. A warp for each tile.
__global__ void half_product(const half* a, const half* b, float* c, int n, int k)
{
    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> left;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> right;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum;
    int row = blockIdx.y * 16, column = blockIdx.x * 16;
    wmma::load_matrix_sync(sum, c + row * n + column, n, wmma::mem_row_major);
    for (int j = 0; j < k; j += 16) {
        wmma::load_matrix_sync(left, a + row * k + j, k);
        wmma::load_matrix_sync(right, b + column * k + j, k);
        wmma::mma_sync(sum, left, right, sum);
    }
    for (int e = 0; e < sum.num_elements; e++) sum.x[e] = fmaxf(sum.x[e], 0.f);
    wmma::store_matrix_sync(c + row * n + column, sum, n, wmma::mem_row_major);
}

// Halves through and through, both row by row.
__global__ void all_half_product(const half* a, const half* b, half* c, int n, int k)
{
    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> left;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> right;
    wmma::fragment<wmma::accumulator, 16, 16, 16, half> sum;
    int row = blockIdx.y * 16, column = blockIdx.x * 16;
    wmma::fill_fragment(sum, __float2half(1.f));
    for (int j = 0; j < k; j += 16) {
        wmma::load_matrix_sync(left, a + row * k + j, k);
        wmma::load_matrix_sync(right, b + j * n + column, n);
        wmma::mma_sync(sum, left, right, sum);
    }
    wmma::store_matrix_sync(c + column * k + row, sum, k, wmma::mem_col_major);
}

__global__ void byte_product(const signed char* a, const signed char* b, int* c, int n, int k)
{
    wmma::fragment<wmma::matrix_a, 16, 16, 16, signed char, wmma::row_major> left;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, signed char, wmma::col_major> right;
    wmma::fragment<wmma::accumulator, 16, 16, 16, int> sum;
    int row = blockIdx.y * 16, column = blockIdx.x * 16;
    wmma::fill_fragment(sum, 3);
    for (int j = 0; j < k; j += 16) {
        wmma::load_matrix_sync(left, a + row * k + j, k);
        wmma::load_matrix_sync(right, b + column * k + j, k);
        wmma::mma_sync(sum, left, right, sum);
    }
    wmma::store_matrix_sync(c + row * n + column, sum, n, wmma::mem_row_major);
}

#if __CUDA_ARCH__ >= 800
// The brain's floats, and floats of 19 bits.
__global__ void wide_range_products(const __nv_bfloat16* a, const __nv_bfloat16* b, const float* x, const float* y,
                                    float* c, float* z)
{
    wmma::fragment<wmma::matrix_a, 16, 16, 16, __nv_bfloat16, wmma::row_major> left;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, __nv_bfloat16, wmma::col_major> right;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum;
    wmma::fill_fragment(sum, 0.f);
    wmma::load_matrix_sync(left, a, 16);
    wmma::load_matrix_sync(right, b, 16);
    wmma::mma_sync(sum, left, right, sum);
    wmma::store_matrix_sync(c, sum, 16, wmma::mem_row_major);

    wmma::fragment<wmma::matrix_a, 16, 16, 8, wmma::precision::tf32, wmma::row_major> first;
    wmma::fragment<wmma::matrix_b, 16, 16, 8, wmma::precision::tf32, wmma::col_major> second;
    wmma::fragment<wmma::accumulator, 16, 16, 8, float> total;
    wmma::fill_fragment(total, 0.f);
    wmma::load_matrix_sync(first, x, 8);
    wmma::load_matrix_sync(second, y, 8);
    for (int e = 0; e < first.num_elements; e++) first.x[e] = wmma::__float_to_tf32(first.x[e]);
    for (int e = 0; e < second.num_elements; e++) second.x[e] = wmma::__float_to_tf32(second.x[e]);
    wmma::mma_sync(total, first, second, total);
    wmma::store_matrix_sync(z, total, 16, wmma::mem_row_major);
}
#endif
}
