"""Kernels as authors write them: CUDA C, Triton's and numba's functions, CuPy's operations. No driver is needed."""
