"""The decode engine's kernels: PTX compiled ahead of time, its manifest, and for developers its source and build."""
