// Kernels that ask for the grid's barrier: needs_* run by a cooperative launch alone, runs_* by any. With nvcc 13.0,
// in this folder:
//   nvcc -ptx -arch=sm_75 guards.cu -o guards.sm75.ptx            (and sm_90)
#include <cooperative_groups.h>
#include <cassert>
namespace cg = cooperative_groups;

__device__ __noinline__ void synchronise(int *p) { p[0]++; cg::this_grid().sync(); }
__device__ __noinline__ void synchronise_that(cg::grid_group grid, int *p) { p[0]++; grid.sync(); }

extern "C" {
__global__ void runs_valid_then_sync(int *p) {
    auto grid = cg::this_grid();
    p[threadIdx.x] = 1;
    if (grid.is_valid()) grid.sync();
    p[0] = p[1];
}
__global__ void runs_asks_twice(int *p) {
    p[threadIdx.x] = 1;
    if (cg::this_grid().is_valid()) cg::this_grid().sync();
    p[0] = p[1];
}
__global__ void runs_guarded_call(int *p) { if (cg::this_grid().is_valid()) synchronise(p); }
__global__ void runs_returns_early(int *p) {
    if (!cg::this_grid().is_valid()) return;
    cg::this_grid().sync();
    if (p[0] == 7777) __trap();
}
__global__ void runs_guarded_in_loop(int *p, int n) {
    bool valid = cg::this_grid().is_valid();
    for (int i = 0; i < n; i++) if (valid && p[i] != 3) cg::this_grid().sync(); else __syncthreads();
}
__global__ void runs_chosen_mode(int *p, int n) {
    int mode = cg::this_grid().is_valid() ? 1 : 2;
    for (int i = 0; i < n; i++) if (mode == 1) cg::this_grid().sync(); else p[i] = mode;
}
__global__ void runs_valid_and_trap(int *p) { p[0] = cg::this_grid().is_valid(); if (p[1] == 7777) __trap(); }
__global__ void runs_trap_in_fallback(int *p) { if (!cg::this_grid().is_valid()) { p[0] = 1; if (p[1] == 7777) __trap(); } }
__global__ void runs_trap_if_valid(int *p) { if (cg::this_grid().is_valid()) __trap(); p[0] = 1; }
__global__ void runs_size(int *p) { p[0] = cg::this_grid().size(); if (p[1] == 7777) __trap(); }
__global__ void runs_rank_and_assert(int *p) { p[0] = cg::this_grid().thread_rank(); assert(p[1] != 7777); }

__global__ void needs_sync_behind_guarded_one(int *p) {
    auto grid = cg::this_grid();
    if (grid.is_valid()) grid.sync();
    p[0] = p[3];
    grid.sync();
}
__global__ void needs_sync_twice(int *p) { auto grid = cg::this_grid(); grid.sync(); p[0]++; grid.sync(); }
__global__ void needs_sync_in_loop(int *p, int n) { for (int i = 0; i < n; i++) { p[i]++; cg::this_grid().sync(); } }
__global__ void needs_sync_by_argument(int *p, int n) { if (n == 4) cg::this_grid().sync(); p[0]++; }
__global__ void needs_arrive_and_wait(int *p) {
    auto grid = cg::this_grid();
    auto token = grid.barrier_arrive();
    p[1]++;
    grid.barrier_wait(static_cast<decltype(token) &&>(token));
}
__global__ void needs_valid(int *p) { if (!cg::this_grid().is_valid()) __trap(); p[0] = 1; }
__global__ void needs_either(int *p) { if (p[2] == 4 || !cg::this_grid().is_valid()) __trap(); p[0] = 1; }
__global__ void needs_sync_of_passed_grid(int *p) { synchronise_that(cg::this_grid(), p); }
}
