"""LLVM IR to machine code, and the native loop that runs launches."""
