"""Kernels as their authors write them: CUDA C by NVRTC, and Triton's functions. No CUDA driver is needed here."""
