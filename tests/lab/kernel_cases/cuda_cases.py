"""CUDA C as in textbooks and benchmarks: vectors, matrices, sorting, stencils and physics."""

from typing import Any, Final

import numpy as np

from .trial import Cases, Trial

CASES: Final = Cases("CUDA C")
case = CASES.add


@case()
def vector_add(t: Trial) -> Any:
    source = """extern "C" __global__ void k(const float *x, const float *y, float *z, int n) {
        for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) z[i] = x[i] + y[i]; }"""
    x, y = t.floats(5000), t.floats(5000)
    return [(t.cuda(source, "k", 4, 256, x, y, np.zeros_like(x), 5000)[2], x + y)]


@case("shared")
def transpose(t: Trial) -> Any:
    source = """extern "C" __global__ void k(float *to, const float *from, int w, int h) {
        __shared__ float tile[32][33];
        int x = blockIdx.x * 32 + threadIdx.x, y = blockIdx.y * 32 + threadIdx.y;
        for (int j = 0; j < 32; j += 8) if (x < w && y + j < h) tile[threadIdx.y + j][threadIdx.x] = from[(y
            + j) * w + x];
        __syncthreads();
        x = blockIdx.y * 32 + threadIdx.x; y = blockIdx.x * 32 + threadIdx.y;
        for (int j = 0; j < 32; j += 8) if (x < h && y + j < w) to[(y + j) * h + x] = tile[threadIdx.x][threadIdx.y
            + j];
    }"""
    m = t.floats(70, 50)
    return [(t.cuda(source, "k", (2, 3), (32, 8), np.zeros((50, 70), np.float32), m, 50, 70)[0], m.T)]


MATMUL: Final = """template <int T> __device__ void product(const float *a, const float *b, float *c, int n) {
    extern __shared__ float held[];
    float *as = held, *bs = held + T * T, sum = 0;
    int x = blockIdx.x * T + threadIdx.x, y = blockIdx.y * T + threadIdx.y;
    for (int s = 0; s < n; s += T) {
        as[threadIdx.y * T + threadIdx.x] = a[y * n + s + threadIdx.x];
        bs[threadIdx.y * T + threadIdx.x] = b[(s + threadIdx.y) * n + x];
        __syncthreads();
        for (int k = 0; k < T; k++) sum += as[threadIdx.y * T + k] * bs[k * T + threadIdx.x];
        __syncthreads();
    }
    c[y * n + x] = sum; }
extern "C" __global__ void k(const float *a, const float *b, float *c, int n) { product<16>(a, b, c, n); }"""


@case("dynamic shared, template")
def matmul_tiled(t: Trial) -> Any:
    a, b = t.floats(64, 64), t.floats(64, 64)
    return [(t.cuda(MATMUL, "k", (4, 4), (16, 16), a, b, a, 64, shared_bytes=2048)[2], a @ b)]


@case("dynamic shared over 48 KiB")
def large_tile(t: Trial) -> Any:
    source = """extern "C" __global__ void k(float *x, int n) {
        extern __shared__ float held[];
        for (int i = threadIdx.x; i < n; i += blockDim.x) held[n - 1 - i] = x[i];
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = held[i]; }"""
    x = t.floats(24_000)
    return [(t.cuda(source, "k", 1, 512, x, 24_000, shared_bytes=96_000)[0], x[::-1])]


@case("shared, atomics")
def reduce_shared(t: Trial) -> Any:
    source = """extern "C" __global__ void k(const float *x, float *sum, int n) {
        __shared__ float held[256];
        float mine = 0;
        for (int i = blockIdx.x * 256 + threadIdx.x; i < n; i += gridDim.x * 256) mine += x[i];
        held[threadIdx.x] = mine;
        for (int s = 128; s; s >>= 1) { __syncthreads(); if (threadIdx.x < s) held[threadIdx.x] += held[threadIdx.x
            + s]; }
        if (!threadIdx.x) atomicAdd(sum, held[0]); }"""
    x = t.floats(10_000) + 1
    return [(t.cuda(source, "k", 8, 256, x, np.zeros(1, np.float32), 10_000)[1], [x.sum()])]


