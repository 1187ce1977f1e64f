"""The zygote: a fork server that has imported everything and not touched CUDA, so that a worker is one fork away."""
