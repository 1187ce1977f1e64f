// Threads that meet at barriers in shared memory, and copies they wait for there.
//
// Compiled, from this folder, by
//     for cc in 80 90; do nvcc -std=c++20 -ptx -arch=compute_$cc -O3 -o phases.sm$cc.ptx phases.cu; done
// and kept exactly as nvcc wrote it.
#include <cooperative_groups.h>
#include <cuda/barrier>
#include <cuda/pipeline>

using Barrier = cuda::barrier<cuda::thread_scope_block>;

extern "C" {

// Each round every thread takes its neighbour's number; of odd rounds by an arrival and a wait apart.
__global__ void rounds(const int* x, int* y, int n) {
    __shared__ int held[64];
#pragma nv_diag_suppress static_var_with_dynamic_init
    __shared__ Barrier barrier;
    if (threadIdx.x == 0) init(&barrier, blockDim.x);
    __syncthreads();
    int own = x[threadIdx.x];
    for (int k = 0; k < n; k++) {
        held[threadIdx.x] = own;
        barrier.arrive_and_wait();
        own = held[(threadIdx.x + 1) % blockDim.x] + k;
        barrier.wait(barrier.arrive());
    }
    y[threadIdx.x] = own;
}

// Half of the threads fill a buffer, the others use it.
__global__ void hand_over(const int* x, int* y, int n) {
    __shared__ int held[32];
    __shared__ Barrier ready, filled;
    if (threadIdx.x == 0) {
        init(&ready, blockDim.x);
        init(&filled, blockDim.x);
    }
    __syncthreads();
    int lane = threadIdx.x % 32;
    for (int k = 0; k < n; k++) {
        if (threadIdx.x < 32) {
            ready.arrive_and_wait();
            held[lane] = x[32 * k + lane];
            auto token = filled.arrive();
        } else {
            auto token = ready.arrive();
            filled.arrive_and_wait();
            y[32 * k + lane] = 2 * held[31 - lane];
        }
    }
}

// A block's copies, waited for with a barrier: in bulk where the card can.
__global__ void bulk(const int4* x, int4* y) {
    __shared__ alignas(128) int4 held[64];
    __shared__ Barrier barrier;
    if (threadIdx.x == 0) init(&barrier, blockDim.x);
    __syncthreads();
    if (threadIdx.x == 0) cuda::memcpy_async(held, x, cuda::aligned_size_t<16>(sizeof(held)), barrier);
    barrier.arrive_and_wait();
    y[threadIdx.x] = held[63 - threadIdx.x];
}

// Two stages of copies under way while a third is used.
__global__ void pipelined(const int4* x, int4* y, int n) {
    auto block = cooperative_groups::this_thread_block();
    __shared__ alignas(16) int4 held[2][64];
    __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, 2> state;
    auto pipeline = cuda::make_pipeline(block, &state);
    for (int fetched = 0, k = 0; k < n; k++) {
#pragma unroll 1
        for (; fetched < n && fetched < k + 2; fetched++) {
            pipeline.producer_acquire();
            cuda::memcpy_async(block, held[fetched % 2], x + 64 * fetched, cuda::aligned_size_t<16>(1024), pipeline);
            pipeline.producer_commit();
        }
        pipeline.consumer_wait();
        y[64 * k + threadIdx.x] = held[k % 2][63 - threadIdx.x];
        pipeline.consumer_release();
    }
}

}  // extern "C"