@case("shuffle")
def reduce_shuffle(t: Trial) -> Any:
    source = """extern "C" __global__ void k(const float *x, float *sums) {
        float v = x[blockIdx.x * 32 + threadIdx.x];
        for (int d = 16; d; d >>= 1) v += __shfl_down_sync(0xffffffff, v, d);
        if (!threadIdx.x) sums[blockIdx.x] = v; }"""
    x = t.floats(20, 32)
    return [(t.cuda(source, "k", 20, 32, x, np.zeros(20, np.float32))[1], x.sum(1))]


@case("shared")
def scan_blelloch(t: Trial) -> Any:
    source = """extern "C" __global__ void k(int *x) {
        __shared__ int s[512]; int i = threadIdx.x, d, o = 1;
        s[2 * i] = x[2 * i]; s[2 * i + 1] = x[2 * i + 1];
        for (d = 256; d; d >>= 1) { __syncthreads(); if (i < d) s[o * (2 * i + 2) - 1] += s[o * (2 * i + 1) - 1];
            o <<= 1; }
        if (!i) s[511] = 0;
        for (d = 1; d < 512; d <<= 1) { o >>= 1; __syncthreads();
            if (i < d) { int a = o * (2 * i + 1) - 1, b = a + o, v = s[a]; s[a] = s[b]; s[b] += v; } }
        __syncthreads(); x[2 * i] = s[2 * i]; x[2 * i + 1] = s[2 * i + 1]; }"""
    x = t.integers(100, 512)
    return [(t.cuda(source, "k", 1, 256, x)[0], np.cumsum(x) - x)]


@case("shuffle, shared")
def scan_warps(t: Trial) -> Any:
    source = """extern "C" __global__ void k(int *x) {
        __shared__ int totals[32]; int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, v = x[threadIdx.x];
        for (int d = 1; d < 32; d <<= 1) { int u = __shfl_up_sync(~0u, v, d); if (lane >= d) v += u; }
        if (lane == 31) totals[warp] = v;
        __syncthreads();
        if (!warp) { int w = totals[lane];
            for (int d = 1; d < 32; d <<= 1) { int u = __shfl_up_sync(~0u, w, d); if (lane >= d) w += u; }
            totals[lane] = w; }
        __syncthreads();
        x[threadIdx.x] = v + (warp ? totals[warp - 1] : 0); }"""
    x = t.integers(1000, 1024)
    return [(t.cuda(source, "k", 1, 1024, x)[0], np.cumsum(x))]


@case("shared, atomics")
def histogram(t: Trial) -> Any:
    source = """extern "C" __global__ void k(const unsigned char *x, unsigned *bins, int n) {
        __shared__ unsigned own[256]; own[threadIdx.x] = 0; __syncthreads();
        for (int i = blockIdx.x * 256 + threadIdx.x; i < n; i += gridDim.x * 256) atomicAdd(&own[x[i]], 1u);
        __syncthreads(); atomicAdd(&bins[threadIdx.x], own[threadIdx.x]); }"""
    x = t.integers(256, 8000).astype(np.uint8)
    return [(t.cuda(source, "k", 4, 256, x, np.zeros(256, np.uint32), 8000)[1], np.bincount(x, minlength=256))]


@case("shared")
def bitonic_sort(t: Trial) -> Any:
    source = """extern "C" __global__ void k(float *x) {
        __shared__ float s[512]; int i = threadIdx.x; s[i] = x[i]; s[i + 256] = x[i + 256];
        for (int size = 2; size <= 512; size <<= 1) for (int d = size >> 1; d; d >>= 1) {
            __syncthreads();
            int at = 2 * i - (i & (d - 1)); bool up = !(at & size);
            if ((s[at] > s[at + d]) == up) { float v = s[at]; s[at] = s[at + d]; s[at + d] = v; } }
        __syncthreads(); x[i] = s[i]; x[i + 256] = s[i + 256]; }"""
    x = t.floats(512)
    return [(t.cuda(source, "k", 1, 256, x)[0], np.sort(x))]


