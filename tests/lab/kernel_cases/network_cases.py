"""CUDA C as in training and inference of language models: norms, attention, optimisers and quantised products."""

from typing import Any, Final

import numpy as np

from .trial import Cases, Trial

CASES: Final = Cases("CUDA C")
case = CASES.add

WARP_SUM: Final = """__device__ float all_sum(float v) {
    for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d); return v; }
__device__ float all_max(float v) {
    for (int d = 16; d; d >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, d)); return v; }
"""


def softmax(x: Any) -> Any:
    """Compute the softmax over the last dimension."""
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


@case("shuffle, special functions")
def softmax_rows(t: Trial) -> Any:
    source = (
        WARP_SUM
        + """extern "C" __global__ void k(const float *x, float *y, int n) {
        const float *row = x + blockIdx.x * n; float top = -1e30f, sum = 0;
        for (int i = threadIdx.x; i < n; i += 32) top = fmaxf(top, row[i]);
        top = all_max(top);
        for (int i = threadIdx.x; i < n; i += 32) sum += expf(row[i] - top);
        sum = all_sum(sum);
        for (int i = threadIdx.x; i < n; i += 32) y[blockIdx.x * n + i] = expf(row[i] - top) / sum; }"""
    )
    x = t.floats(20, 300) * 5
    return [(t.cuda(source, "k", 20, 32, x, x, 300)[1], softmax(x))]


@case("shuffle")
def layer_norm(t: Trial) -> Any:
    source = (
        WARP_SUM
        + """extern "C" __global__ void k(const float *x, const float *g, const float *b, float *y, int n) {
        const float *row = x + blockIdx.x * n; float mean = 0, var = 0;
        for (int i = threadIdx.x; i < n; i += 32) mean += row[i];
        mean = all_sum(mean) / n;
        for (int i = threadIdx.x; i < n; i += 32) var += (row[i] - mean) * (row[i] - mean);
        float scale = rsqrtf(all_sum(var) / n + 1e-5f);
        for (int i = threadIdx.x; i < n; i += 32) y[blockIdx.x * n + i] = (row[i] - mean) * scale * g[i] + b[i]; }"""
    )
    x, g, b = t.floats(20, 200), t.floats(200), t.floats(200)
    wanted = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5) * g + b
    return [(t.cuda(source, "k", 20, 32, x, g, b, x, 200)[3], wanted)]


@case("special functions")
def gelu(t: Trial) -> Any:
    source = """extern "C" __global__ void k(float *x, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x; if (i >= n) return; float v = x[i];
        x[i] = 0.5f * v * (1 + tanhf(0.7978845608f * (v + 0.044715f * v * v * v))); }"""
    x = t.floats(1000) * 4
    wanted = 0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3)))
    return [(t.cuda(source, "k", 4, 256, x, 1000)[0], wanted)]


@case("gather")
def token_embedding(t: Trial) -> Any:
    source = """extern "C" __global__ void k(const int *tokens, const float4 *wte, const float4 *wpe, float4 *out,
            int c) {
        int at = blockIdx.x, i = threadIdx.x; if (i >= c) return;
        float4 a = wte[tokens[at] * c + i], b = wpe[at * c + i];
        out[at * c + i] = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }"""
    tokens, wte, wpe = t.integers(50, 30), t.floats(50, 64), t.floats(30, 64)
    return [(t.cuda(source, "k", 30, 32, tokens, wte, wpe, np.zeros_like(wpe), 16)[3], wte[tokens] + wpe)]


@case("shuffle, online softmax")
def attention(t: Trial) -> Any:
    source = (
        WARP_SUM
        + """extern "C" __global__ void k(const float *q, const float *keys, const float *v, float *out, int n) {
        int row = blockIdx.x, lane = threadIdx.x; float mine = q[row * 32 + lane] * 0.1767767f, top = -1e30f,
            sum = 0, acc = 0;
        for (int j = 0; j <= row; j++) { float s = all_sum(mine * keys[j * 32 + lane]), next = fmaxf(top, s);
            float keep = expf(top - next), p = expf(s - next);
            sum = sum * keep + p; acc = acc * keep + p * v[j * 32 + lane]; top = next; }
        out[row * 32 + lane] = acc / sum; }"""
    )
    q, k, v = (t.floats(40, 32) for _ in range(3))
    scores = np.where(np.tri(40, dtype=bool), q @ k.T * 32**-0.5, -1e30)
    return [(t.cuda(source, "k", 40, 32, q, k, v, q, 40)[3], softmax(scores) @ v)]


