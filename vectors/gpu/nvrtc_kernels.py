"""Kernels compiled by NVRTC, as programs do that compile when they run.

Compiled by NVRTC 13.5.37 (nvidia-cuda-nvrtc, through cuda-bindings 13.5.0), in this folder and with no GPU, by
    python nvrtc_kernels.py
and kept exactly as it wrote them.
"""

from pathlib import Path

from cuda.bindings import nvrtc

SOURCE = b"""
template <typename T> __device__ __noinline__ T power(T x, int n) { return n ? x * power(x, n - 1) : T(1); }
template <typename T> __global__ void powers(T* x, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = power(x[i], i % 5);
}
template __global__ void powers<float>(float*, int);
template __global__ void powers<long long>(long long*, int);
extern "C" __global__ void twice(double* x) { x[threadIdx.x] *= 2; }
"""

if __name__ == "__main__":
    _, program = nvrtc.nvrtcCreateProgram(SOURCE, b"kernels.cu", 0, [], [])
    nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=compute_90"])
    _, size = nvrtc.nvrtcGetPTXSize(program)
    text = bytearray(size)
    nvrtc.nvrtcGetPTX(program, text)
    Path("nvrtc.sm90.ptx").write_bytes(bytes(text).rstrip(b"\0"))
