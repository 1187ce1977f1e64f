"""The driver for NVIDIA cards. Nothing outside this folder imports pycuda or cuda-bindings."""
