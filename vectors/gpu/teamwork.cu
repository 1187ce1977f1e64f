// Kernels whose threads work together: warps, named barriers, atomics, locks.
//
// Compiled, from this folder, by
//     for cc in 75 80 90; do nvcc -ptx -arch=compute_$cc -O3 -o teamwork.sm$cc.ptx teamwork.cu; done
// and kept exactly as nvcc wrote it.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>
#include <cuda_fp16.h>
#include <cuda_pipeline.h>

namespace cg = cooperative_groups;
constexpr unsigned ALL = 0xffffffffu;

extern "C" {

// Each warp's inclusive sums, and its total and greatest element in every lane.
__global__ void warp_scan(const int* x, int* sums, int* totals, int* greatest) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x & 31, own = x[i], sum = own, most = own;
    for (int d = 1; d < 32; d *= 2) {
        int other = __shfl_up_sync(ALL, sum, d);
        if (lane >= d) sum += other;
    }
    for (int d = 16; d; d /= 2) most = max(most, __shfl_xor_sync(ALL, most, d));
    sums[i] = sum;
    totals[i] = __shfl_sync(ALL, sum, 31);
    greatest[i] = most;
}

// Sums within segments of 8 lanes, of a long long: two words each.
__global__ void segment_sums(const long long* x, long long* y) {
    long long sum = x[threadIdx.x];
    for (int d = 4; d; d /= 2) sum += __shfl_down_sync(ALL, sum, d, 8);
    y[threadIdx.x] = __shfl_sync(ALL, sum, 0, 8);
}

// Keep what is positive: one atomic for those of a warp that come together.
__global__ void compact(const int* x, int* y, int* count, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n || x[i] <= 0) return;
    unsigned mask = __activemask(), below;
    asm("mov.u32 %0, %%lanemask_lt;" : "=r"(below));
    int leader = __ffs(mask) - 1, start = 0;
    if ((threadIdx.x & 31) == leader) start = atomicAdd(count, __popc(mask));
    start = __shfl_sync(mask, start, leader);
    y[start + __popc(mask & below)] = x[i];
}

// A histogram with one atomic for each value of a warp.
__global__ void match_histogram(const int* x, int* bins, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; __any_sync(ALL, i < n); i += gridDim.x * blockDim.x) {
        unsigned in = __ballot_sync(ALL, i < n);
        if (i < n) {
            unsigned same = __match_any_sync(in, x[i]);
            if ((threadIdx.x & 31) == __ffs(same) - 1) atomicAdd(&bins[x[i]], __popc(same));
        }
    }
}

__global__ void block_votes(const int* x, int* y) {
    int t = threadIdx.x;
    y[3 * t] = __syncthreads_count(x[t]);
    y[3 * t + 1] = __syncthreads_and(x[t]);
    y[3 * t + 2] = __syncthreads_or(x[t]);
}

// The first warps make, the others take, by two pairs of named barriers.
__global__ void producer_consumer(const int* x, int* y, int rounds) {
    __shared__ int buffer[2][64];
    int t = threadIdx.x & 63;
    if (threadIdx.x < 64) {
        for (int r = 0; r < rounds; r++) {
            asm volatile("bar.sync %0, 128;" ::"r"(3 + (r & 1)) : "memory");
            buffer[r & 1][t] = x[r * 64 + t] * 2;
            asm volatile("bar.arrive %0, 128;" ::"r"(1 + (r & 1)) : "memory");
        }
    } else {
        asm volatile("bar.arrive 3, 128; bar.arrive 4, 128;" ::: "memory");
        for (int r = 0; r < rounds; r++) {
            asm volatile("bar.sync %0, 128;" ::"r"(1 + (r & 1)) : "memory");
            y[r * 64 + t] = buffer[r & 1][63 - t];
            if (r + 2 < rounds) asm volatile("bar.arrive %0, 128;" ::"r"(3 + (r & 1)) : "memory");
        }
    }
}

// Every thread of every block takes one lock in turn.
__global__ void locked(int* lock, int* counter) {
    bool done = false;
    while (!done) {
        if (atomicCAS(lock, 0, 1) == 0) {
            __threadfence();
            *(volatile int*)counter = *(volatile int*)counter + 1;
            __threadfence();
            atomicExch(lock, 0);
            done = true;
        }
    }
}

// A chain through the block against the order of its threads.
__global__ void chain(volatile int* flags) {
    int t = threadIdx.x;
    if (t != blockDim.x - 1)
        while (flags[t + 1] == 0) { }
    __threadfence();
    flags[t] = t == blockDim.x - 1 ? 1 : flags[t + 1] + 1;
}

// The last block to finish adds up what the others left.
__global__ void last_block_sum(const int* x, int* partial, unsigned* ticket, int* total) {
    __shared__ bool last;
    int sum = __syncthreads_count(x[blockIdx.x * blockDim.x + threadIdx.x] & 1);
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = sum;
        __threadfence();
        last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x < gridDim.x) atomicAdd(total, ((volatile int*)partial)[threadIdx.x]);
}

