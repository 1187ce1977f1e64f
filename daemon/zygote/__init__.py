"""The fork server: everything imported, no CUDA touched, so that a worker is one fork away."""
