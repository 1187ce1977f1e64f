// Kernels that need a cooperative launch, and such as do not. With nvcc 13.0, in this folder:
//   nvcc -ptx -arch=sm_75 launches.cu -o launches.sm75.ptx            (and sm_90)
//   nvcc -cubin -DPOINTERS -arch=sm_75 launches.cu -o launches.sm75.cubin   (and sm_80, sm_90, sm_100)
//   nvcc -cubin -DPOINTERS -rdc=true -arch=sm_90 launches.cu -o launches.parts.sm90.cubin
#include <cooperative_groups.h>
namespace cg = cooperative_groups;

__device__ __noinline__ void synchronise(int *p) { cg::this_grid().sync(); p[0]++; }
__device__ __noinline__ void add_two(int *p) { p[0] += 2; }
__device__ __noinline__ void twice(int *p) { synchronise(p); synchronise(p + 1); }

extern "C" __global__ void grid_sync(int *p) { p[threadIdx.x] = 1; cg::this_grid().sync(); p[0] = p[1]; }
extern "C" __global__ void grid_sync_in_call(int *p) { twice(p); }
extern "C" __global__ void plain_call(int *p) { add_two(p); add_two(p + 1); }
extern "C" __global__ void block_sync(int *p) {
    p[threadIdx.x] = 1;
    cg::this_thread_block().sync();
    auto tile = cg::tiled_partition<32>(cg::this_thread_block());
    tile.sync();
    p[0] = tile.shfl(p[1], 0);
    auto together = cg::coalesced_threads();
    together.sync();
}
extern "C" __global__ void is_cooperative(int *p) { p[0] = cg::this_grid().is_valid(); }
extern "C" __global__ void grid_size(int *p) { p[0] = cg::this_grid().size(); }
extern "C" __global__ void traps(int *p) { if (p[0] == 7777) __trap(); }

#ifdef POINTERS
__device__ void (*choices[2])(int *) = {synchronise, add_two};
extern "C" __global__ void grid_sync_behind_pointer(int *p, int i) { choices[i](p); }
extern "C" __global__ void names_pointers(int *p, int i) { if (i == 77) choices[0] = choices[1]; }
#endif
