// The kernel of arrays on the card: it copies bytes from one layout of memory to another, or fills one with a pattern.
//
// Compiled by NVRTC 13.0 for compute_75 (client/kernels/cuda_c.py). The PTX beside it is as NVRTC wrote it but for its
// `.version`: 6.4 is enough for what it says, and drivers since CUDA 10.1 take it. A test compares.

typedef unsigned long long u64;

enum { DIMENSIONS = 8 };

// Lengths count units; strides count bytes. Dimension 0 is the innermost.
struct Layout {
    u64 count;       // units in all
    u64 last;        // number of the outermost dimension
    u64 unit_bytes;  // 1, 2, 4, 8 or 16
    u64 pattern[2];  // the unit to fill with where there is no source
    u64 lengths[DIMENSIONS];
    long long to_strides[DIMENSIONS];
    long long from_strides[DIMENSIONS];
};

extern "C" __global__ void transfer(char* to, const char* from, const Layout layout)
{
    u64 step = (u64)gridDim.x * blockDim.x;
#pragma unroll 1
    for (u64 unit = (u64)blockIdx.x * blockDim.x + threadIdx.x; unit < layout.count; unit += step) {
        u64 rest = unit;
        char* t = to;
        const char* f = from;
#pragma unroll 1
        for (unsigned d = 0; d < layout.last; d++) {
            u64 next = rest / layout.lengths[d], at = rest - next * layout.lengths[d];
            t += (long long)at * layout.to_strides[d];
            f += (long long)at * layout.from_strides[d];
            rest = next;
        }
        t += (long long)rest * layout.to_strides[layout.last];
        f += (long long)rest * layout.from_strides[layout.last];
        switch (layout.unit_bytes) {
        case 16:
            *(ulonglong2*)t = from ? *(const ulonglong2*)f : make_ulonglong2(layout.pattern[0], layout.pattern[1]);
            break;
        case 8: *(u64*)t = from ? *(const u64*)f : layout.pattern[0]; break;
        case 4: *(unsigned*)t = from ? *(const unsigned*)f : layout.pattern[0]; break;
        case 2: *(unsigned short*)t = from ? *(const unsigned short*)f : layout.pattern[0]; break;
        default: *t = from ? *f : layout.pattern[0];
        }
    }
}