@case("vote, shared")
def radix_pass(t: Trial) -> Any:
    source = """extern "C" __global__ void k(const unsigned *x, unsigned *y) {
        __shared__ int zeros[8]; int lane = threadIdx.x & 31, warp = threadIdx.x >> 5; unsigned v = x[threadIdx.x];
        unsigned ones = __ballot_sync(~0u, v & 1);
        if (!lane) zeros[warp] = 32 - __popc(ones);
        __syncthreads();
        int before = 0, total = 0; for (int w = 0; w < 8; w++) { if (w < warp) before += zeros[w]; total += zeros[w]; }
        int mine = __popc(~ones & ((1u << lane) - 1));
        int ahead = threadIdx.x - before - mine;
        y[v & 1 ? total + ahead : before + mine] = v; }"""
    x = t.integers(1 << 20, 256).astype(np.uint32)
    return [(t.cuda(source, "k", 1, 256, x, x)[1], x[np.argsort(x & 1, kind="stable")])]


@case("match, atomics")
def warp_aggregate(t: Trial) -> Any:
    source = """extern "C" __global__ void k(const int *x, int *counts) {
        int v = x[blockIdx.x * 32 + threadIdx.x]; unsigned peers = __match_any_sync(~0u, v);
        if (threadIdx.x == __ffs(peers) - 1) atomicAdd(&counts[v], __popc(peers)); }"""
    x = t.integers(10, 640)
    return [(t.cuda(source, "k", 20, 32, x, np.zeros(10, np.int32))[1], np.bincount(x, minlength=10))]


@case("shared")
def stencil_2d(t: Trial) -> Any:
    source = """extern "C" __global__ void k(const float *in, float *out, int n) {
        __shared__ float s[18][18]; int x = blockIdx.x * 16 + threadIdx.x, y = blockIdx.y * 16 + threadIdx.y;
        for (int j = threadIdx.y; j < 18; j += 16) for (int i = threadIdx.x; i < 18; i += 16) {
            int u = min(max((int)blockIdx.x * 16 + i - 1, 0), n - 1), v = min(max((int)blockIdx.y * 16 + j - 1, 0),
            n - 1);
            s[j][i] = in[v * n + u]; }
        __syncthreads();
        int i = threadIdx.x + 1, j = threadIdx.y + 1;
        out[y * n + x] = 0.2f * (s[j][i] + s[j - 1][i] + s[j + 1][i] + s[j][i - 1] + s[j][i + 1]); }"""
    m = t.floats(48, 48)
    p = np.pad(m, 1, mode="edge")
    wanted = 0.2 * (m + p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:])
    return [(t.cuda(source, "k", (3, 3), (16, 16), m, m, 48)[1], wanted)]


@case("registers")
def stencil_3d(t: Trial) -> Any:
    source = """extern "C" __global__ void k(const float *in, float *out, int n) {
        int x = threadIdx.x, y = threadIdx.y; if (x < 1 || y < 1 || x >= n - 1 || y >= n - 1) return;
        int at = y * n + x, plane = n * n; float below = in[at], here = in[at + plane];
        for (int z = 1; z < n - 1; z++) { at += plane; float above = in[at + plane];
            out[at] = below + above + in[at - 1] + in[at + 1] + in[at - n] + in[at + n] - 6 * here;
            below = here; here = above; } }"""
    m = t.floats(16, 16, 16)
    wanted = np.zeros_like(m)
    c = m[1:-1, 1:-1, 1:-1]
    around = m[:-2, 1:-1, 1:-1] + m[2:, 1:-1, 1:-1] + m[1:-1, :-2, 1:-1] + m[1:-1, 2:, 1:-1]
    wanted[1:-1, 1:-1, 1:-1] = around + m[1:-1, 1:-1, :-2] + m[1:-1, 1:-1, 2:] - 6 * c
    return [(t.cuda(source, "k", 1, (16, 16), m, np.zeros_like(m), 16)[1], wanted)]


@case("constant")
def convolution(t: Trial) -> Any:
    source = """__constant__ float weights[9];
        extern "C" __global__ void k(const float *x, float *y, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x; if (i >= n) return; float sum = 0;
        for (int j = 0; j < 9; j++) { int at = i + j - 4; if (at >= 0 && at < n) sum += weights[j] * x[at]; }
        y[i] = sum; }"""
    x, w = t.floats(1000), t.floats(9)
    with t.compiling():
        module = t.session.compile(source)
    t.session.mem_write(module.variable("weights"), 0, w)
    return [(t.launch(module, "k", 4, 256, x, x, 1000)[1], np.convolve(x, w[::-1], "same"))]