@case("special functions")
def adam_w(t: Trial) -> Any:
    source = """extern "C" __global__ void k(float *w, const float *g, float *m, float *v, float rate, float c1,
            float c2, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x; if (i >= n) return;
        m[i] = 0.9f * m[i] + 0.1f * g[i]; v[i] = 0.999f * v[i] + 0.001f * g[i] * g[i];
        w[i] -= rate * ((m[i] / c1) / (sqrtf(v[i] / c2) + 1e-8f) + 0.01f * w[i]); }"""
    w, g, m = t.floats(1000), t.floats(1000), t.floats(1000)
    v = t.floats(1000) ** 2
    m1, v1 = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    wanted = w - 0.01 * ((m1 / 0.19) / (np.sqrt(v1 / 0.01) + 1e-8) + 0.01 * w)
    given = [w, g, m, v, np.float32(0.01), np.float32(0.19), np.float32(0.01), 1000]
    found = t.cuda(source, "k", 4, 256, *given)
    return [(found[0], wanted), (found[2], m1), (found[3], v1)]


@case("shuffle, special functions")
def cross_entropy(t: Trial) -> Any:
    source = (
        WARP_SUM
        + """extern "C" __global__ void k(const float *x, const int *to, float *loss, float *grad, int n) {
        const float *row = x + blockIdx.x * n; float top = -1e30f, sum = 0;
        for (int i = threadIdx.x; i < n; i += 32) top = fmaxf(top, row[i]);
        top = all_max(top);
        for (int i = threadIdx.x; i < n; i += 32) sum += expf(row[i] - top);
        sum = all_sum(sum); int target = to[blockIdx.x];
        for (int i = threadIdx.x; i < n; i += 32) grad[blockIdx.x * n + i] = expf(row[i] - top) / sum - (i == target);
        if (!threadIdx.x) loss[blockIdx.x] = logf(sum) + top - row[target]; }"""
    )
    x, to = t.floats(16, 100) * 3, t.integers(100, 16)
    p = softmax(x)
    found = t.cuda(source, "k", 16, 32, x, to, np.zeros(16, np.float32), x, 100)
    return [(found[2], -np.log(p[np.arange(16), to])), (found[3], p - np.eye(100)[to])]


@case("dp4a, shuffle")
def quantised_dot(t: Trial) -> Any:
    source = """extern "C" __global__ void k(const int *a, const int *b, int *sums, int n) {
        int sum = 0; for (int i = threadIdx.x; i < n; i += 32) sum = __dp4a(a[blockIdx.x * n + i], b[i], sum);
        for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
        if (!threadIdx.x) sums[blockIdx.x] = sum; }"""
    a = t.random.integers(-128, 128, (10, 256)).astype(np.int8)
    b = t.random.integers(-128, 128, 256).astype(np.int8)
    found = t.cuda(source, "k", 10, 32, a.view(np.int32), b.view(np.int32), np.zeros(10, np.int32), 64)
    return [(found[2], a.astype(np.int32) @ b.astype(np.int32))]


@case("bit fields, shuffle")
def four_bit_weights(t: Trial) -> Any:
    source = """extern "C" __global__ void k(const unsigned *w, const float *scale, const float *x, float *y, int n) {
        float sum = 0; for (int i = threadIdx.x; i < n; i += 32) { unsigned eight = w[blockIdx.x * n + i];
            float part = 0;
            for (int j = 0; j < 8; j++) part += ((int)(eight >> 4 * j & 15) - 8) * x[8 * i + j];
            sum += part * scale[blockIdx.x * (n / 4) + i / 4]; }
        for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
        if (!threadIdx.x) y[blockIdx.x] = sum; }"""
    w, scale, x = t.integers(16, 12, 256).astype(np.uint32), t.floats(12, 8), t.floats(256)
    packed = (w.reshape(12, 32, 8) << (4 * np.arange(8, dtype=np.uint32))).sum(2).astype(np.uint32)
    real = (w.astype(np.float32) - 8) * np.repeat(scale, 32, axis=1)
    return [(t.cuda(source, "k", 12, 32, packed, scale, x, np.zeros(12, np.float32), 32)[3], real @ x)]


