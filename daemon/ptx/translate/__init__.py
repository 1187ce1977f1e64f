"""A PTX tree to LLVM IR text, one file for each family of instructions."""