@case("shared, fast math", tolerance=1e-3)
def n_body(t: Trial) -> Any:
    source = """extern "C" __global__ void k(const float4 *p, float4 *a, int n) {
        __shared__ float4 s[64]; int i = blockIdx.x * 64 + threadIdx.x; float4 me = p[i]; float x = 0, y = 0, z = 0;
        for (int tile = 0; tile < n; tile += 64) { s[threadIdx.x] = p[tile + threadIdx.x]; __syncthreads();
            for (int j = 0; j < 64; j++) { float dx = s[j].x - me.x, dy = s[j].y - me.y, dz = s[j].z - me.z;
                float r = rsqrtf(dx * dx + dy * dy + dz * dz + 0.01f), f = s[j].w * r * r * r;
                x += dx * f; y += dy * f; z += dz * f; }
            __syncthreads(); }
        a[i] = make_float4(x, y, z, 0); }"""
    p = t.floats(128, 4)
    d = p[None, :, :3] - p[:, None, :3]
    f = p[None, :, 3] / ((d**2).sum(2) + 0.01) ** 1.5
    wanted = np.c_[(d * f[:, :, None]).sum(1), np.zeros(128)]
    return [(t.cuda(source, "k", 2, 64, p, np.zeros_like(p), 128)[1], wanted)]


@case()
def mandelbrot(t: Trial) -> Any:
    source = """extern "C" __global__ void k(int *out, int n) {
        int x = blockIdx.x * 16 + threadIdx.x, y = blockIdx.y * 16 + threadIdx.y;
        float cr = -2.f + 3.f * x / n, ci = -1.5f + 3.f * y / n, r = 0, i = 0; int s = 0;
        while (s < 60 && __fadd_rn(__fmul_rn(r, r), __fmul_rn(i, i)) < 4) {
            float q = __fadd_rn(__fsub_rn(__fmul_rn(r, r), __fmul_rn(i, i)), cr);
            i = __fadd_rn(__fmul_rn(__fmul_rn(2.f, r), i), ci); r = q; s++; }
        out[y * n + x] = s; }"""
    n = 64
    grid = np.arange(n, dtype=np.float32)
    cr = (np.float32(-2) + np.float32(3) * grid / np.float32(n))[None, :] + np.zeros((n, 1), np.float32)
    ci = (np.float32(-1.5) + np.float32(3) * grid / np.float32(n))[:, None] + np.zeros((1, n), np.float32)
    r, i, steps = np.zeros_like(cr), np.zeros_like(cr), np.zeros((n, n), np.int32)
    for _ in range(60):
        inside = r * r + i * i < 4
        r, i = np.where(inside, r * r - i * i + cr, r), np.where(inside, 2 * r * i + ci, i)
        steps += inside
    found = t.cuda(source, "k", (4, 4), (16, 16), np.zeros((n, n), np.int32), n)[0]
    return [(np.mean(found != steps) < 0.01, True)]


@case("64-bit integers, atomics", tolerance=0.02)
def monte_carlo(t: Trial) -> Any:
    source = """extern "C" __global__ void k(unsigned *inside, int rounds) {
        unsigned long long state = 12345ull + 7919ull * (blockIdx.x * blockDim.x + threadIdx.x); unsigned hits = 0;
        for (int i = 0; i < rounds; i++) { float p[2];
            for (int j = 0; j < 2; j++) { state = state * 6364136223846793005ull + 1442695040888963407ull;
                p[j] = (unsigned)(state >> 40) / 16777216.f; }
            hits += p[0] * p[0] + p[1] * p[1] < 1; }
        atomicAdd(inside, hits); }"""
    found = t.cuda(source, "k", 4, 128, np.zeros(1, np.uint32), 100)[0]
    return [(4 * found / (512 * 100), [np.pi])]


