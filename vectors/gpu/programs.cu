// Ordinary kernels, each leaning on other parts of PTX: for tests of whatever executes them.
//
// Compiled, from this folder, by
//     for cc in 75 80 90; do nvcc -ptx -arch=compute_$cc -O3 -o programs.sm$cc.ptx programs.cu; done
// and once with -G for compute_75 to programs.debug.sm75.ptx,
// and kept exactly as nvcc wrote it.

extern "C" {

// y = a*x + y for any n, with a stride of the whole grid.
__global__ void saxpy(unsigned long long n, float a, const float* __restrict__ x, float* y)
{
    unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x; i < n; i += step)
        y[i] = a * x[i] + y[i];
}

// Integer arithmetic of three types.
__global__ void integers(int* x, unsigned* u, long long* l, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int v = x[i];
    unsigned w = u[i];
    long long q = l[i];
    x[i] = v / 7 + (v % 5) - (v >> 3) + max(v, (int)w) * 3;
    u[i] = ((w << 5) ^ (w >> 7)) | (__umulhi(w, v) & ~w);
    l[i] = q * q + (q / (v | 1)) - (q % ((long long)w | 1));
}

// Double precision and conditions joined by && and ||.
__global__ void doubles(double* x, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    double v = x[i];
    x[i] = (v > 0.5 && v < 3) || v < -1 ? -v : sqrt(fabs(v)) + 1.0 / v;
}

// Conversions between integers and floats.
__global__ void conversions(const float* x, int* trunc, int* nearest, int* down, int* up, unsigned char* byte, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v = x[i];
    trunc[i] = (int)v;
    nearest[i] = __float2int_rn(v);
    down[i] = (int)floorf(v);
    up[i] = (int)ceilf(v);
    byte[i] = (unsigned char)((short)v + 3);
}

// 16-byte loads and stores.
__global__ void vectors(const float4* __restrict__ a, float4* __restrict__ b, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float4 v = a[i];
    v.x *= 2;
    v.w += 1;
    b[i] = v;
}

// C = A*B for n x n matrices, n a multiple of 16, by tiles in shared memory.
__global__ void matmul(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ c, int n)
{
    __shared__ float left[16][16];
    __shared__ float right[16][16];
    int row = blockIdx.y * 16 + threadIdx.y;
    int column = blockIdx.x * 16 + threadIdx.x;
    float sum = 0;
    for (int t = 0; t < n; t += 16) {
        left[threadIdx.y][threadIdx.x] = a[row * n + t + threadIdx.x];
        right[threadIdx.y][threadIdx.x] = b[(t + threadIdx.y) * n + column];
        __syncthreads();
        for (int k = 0; k < 16; k++) sum += left[threadIdx.y][k] * right[k][threadIdx.x];
        __syncthreads();
    }
    c[row * n + column] = sum;
}

// Running sums of one block's numbers, in dynamic shared memory.
__global__ void scan(double* x)
{
    extern __shared__ double sums[];
    int t = threadIdx.x;
    sums[t] = x[t];
    __syncthreads();
    for (int reach = 1; reach < blockDim.x; reach <<= 1) {
        double v = t >= reach ? sums[t - reach] : 0;
        __syncthreads();
        sums[t] += v;
        __syncthreads();
    }
    x[t] = sums[t];
}

__constant__ float factors[4] = {1.f, 2.f, 3.f, 4.f};
__device__ int terms[3] = {5, -6, 7};
__device__ float scratch[8];

// Constants and variables of the module.
__global__ void variables(float* x, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    scratch[i & 7] = x[i];
    x[i] = scratch[i & 7] * factors[i & 3] + terms[i % 3];
}

// An array that can't live in registers.
__global__ void locals(const int* x, int* y, int n, int k)
{
    int kept[32];
    for (int j = 0; j < 32; j++) kept[j] = j * x[j % n];
    y[threadIdx.x] = kept[(threadIdx.x * k) & 31];
}

// One pointer that may point to global, shared or local memory.
__global__ void generic(int* global, int which)
{
    __shared__ int shared[64];
    int local[4];
    local[threadIdx.x & 3] = threadIdx.x;
    shared[threadIdx.x] = threadIdx.x * 2;
    __syncthreads();
    int* p = which == 0 ? global : which == 1 ? shared : local;
    p[threadIdx.x & 3] += 100;
    __syncthreads();
    global[64 + threadIdx.x] = p[threadIdx.x & 3];
}

// Nested control flow with a count that differs for each thread.
__global__ void mandelbrot(float x0, float y0, float step, unsigned char* out, int width, int most)
{
    int px = blockIdx.x * blockDim.x + threadIdx.x, py = blockIdx.y * blockDim.y + threadIdx.y;
    if (px >= width || py >= width) return;
    float cx = x0 + px * step, cy = y0 + py * step, zx = 0, zy = 0;
    int count = 0;
    while (zx * zx + zy * zy < 4.f && count < most) {
        float t = zx * zx - zy * zy + cx;
        zy = 2 * zx * zy + cy;
        zx = t;
        count++;
    }
    out[py * width + px] = count;
}

// Counting and moving bits.
__global__ void bits(unsigned* x, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned v = x[i];
    x[i] = __popc(v) + __clz(v) * 3 + __brev(v) + __funnelshift_l(v, v + 1, 5) + ((v >> 4) & 0xff);
}

// No block of more than 128 threads.
__global__ __launch_bounds__(128) void bounded(int* x)
{
    x[threadIdx.x] = threadIdx.x;
}

}
