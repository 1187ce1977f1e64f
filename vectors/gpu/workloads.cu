// What inference and number crunching are made of, each kernel at its usual shape: for tests against a real card.
//
// Compiled, from this folder, by
//     nvcc -ptx -arch=compute_75 -O3 -o workloads.sm75.ptx workloads.cu
// and once more with -G instead of -O3 to workloads.debug.sm75.ptx; kept exactly as nvcc wrote them. For compute_80 and
// compute_90 nvcc writes the same, but for the target's name.
#include <math_constants.h>

constexpr unsigned ALL = 0xffffffffu;
constexpr int TILE = 8;

__device__ __forceinline__ float warp_sum(float v)
{
    for (int d = 16; d; d /= 2) v += __shfl_xor_sync(ALL, v, d);
    return v;
}

extern "C" {

// C = A B of m x k and k x n matrices of any size, by tiles in shared memory.
__global__ void ragged_matmul(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ c, int m,
                              int n, int k)
{
    __shared__ float left[TILE][TILE], right[TILE][TILE];
    int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * TILE + y, column = blockIdx.x * TILE + x;
    float sum = 0;
    for (int start = 0; start < k; start += TILE) {
        left[y][x] = row < m && start + x < k ? a[row * k + start + x] : 0.f;
        right[y][x] = start + y < k && column < n ? b[(start + y) * n + column] : 0.f;
        __syncthreads();
#pragma unroll
        for (int j = 0; j < TILE; j++) sum += left[y][j] * right[j][x];
        __syncthreads();
    }
    if (row < m && column < n) c[row * n + column] = sum;
}

// A row for each block; greatest element and sum by halving in dynamic shared memory. Blocks of a power of two.
__global__ void row_softmax(const float* __restrict__ x, float* __restrict__ y, int n)
{
    extern __shared__ float room[];
    const float* from = x + (size_t)blockIdx.x * n;
    float* to = y + (size_t)blockIdx.x * n;
    int t = threadIdx.x;
    float most = -CUDART_INF_F, sum = 0;
    for (int i = t; i < n; i += blockDim.x) most = fmaxf(most, from[i]);
    room[t] = most;
    __syncthreads();
    for (int half = blockDim.x / 2; half; half /= 2) {
        if (t < half) room[t] = fmaxf(room[t], room[t + half]);
        __syncthreads();
    }
    most = room[0];
    __syncthreads();
    for (int i = t; i < n; i += blockDim.x) {
        to[i] = expf(from[i] - most);
        sum += to[i];
    }
    room[t] = sum;
    __syncthreads();
    for (int half = blockDim.x / 2; half; half /= 2) {
        if (t < half) room[t] += room[t + half];
        __syncthreads();
    }
    for (int i = t; i < n; i += blockDim.x) to[i] /= room[0];
}

// Causal attention with a running softmax: a block for each query and head, a thread for each of the head's numbers.
__global__ void attend(const float* __restrict__ q, const float* __restrict__ k, const float* __restrict__ v,
                       float* __restrict__ out, int tokens, float scale)
{
    __shared__ float parts[4];
    int width = blockDim.x, t = threadIdx.x;
    size_t head = (size_t)blockIdx.y * tokens * width, own = head + (size_t)blockIdx.x * width + t;
    float most = -CUDART_INF_F, total = 0, sum = 0;
    for (int j = 0; j <= blockIdx.x; j++) {
        float part = warp_sum(q[own] * k[head + (size_t)j * width + t]), score = 0;
        if (t % 32 == 0) parts[t / 32] = part;
        __syncthreads();
        for (int w = 0; w < width / 32; w++) score += parts[w];
        __syncthreads();
        score *= scale;
        float higher = fmaxf(most, score), shrink = __expf(most - higher), power = __expf(score - higher);
        total = total * shrink + power;
        sum = sum * shrink + power * v[head + (size_t)j * width + t];
        most = higher;
    }
    out[own] = sum / total;
}

// Counts in shared memory first.
__global__ void histogram(const unsigned* __restrict__ x, unsigned* __restrict__ counts, int n, int bins)
{
    extern __shared__ unsigned own[];
    for (int i = threadIdx.x; i < bins; i += blockDim.x) own[i] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(&own[x[i] % bins], 1u);
    __syncthreads();
    for (int i = threadIdx.x; i < bins; i += blockDim.x) atomicAdd(&counts[i], own[i]);
}

// Dot products of bytes, four at a time.
__global__ void byte_dots(const int* __restrict__ a, const int* __restrict__ b, int* __restrict__ y, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x, sum = 0;
    if (i >= n) return;
    for (int j = 0; j < 4; j++) sum = __dp4a(a[i], b[(i + j) % n], sum);
    y[i] = sum;
}

// Sorts the numbers of one block.
__global__ void bitonic_sort(float* x)
{
    extern __shared__ float held[];
    int t = threadIdx.x;
    held[t] = x[t];
    __syncthreads();
    for (int size = 2; size <= blockDim.x; size *= 2)
        for (int reach = size / 2; reach; reach /= 2) {
            int other = t ^ reach;
            if (other > t) {
                float a = held[t], b = held[other];
                if ((a > b) == ((t & size) == 0)) {
                    held[t] = b;
                    held[other] = a;
                }
            }
            __syncthreads();
        }
    x[t] = held[t];
}

__constant__ float filter[9] = {1 / 16.f, 2 / 16.f, 1 / 16.f, 2 / 16.f, 4 / 16.f, 2 / 16.f, 1 / 16.f, 2 / 16.f, 1 / 16.f};

// A 3 x 3 filter over an image of bytes, with the edge repeated.
__global__ void blur(const unsigned char* __restrict__ in, unsigned char* __restrict__ out, int width, int height)
{
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= width || y >= height) return;
    float sum = 0;
    for (int dy = -1; dy <= 1; dy++)
        for (int dx = -1; dx <= 1; dx++) {
            int px = min(max(x + dx, 0), width - 1), py = min(max(y + dy, 0), height - 1);
            sum += filter[(dy + 1) * 3 + dx + 1] * in[py * width + px];
        }
    out[y * width + x] = (unsigned char)__float2int_rn(sum);
}

