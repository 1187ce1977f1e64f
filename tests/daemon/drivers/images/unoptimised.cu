// Without optimisation, as for debuggers, nvcc keeps the address of the grid's barrier in memory. With nvcc 13.0, in this
// folder:
//   nvcc -ptx -Xcicc -O0 -arch=sm_75 unoptimised.cu -o unoptimised.sm75.ptx
#include <cooperative_groups.h>
namespace cg = cooperative_groups;

extern "C" __global__ void needs_sync(int *p) { p[threadIdx.x] = 1; cg::this_grid().sync(); p[0] = p[1]; }
extern "C" __global__ void runs_valid(int *p) { p[0] = cg::this_grid().is_valid(); }
