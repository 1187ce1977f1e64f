"""CUDA C and PTX that use one feature each. Some features are refused."""

import hashlib
import zlib
from typing import Any, Final

import numpy as np

from .trial import Cases, Trial

CASES: Final = Cases("CUDA C")
case = CASES.add
PTX_CASES: Final = Cases("PTX")


@case("recursion, local memory")
def recursion(t: Trial) -> Any:
    source = """__device__ __noinline__ int fib(int n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }
        extern "C" __global__ void k(int *x) { x[threadIdx.x] = fib(threadIdx.x); }"""
    wanted = [0, 1]
    while len(wanted) < 16:
        wanted.append(wanted[-1] + wanted[-2])
    return [(t.cuda(source, "k", 1, 16, np.zeros(16, np.int32))[0], wanted)]


@case("function pointers")
def function_pointers(t: Trial) -> Any:
    source = """typedef float (*F)(float, float);
        __device__ __noinline__ float plus(float a, float b) { return a + b; }
        __device__ __noinline__ float times(float a, float b) { return a * b; }
        __device__ F table[2] = {plus, times};
        extern "C" __global__ void k(float *x) { x[threadIdx.x] = table[threadIdx.x & 1](x[threadIdx.x], 3); }"""
    x = t.floats(32)
    wanted = np.where(np.arange(32) % 2, x * 3, x + 3)
    return [(t.cuda(source, "k", 1, 32, x)[0], wanted)]


@case("local memory")
def local_array(t: Trial) -> Any:
    source = """extern "C" __global__ void k(const int *order, int *x) {
        int held[32]; for (int i = 0; i < 32; i++) held[order[i]] = i * threadIdx.x;
        int sum = 0; for (int i = 0; i < 32; i++) sum = sum * 3 + held[i]; x[threadIdx.x] = sum; }"""
    order = t.random.permutation(32).astype(np.int32)
    wanted = []
    for thread in range(32):
        held, total = np.zeros(32, np.int64), 0
        held[order] = np.arange(32) * thread
        for value in held:
            total = (total * 3 + int(value)) & 0xFFFFFFFF
        wanted.append(total)
    found = t.cuda(source, "k", 1, 32, order, np.zeros(32, np.int32))[1]
    return [(found.view(np.uint32).astype(np.float64), wanted)]


