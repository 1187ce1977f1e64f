"""The zygote: a fork server that has imported everything and never used CUDA, so that a worker is one fork away."""
