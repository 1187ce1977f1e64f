"""Examples to copy from. Each uses the daemon that GPULEASE_ADDRESS names."""