@case("switch")
def switch_table(t: Trial) -> Any:
    source = """extern "C" __global__ void k(int *x) { int v = x[threadIdx.x], i = threadIdx.x;
        switch (v) { case 0: v = i; break; case 1: v = i * i; break; case 2: v = -i; break; case 3: v = i << 3; break;
            case 4: v = i ^ 21; break; case 5: v = i % 7; break; case 6: v = i / 3; break; default: v = 1000; }
        x[i] = v; }"""
    x, i = t.integers(9, 256), np.arange(256)
    kinds = [i, i * i, -i, i << 3, i ^ 21, i % 7, i // 3, np.full(256, 1000), np.full(256, 1000)]
    return [(t.cuda(source, "k", 1, 256, x)[0], np.choose(x, kinds))]


@case("64-bit atomics")
def atomics_64(t: Trial) -> Any:
    source = """extern "C" __global__ void k(const unsigned long long *x, unsigned long long *out, double *sum) {
        unsigned long long v = x[blockIdx.x * 128 + threadIdx.x];
        atomicAdd(&out[0], v); atomicMax(&out[1], v); atomicMin(&out[2], v); atomicXor(&out[3], v); atomicAdd(sum,
            v * 0.5); }"""
    x = t.random.integers(0, 1 << 40, 1024).astype(np.uint64)
    out = np.array([0, 0, 2**63, 0], np.uint64)
    found = t.cuda(source, "k", 8, 128, x, out, np.zeros(1))
    wanted = [x.sum(), x.max(), x.min(), np.bitwise_xor.reduce(x)]
    return [(found[1] == np.array(wanted, np.uint64), np.ones(4)), (found[2], [x.sum() / 2])]


@case("byte permutation, bit counts")
def bit_tricks(t: Trial) -> Any:
    source = """extern "C" __global__ void k(const unsigned *x, unsigned *y) { unsigned v = x[threadIdx.x];
        y[threadIdx.x] = __byte_perm(v, ~v, 0x2741) ^ __brev(v) ^ (__popc(v) << 8) ^ __clz(v) ^ __funnelshift_l(v, v,
            7); }"""
    x = t.random.integers(1, 1 << 32, 128).astype(np.uint64)
    mask = np.uint64(0xFFFFFFFF)
    both = x | ((~x & mask) << np.uint64(32))
    nibbles = [(both >> np.uint64(8 * at)) & np.uint64(255) for at in range(8)]
    permuted = nibbles[1] | nibbles[4] << np.uint64(8) | nibbles[7] << np.uint64(16) | nibbles[2] << np.uint64(24)
    text = [f"{int(v):032b}" for v in x]
    reverse = np.array([int(bits[::-1], 2) for bits in text], np.uint64)
    ones = np.array([bits.count("1") for bits in text], np.uint64)
    zeros = np.array([bits.find("1") for bits in text], np.uint64)
    turned = ((x << np.uint64(7)) | (x >> np.uint64(25))) & mask
    wanted = permuted ^ reverse ^ (ones << np.uint64(8)) ^ zeros ^ turned
    found = t.cuda(source, "k", 1, 128, x.astype(np.uint32), np.zeros(128, np.uint32))[1]
    return [(found == wanted, np.ones(128))]


@case("bits")
def crc32(t: Trial) -> Any:
    source = """extern "C" __global__ void k(const unsigned char *x, unsigned *crc, int n) { unsigned c = ~0u;
        for (int i = 0; i < n; i++) { c ^= x[threadIdx.x * n + i];
            for (int b = 0; b < 8; b++) c = c >> 1 ^ (c & 1 ? 0xEDB88320u : 0); }
        crc[threadIdx.x] = ~c; }"""
    x = t.integers(256, 32, 40).astype(np.uint8)
    found = t.cuda(source, "k", 1, 32, x, np.zeros(32, np.uint32), 40)[1]
    return [(found == [zlib.crc32(row.tobytes()) for row in x], np.ones(32))]


@case("constant, local memory")
def sha256(t: Trial) -> Any:
    primes = [p for p in range(2, 312) if all(p % q for q in range(2, p))]
    rounds = ", ".join(f"{int((p ** (1 / 3) % 1) * 2**32)}u" for p in primes[:64])
    start = ", ".join(f"{int((p**0.5 % 1) * 2**32)}u" for p in primes[:8])
    source = f"""__constant__ unsigned K[64] = {{{rounds}}};
        __device__ unsigned r(unsigned x, int n) {{ return __funnelshift_r(x, x, n); }}
        extern "C" __global__ void k(const unsigned char *in, unsigned *out) {{
        unsigned w[64], h[8] = {{{start}}}, v[8]; const unsigned char *p = in + 64 * threadIdx.x;
        for (int i = 0; i < 16; i++) w[i] = p[4*i] << 24 | p[4*i+1] << 16 | p[4*i+2] << 8 | p[4*i+3];
        for (int i = 16; i < 64; i++) w[i] = w[i-16] + (r(w[i-15], 7) ^ r(w[i-15], 18) ^ w[i-15] >> 3) + w[i-7]
            + (r(w[i-2], 17) ^ r(w[i-2], 19) ^ w[i-2] >> 10);
        for (int i = 0; i < 8; i++) v[i] = h[i];
        for (int i = 0; i < 64; i++) {{
            unsigned a = v[7] + (r(v[4], 6) ^ r(v[4], 11) ^ r(v[4], 25)) + (v[4] & v[5] ^ ~v[4] & v[6]) + K[i] + w[i];
            unsigned b = (r(v[0], 2) ^ r(v[0], 13) ^ r(v[0], 22)) + (v[0] & v[1] ^ v[0] & v[2] ^ v[1] & v[2]);
            for (int j = 7; j; j--) v[j] = v[j-1];
            v[4] += a; v[0] = a + b; }}
        for (int i = 0; i < 8; i++) out[8 * threadIdx.x + i] = h[i] + v[i]; }}"""
    texts = [t.random.bytes(55) for _ in range(16)]
    blocks = b"".join(text + b"\x80" + (440).to_bytes(8, "big") for text in texts)
    found = t.cuda(source, "k", 1, 16, np.frombuffer(blocks, np.uint8), np.zeros((16, 8), np.uint32))[1]
    wanted = np.array([np.frombuffer(hashlib.sha256(text).digest(), ">u4") for text in texts])
    return [(found == wanted, np.ones((16, 8)))]


@case("printf")
def prints(t: Trial) -> Any:
    source = (
        """extern "C" __global__ void k(int n) { if (threadIdx.x == n) printf("thread %d of %s\\n", n, "many"); }"""
    )
    t.session.printed()
    t.cuda(source, "k", 1, 32, 5)
    return [(t.session.printed().text == "thread 5 of many\n", True)]


@case("device heap")
def device_heap(t: Trial) -> Any:
    source = """extern "C" __global__ void k(int *x) { int *p = (int *)malloc(64 * sizeof(int));
        if (!p) { x[threadIdx.x] = -1; return; }
        for (int i = 0; i < 64; i++) p[i] = i * threadIdx.x;
        int sum = 0; for (int i = 0; i < 64; i++) sum += p[i];
        free(p); x[threadIdx.x] = sum; }"""
    return [(t.cuda(source, "k", 1, 32, np.zeros(32, np.int32))[0], 2016 * np.arange(32))]


@case("streams, events")
def streams_and_events(t: Trial) -> Any:
    source = """extern "C" __global__ void k(float *x, float by) { x[threadIdx.x] *= by; }"""
    x = t.floats(64)
    with t.compiling():
        module = t.session.compile(source)
    array, first, second = t.session.array(x), t.session.stream(), t.session.stream()
    with t.launching():
        begin = first.event()
        t.session.launch(module, "k", [1], [64], [array, np.float32(2)], stream=first)
        second.wait_for(first)
        t.session.launch(module, "k", [1], [64], [array, np.float32(3)], stream=second)
        second.sync()
        took_ms = begin.elapsed_ms(second.event())
    return [(array.numpy(), x * 6), (took_ms >= 0, True)]


@case("graphs")
def recorded_graph(t: Trial) -> Any:
    source = """extern "C" __global__ void k(float *x, float plus) { x[threadIdx.x] += plus; }"""
    with t.compiling():
        module = t.session.compile(source)
    array = t.session.zeros(64, np.float32)
    with t.session.record() as graph:
        for plus in (1, 2, 3):
            t.session.launch(module, "k", [1], [64], [array, np.float32(plus)])
    with t.launching():
        for _ in range(10):
            graph.launch()
        t.session.sync()
    return [(array.numpy(), np.full(64, 60))]


GRID_BARRIER: Final = """extern "C" __global__ void k(unsigned *cell, unsigned *seen) {
    __syncthreads();
    if (!threadIdx.x) { atomicAdd(cell, 1u); while (*(volatile unsigned *)cell < gridDim.x); }
    __syncthreads();
    if (!threadIdx.x) seen[blockIdx.x] = *(volatile unsigned *)cell; }"""


@case("cooperative, atomics", cpu="the embedded driver runs blocks one after another")
def cooperative_barrier(t: Trial) -> Any:
    given = [np.zeros(1, np.uint32), np.zeros(16, np.uint32)]
    return [(t.cuda(GRID_BARRIER, "k", 16, 64, *given, cooperative=True)[1], np.full(16, 16))]


@case(
    "cooperative, atomics",
    cpu="the embedded driver runs blocks one after another",
    cuda="a cooperative launch of 1048576 blocks was requested; at most",
)
def cooperative_too_large(t: Trial) -> Any:
    given = [np.zeros(1, np.uint32), np.zeros(1, np.uint32)]
    return [(t.cuda(GRID_BARRIER, "k", 1 << 20, 64, *given, cooperative=True), "refused")]


@case("clusters", cpu="the embedded driver runs blocks one after another")
def cluster_ranks(t: Trial) -> Any:
    source = """extern "C" __global__ void k(unsigned *x) { unsigned rank;
        asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank)); x[blockIdx.x] = rank; }"""
    with t.compiling():
        module = t.session.compile(source, arch=90)
    return [(t.launch(module, "k", 8, 1, np.zeros(8, np.uint32), cluster=(4,))[0], [0, 1, 2, 3] * 2)]


@case("textures", only_on="cpu", cpu="instead of textures")
def texture(t: Trial) -> Any:
    source = """extern "C" __global__ void k(unsigned long long image, float *x) { float a, b, c, d;
        asm("tex.1d.v4.f32.s32 {%0, %1, %2, %3}, [%4, {%5}];"
            : "=f"(a), "=f"(b), "=f"(c), "=f"(d) : "l"(image), "r"(threadIdx.x)); x[threadIdx.x] = a; }"""
    return [(t.cuda(source, "k", 1, 32, np.uint64(1), np.zeros(32, np.float32)), "refused")]


@PTX_CASES.add("warpgroup matrix instructions", cpu="sm_80")
def warpgroup_product(t: Trial) -> Any:
    text = """.version 8.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out) { .reg .f32 %f<5>; .reg .b64 %d<3>; .shared .align 128 .b8 held[4096];
  mov.f32 %f1, 0f00000000; mov.f32 %f2, %f1; mov.f32 %f3, %f1; mov.f32 %f4, %f1; mov.u64 %d1, 0;
  wgmma.fence.sync.aligned;
  wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1, %f2, %f3, %f4}, %d1, %d1, 0, 1, 1, 0, 0;
  wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
  ld.param.u64 %d2, [out]; cvta.to.global.u64 %d2, %d2; mov.f32 %f1, 0f40A00000; st.global.f32 [%d2], %f1; ret; }"""
    with t.compiling():
        module = t.session.module_load(text)
    # Check only that it runs to its end, because its shared memory has no defined contents.
    return [(t.launch(module, "k", 1, 128, np.zeros(1, np.float32))[0], [5])]


@PTX_CASES.add("128-bit atomics", cpu=".b128")
def exchange_128(t: Trial) -> Any:
    text = """.version 8.4
.target sm_90
.address_size 64
.visible .entry k(.param .u64 cell) { .reg .b64 %d<6>; .reg .b128 %q<3>;
  ld.param.u64 %d1, [cell]; cvta.to.global.u64 %d1, %d1; mov.u64 %d2, 7; mov.u64 %d3, 9; mov.b128 %q1, {%d2, %d3};
  atom.global.exch.b128 %q2, [%d1], %q1; mov.b128 {%d4, %d5}, %q2; st.global.u64 [%d1+16], %d4;
            st.global.u64 [%d1+24], %d5;
  ret; }"""
    with t.compiling():
        module = t.session.module_load(text)
    found = t.launch(module, "k", 1, 1, np.array([1, 2, 0, 0], np.uint64))[0]
    return [(found, [7, 9, 1, 2])]


@PTX_CASES.add("alloca")
def stack_memory(t: Trial) -> Any:
    text = """.version 7.3
.target sm_75
.address_size 64
.visible .entry k(.param .u64 out, .param .u64 size) { .reg .b64 %d<5>; .reg .b32 %r<4>;
  ld.param.u64 %d1, [out]; ld.param.u64 %d2, [size]; cvta.to.global.u64 %d1, %d1;
  alloca.u64 %d3, %d2; mov.u32 %r1, %tid.x; st.local.u32 [%d3+8], %r1; ld.local.u32 %r2, [%d3+8];
  mul.wide.u32 %d4, %r1, 4; add.u64 %d1, %d1, %d4; st.global.u32 [%d1], %r2; ret; }"""
    with t.compiling():
        module = t.session.module_load(text)
    return [(t.launch(module, "k", 1, 32, np.zeros(32, np.uint32), np.uint64(64))[0], np.arange(32))]


@PTX_CASES.add("surfaces", only_on="cpu", cpu="instead of textures and surfaces")
def surface(t: Trial) -> Any:
    text = """.version 7.0
.target sm_75
.address_size 64
.global .surfref image;
.visible .entry k() { .reg .b32 %r<2>; suld.b.1d.b32.trap {%r1}, [image, {%r1}]; ret; }
.visible .entry plain(.param .u64 x) { .reg .b64 %d; ld.param.u64 %d, [x]; st.global.u32 [%d], 5; ret; }"""
    with t.compiling():
        module = t.session.module_load(text)
    assert t.launch(module, "plain", 1, 1, np.zeros(1, np.uint32))[0].tolist() == [5]
    return [(t.launch(module, "k", 1, 1), "refused")]
