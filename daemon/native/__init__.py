"""LLVM IR compiled to machine code of this process, for the daemon's own loops and for kernels."""
