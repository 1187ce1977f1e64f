"""Computes steps: the forward pass, its kernels and its buffers, in one session."""