// Prefix sums over all blocks, each waiting for the one before.
__global__ void look_back(const int* x, volatile int* sums, volatile int* ready, int* y) {
    __shared__ int before;
    int b = blockIdx.x, t = threadIdx.x;
    if (t == 0) {
        before = 0;
        if (b > 0) {
            while (ready[b - 1] == 0) { }
            __threadfence();
            before = sums[b - 1];
        }
        int sum = before;
        for (int i = 0; i < blockDim.x; i++) sum += x[b * blockDim.x + i];
        sums[b] = sum;
        __threadfence();
        ready[b] = 1;
    }
    __syncthreads();
    y[b * blockDim.x + t] = before + x[b * blockDim.x + t];
}

__device__ __half2 one_and_two() {
    __half2 both;
    *(unsigned*)&both = 0x40003c00;
    return both;
}

__device__ void atomic_max(float* place, float value) {
    int seen = *(volatile int*)place;
    while (__int_as_float(seen) < value) {
        int now = atomicCAS((int*)place, seen, __float_as_int(value));
        if (now == seen) return;
        seen = now;
    }
}

// Elements 0 to 7 of `w` and `d`: one for each kind of atomic.
__global__ void all_atomics(int* w, unsigned long long* d, float* f, double* g, __half2* h) {
    __shared__ int inside[2];
    int t = threadIdx.x + blockIdx.x * blockDim.x;
    if (threadIdx.x < 2) inside[threadIdx.x] = 0;
    __syncthreads();
    atomicAdd(&w[0], t); atomicSub(&w[1], t); atomicMin(&w[2], -t); atomicMax(&w[3], t);
    atomicAnd(&w[4], ~(1 << (t & 15))); atomicOr(&w[5], 1 << (t & 31)); atomicXor(&w[6], t); atomicAdd(&inside[0], t);
    atomicAdd(&d[0], (unsigned long long)t << 33); atomicMax(&d[1], (unsigned long long)t << 40);
    atomicMin((long long*)&d[2], -(long long)t << 35); atomicOr(&d[3], 1ull << (t & 63));
    atomicDec((unsigned*)&w[7], 100); atomicExch(&inside[1], 5);
    atomicAdd(f, 0.5f); atomicAdd(g, 0.25); atomicAdd(h, one_and_two()); atomic_max(f + 1, (float)t);
    __syncthreads();
    if (threadIdx.x == 0) { atomicAdd(&d[4], inside[0]); atomicAdd(&d[5], inside[1]); }
}

// Tiles of a block, and those threads of a warp that come together.
__global__ void groups(const int* x, int* sums, int* scans, int* sizes) {
    auto block = cg::this_thread_block();
    auto tile = cg::tiled_partition<8>(block);
    int t = block.thread_rank(), own = x[t];
    sums[t] = cg::reduce(tile, own, cg::plus<int>());
    scans[t] = cg::exclusive_scan(tile, own);
    block.sync();
    if (own & 1) {
        auto together = cg::coalesced_threads();
        sizes[t] = together.size() * 100 + together.thread_rank();
    } else {
        sizes[t] = -1;
    }
}

// Tiles of two warps, which meet by atomics in shared memory that CUDA keeps for itself from compute_80 on.
__global__ void wide_tiles(const int* x, int* sums, int* ranks) {
    __shared__ cg::block_tile_memory<256> room;
    auto block = cg::this_thread_block(room);
    auto tile = cg::tiled_partition<64>(block);
    int t = block.thread_rank();
    sums[t] = cg::reduce(tile, x[t], cg::plus<int>());
    tile.sync();
    ranks[t] = tile.meta_group_rank() * 100 + tile.thread_rank();
}

#if __CUDA_ARCH__ >= 800
__global__ void reductions(const int* x, int* y) {
    int t = threadIdx.x, own = x[t];
    unsigned mask = __ballot_sync(ALL, t % 3 == 0);
    if (t % 3 == 0) {
        y[6 * t] = __reduce_add_sync(mask, own);
        y[6 * t + 1] = __reduce_min_sync(mask, own);
        y[6 * t + 2] = __reduce_max_sync(mask, (unsigned)own);
        y[6 * t + 3] = __reduce_and_sync(mask, own);
        y[6 * t + 4] = __reduce_or_sync(mask, own);
        y[6 * t + 5] = __reduce_xor_sync(mask, own);
    }
}

// Tiles brought in two ahead.
__global__ void pipelined(const float4* x, float4* y, int tiles) {
    __shared__ float4 buffer[2][64];
    int t = threadIdx.x;
    __pipeline_memcpy_async(&buffer[0][t], &x[t], 16);
    __pipeline_commit();
    for (int k = 0; k < tiles; k++) {
        if (k + 1 < tiles) __pipeline_memcpy_async(&buffer[(k + 1) & 1][t], &x[(k + 1) * 64 + t], 16, t & 1 ? 4 : 0);
        __pipeline_commit();
        __pipeline_wait_prior(1);
        __syncthreads();
        y[k * 64 + t] = buffer[k & 1][63 - t];
        __syncthreads();
    }
}
#endif
}