// Random numbers by ten rounds of Philox.
__global__ void philox(uint4* out, unsigned key0, unsigned key1)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    uint4 c = make_uint4(i, 0, 7, 0);
    for (int round = 0; round < 10; round++) {
        unsigned high0 = __umulhi(0xD2511F53u, c.x), high1 = __umulhi(0xCD9E8D57u, c.z);
        c = make_uint4(high1 ^ c.y ^ key0, 0xCD9E8D57u * c.z, high0 ^ c.w ^ key1, 0xD2511F53u * c.x);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    out[i] = c;
}

// One step of bodies that draw one another, with a tile of them in shared memory.
__global__ void bodies(const float4* __restrict__ place, float4* __restrict__ pull, int n)
{
    __shared__ float4 tile[32];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float4 own = i < n ? place[i] : make_float4(0, 0, 0, 0), sum = make_float4(0, 0, 0, 0);
    for (int start = 0; start < n; start += blockDim.x) {
        if (start + threadIdx.x < n) tile[threadIdx.x] = place[start + threadIdx.x];
        __syncthreads();
        for (int j = 0; j < min((int)blockDim.x, n - start); j++) {
            float x = tile[j].x - own.x, y = tile[j].y - own.y, z = tile[j].z - own.z;
            float inverse = rsqrtf(x * x + y * y + z * z + 0.01f);
            float weight = tile[j].w * inverse * inverse * inverse;
            sum.x += weight * x;
            sum.y += weight * y;
            sum.z += weight * z;
        }
        __syncthreads();
    }
    if (i < n) pull[i] = sum;
}

#ifndef __CUDACC_DEBUG__
// What CUDA's library makes of the usual functions; `near` gets those for which it needs approximate instructions.
__global__ void functions(const float* __restrict__ x, float* __restrict__ exact, float* __restrict__ near, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v = x[i];
    exact[i] = logf(v);
    exact[n + i] = sinf(v);
    exact[2 * n + i] = fmodf(v, 0.3f);
    exact[3 * n + i] = atanf(v);
    near[i] = expf(v);
    near[n + i] = tanhf(v);
    near[2 * n + i] = erff(v);
    near[3 * n + i] = powf(fabsf(v), 0.7f);
    near[4 * n + i] = cbrtf(v);
}

__global__ void double_functions(const double* __restrict__ x, double* __restrict__ exact, double* __restrict__ near,
                                 int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    double v = x[i];
    exact[i] = exp(v);
    exact[n + i] = sin(v);
    exact[2 * n + i] = fmod(v, 0.3);
    exact[3 * n + i] = rint(v);
    near[i] = log(v);
    near[n + i] = tanh(v);
    near[2 * n + i] = hypot(v, 3.0);
    near[3 * n + i] = rsqrt(v);
    near[4 * n + i] = atan(v);
}
#endif
}