@case("special functions", tolerance=1e-3)
def black_scholes(t: Trial) -> Any:
    source = """__device__ float cnd(float d) { return 0.5f * erfcf(-d * 0.70710678f); }
        extern "C" __global__ void k(const float *s, const float *x, float *call, float r, float v, float years,
            int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x; if (i >= n) return;
        float root = v * sqrtf(years), d1 = (logf(s[i] / x[i]) + (r + 0.5f * v * v) * years) / root;
        call[i] = s[i] * cnd(d1) - x[i] * expf(-r * years) * cnd(d1 - root); }"""
    from math import erf

    s, x = 5 + 25 * t.random.random(1000, np.float32), 1 + 99 * t.random.random(1000, np.float32)
    root = 0.3
    d1 = (np.log(s / x) + (0.02 + 0.045) * 1.0) / root
    phi = np.vectorize(lambda d: 0.5 * (1 + erf(d / 2**0.5)))
    wanted = s * phi(d1) - x * np.exp(-0.02) * phi(d1 - root)
    given = [s, x, np.zeros_like(s), np.float32(0.02), np.float32(0.3), np.float32(1.0), 1000]
    return [(t.cuda(source, "k", 4, 256, *given)[2], wanted)]


@case("irregular reads, shuffle")
def sparse_product(t: Trial) -> Any:
    source = """extern "C" __global__ void k(const int *rows, const int *cols, const float *v, const float *x,
            float *y) {
        int row = blockIdx.x, lane = threadIdx.x; float sum = 0;
        for (int i = rows[row] + lane; i < rows[row + 1]; i += 32) sum += v[i] * __ldg(&x[cols[i]]);
        for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
        if (!lane) y[row] = sum; }"""
    dense = t.floats(60, 200) * (t.random.random((60, 200)) < 0.2)
    rows = np.r_[0, np.cumsum((dense != 0).sum(1))].astype(np.int32)
    cols, values = np.nonzero(dense)[1].astype(np.int32), dense[np.nonzero(dense)].astype(np.float32)
    x = t.floats(200)
    return [(t.cuda(source, "k", 60, 32, rows, cols, values, x, np.zeros(60, np.float32))[4], dense @ x)]


@case("atomics, several launches")
def breadth_first(t: Trial) -> Any:
    source = """extern "C" __global__ void k(const int *edges, int *level, int *changed, int depth, int n, int degree) {
        int i = blockIdx.x * blockDim.x + threadIdx.x; if (i >= n || level[i] != depth) return;
        for (int e = 0; e < degree; e++) { int to = edges[i * degree + e];
            if (atomicCAS(&level[to], -1, depth + 1) == -1) atomicExch(changed, 1); } }"""
    n, degree = 500, 3
    edges = t.integers(n, n, degree)
    wanted = np.full(n, -1, np.int32)
    wanted[0], front, depth = 0, [0], 0
    while front:
        found = {int(to) for i in front for to in edges[i] if wanted[to] < 0}
        depth += 1
        wanted[list(found)] = depth
        front = list(found)
    level = np.full(n, -1, np.int32)
    level[0] = 0
    with t.compiling():
        module = t.session.compile(source)
    on_card, out = t.session.array(edges), t.session.array(level)
    with t.launching():
        for step in range(n):
            changed = t.session.zeros(1, np.int32)
            t.session.launch(module, "k", [2], [256], [on_card, out, changed, step, n, degree])
            if not changed.numpy()[0]:
                break
    return [(out.numpy(), wanted)]


@case("several launches")
def floyd_warshall(t: Trial) -> Any:
    source = """extern "C" __global__ void k(int *d, int via, int n) {
        int i = blockIdx.y * 16 + threadIdx.y, j = blockIdx.x * 16 + threadIdx.x;
        if (i < n && j < n) d[i * n + j] = min(d[i * n + j], d[i * n + via] + d[via * n + j]); }"""
    n = 40
    wanted = t.integers(1000, n, n) + 1
    np.fill_diagonal(wanted, 0)
    with t.compiling():
        module = t.session.compile(source)
    d = t.session.array(wanted)
    with t.launching():
        for via in range(n):
            t.session.launch(module, "k", [3, 3], [16, 16], [d, via, n])
        t.session.sync()
    for via in range(n):
        wanted = np.minimum(wanted, wanted[:, via : via + 1] + wanted[via])
    return [(d.numpy(), wanted)]


