"""The embedded driver, which executes PTX on the host, so that every part of the product runs without a GPU."""
