"""Kernels as authors write them: CUDA C, Triton and numba functions, CuPy operations. They compile without a driver."""
