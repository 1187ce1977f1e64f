"""Examples to copy from. Each runs against the daemon that GPULEASE_ADDRESS names."""