@case("special functions")
def rotary_embedding(t: Trial) -> Any:
    source = """extern "C" __global__ void k(float2 *x, int half) {
        int at = blockIdx.x, i = threadIdx.x; float sine, cosine;
        sincosf(at * powf(10000.f, -(float)i / half), &sine, &cosine); float2 v = x[at * half + i];
        x[at * half + i] = make_float2(v.x * cosine - v.y * sine, v.x * sine + v.y * cosine); }"""
    x = t.floats(20, 32)
    angle = np.arange(20)[:, None] * 10000.0 ** (-np.arange(16) / 16)
    z = (x[:, ::2] + 1j * x[:, 1::2]) * np.exp(1j * angle)
    wanted = np.stack([z.real, z.imag], 2).reshape(20, 32)
    return [(t.cuda(source, "k", 20, 16, x, 16)[0], wanted)]


HALVES: Final = """__device__ float wide(unsigned short h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
            return f; }
__device__ unsigned short narrow(float f) { unsigned short h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
            return h; }
"""


@case("half precision, shuffle", tolerance=2e-3)
def half_rms_norm(t: Trial) -> Any:
    source = (
        HALVES
        + WARP_SUM
        + """extern "C" __global__ void k(const unsigned short *x, unsigned short *y, int n) {
        float sum = 0; for (int i = threadIdx.x; i < n; i += 32) { float v = wide(x[blockIdx.x * n + i]); sum
            += v * v; }
        float scale = rsqrtf(all_sum(sum) / n + 1e-6f);
        for (int i = threadIdx.x; i < n; i += 32) y[blockIdx.x * n + i] = narrow(wide(x[blockIdx.x * n
            + i]) * scale); }"""
    )
    x = t.floats(16, 128).astype(np.float16)
    wide = x.astype(np.float32)
    wanted = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-6)
    found = t.cuda(source, "k", 16, 32, x.view(np.uint16), x.view(np.uint16), 128)[1]
    return [(found.view(np.float16), wanted)]


@case("tensor cores", tolerance=2e-3)
def tensor_core_product(t: Trial) -> Any:
    source = """extern "C" __global__ void k(const unsigned *a, const unsigned *b, float *c) {
        int lane = threadIdx.x, group = lane >> 2, in = lane & 3; float d[4] = {};
        unsigned a0 = a[group * 8 + in], a1 = a[(group + 8) * 8 + in], a2 = a[group * 8 + in + 4], a3 = a[(group
            + 8) * 8 + in + 4];
        unsigned b0 = b[group * 8 + in], b1 = b[group * 8 + in + 4];
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
        c[group * 8 + in * 2] = d[0]; c[group * 8 + in * 2 + 1] = d[1];
        c[(group + 8) * 8 + in * 2] = d[2]; c[(group + 8) * 8 + in * 2 + 1] = d[3]; }"""
    a, b = t.floats(16, 16).astype(np.float16), t.floats(16, 8).astype(np.float16)
    columns = np.ascontiguousarray(b.T)
    found = t.cuda(source, "k", 1, 32, a.view(np.uint32), columns.view(np.uint32), np.zeros((16, 8), np.float32))[2]
    return [(found, a.astype(np.float32) @ b.astype(np.float32))]


@case("asynchronous copies, dynamic shared")
def pipelined_copy(t: Trial) -> Any:
    source = """extern "C" __global__ void k(const float4 *x, float4 *y, int rounds) {
        extern __shared__ float4 held[]; int i = threadIdx.x, n = blockDim.x;
        auto fetch = [&](int r) { unsigned at = __cvta_generic_to_shared(&held[(r & 1) * n + i]);
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16; cp.async.commit_group;" :: "r"(at), "l"(&x[r * n
            + i])); };
        fetch(0);
        for (int r = 0; r < rounds; r++) {
            if (r + 1 < rounds) { fetch(r + 1); asm volatile("cp.async.wait_group 1;"); }
            else asm volatile("cp.async.wait_group 0;");
            __syncthreads(); float4 v = held[(r & 1) * n + (i ^ 1)]; y[r * n + i] = v; __syncthreads(); } }"""
    x = t.floats(8 * 64, 4)
    found = t.cuda(source, "k", 1, 64, x, x, 8, shared_bytes=2 * 64 * 16)[1]
    return [(found, x.reshape(-1, 2, 4)[:, ::-1].reshape(-1, 4))]