@case("doubles, dynamic shared", tolerance=1e-9)
def cholesky(t: Trial) -> Any:
    source = """extern "C" __global__ void k(double *a, int n) {
        extern __shared__ double s[]; int i = threadIdx.x;
        for (int j = 0; j < n; j++) s[j * n + i] = a[j * n + i];
        for (int j = 0; j < n; j++) { __syncthreads();
            if (i == j) s[j * n + j] = sqrt(s[j * n + j]);
            __syncthreads(); if (i > j) s[i * n + j] /= s[j * n + j];
            __syncthreads(); if (i > j) for (int c = j + 1; c <= i; c++) s[i * n + c] -= s[i * n + j] * s[c * n + j]; }
        __syncthreads(); for (int j = 0; j < n; j++) a[j * n + i] = i <= j ? s[j * n + i] : 0; }"""
    m = t.random.random((32, 32))
    m = m @ m.T + 32 * np.eye(32)
    return [(t.cuda(source, "k", 1, 32, m, 32, shared_bytes=8192)[0], np.linalg.cholesky(m))]


@case("atomics, vectors")
def k_means_step(t: Trial) -> Any:
    source = """extern "C" __global__ void k(const float2 *p, const float2 *c, float *sums, int *counts, int n,
            int clusters) {
        int i = blockIdx.x * blockDim.x + threadIdx.x; if (i >= n) return; int best = 0; float least = 1e30f;
        for (int j = 0; j < clusters; j++) { float x = p[i].x - c[j].x, y = p[i].y - c[j].y, d = x * x + y * y;
            if (d < least) { least = d; best = j; } }
        atomicAdd(&sums[2 * best], p[i].x); atomicAdd(&sums[2 * best + 1], p[i].y); atomicAdd(&counts[best], 1); }"""
    p, c = t.floats(2000, 2), t.floats(5, 2)
    nearest = ((p[:, None] - c[None]) ** 2).sum(2).argmin(1)
    sums = np.array([p[nearest == j].sum(0) for j in range(5)])
    found = t.cuda(source, "k", 8, 256, p, c, np.zeros((5, 2), np.float32), np.zeros(5, np.int32), 2000, 5)
    return [(found[2], sums), (found[3], np.bincount(nearest, minlength=5))]


@case("barriers")
def needleman_wunsch(t: Trial) -> Any:
    source = """extern "C" __global__ void k(const int *a, const int *b, int *score, int n) {
        int w = n + 1, i = threadIdx.x + 1;
        for (int d = 2; d <= 2 * n; d++) { int j = d - i;
            if (j >= 1 && j <= n) score[i * w + j] = max(score[(i - 1) * w + j - 1] + (a[i - 1] == b[j - 1] ? 3 : -1),
                max(score[(i - 1) * w + j], score[i * w + j - 1]) - 2);
            __syncthreads(); } }"""
    n = 48
    a, b = t.integers(4, n), t.integers(4, n)
    wanted = np.zeros((n + 1, n + 1), np.int32)
    wanted[0], wanted[:, 0] = -2 * np.arange(n + 1), -2 * np.arange(n + 1)
    given = wanted.copy()
    for i in range(1, n + 1):
        for j in range(1, n + 1):
            meets = wanted[i - 1, j - 1] + (3 if a[i - 1] == b[j - 1] else -1)
            wanted[i, j] = max(meets, wanted[i - 1, j] - 2, wanted[i, j - 1] - 2)
    return [(t.cuda(source, "k", 1, n, a, b, given, n)[2], wanted)]


@case("several launches")
def game_of_life(t: Trial) -> Any:
    source = """extern "C" __global__ void k(const unsigned char *in, unsigned char *out, int n) {
        int x = blockIdx.x * 16 + threadIdx.x, y = blockIdx.y * 16 + threadIdx.y, sum = 0;
        for (int dy = -1; dy <= 1; dy++) for (int dx = -1; dx <= 1; dx++)
            sum += in[((y + dy + n) % n) * n + (x + dx + n) % n];
        int self = in[y * n + x]; sum -= self; out[y * n + x] = sum == 3 || (self && sum == 2); }"""
    n = 48
    world = t.integers(2, n, n).astype(np.uint8)
    with t.compiling():
        module = t.session.compile(source)
    one, two = t.session.array(world), t.session.array(world)
    with t.launching():
        for _ in range(6):
            t.session.launch(module, "k", [3, 3], [16, 16], [one, two, n])
            one, two = two, one
        t.session.sync()
    for _ in range(6):
        near = sum(np.roll(world, (y, x), (0, 1)) for y in (-1, 0, 1) for x in (-1, 0, 1)) - world
        world = ((near == 3) | ((world == 1) & (near == 2))).astype(np.uint8)
    return [(one.numpy(), world)]
