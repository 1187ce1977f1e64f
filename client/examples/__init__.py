"""Programs to copy from: each runs against the daemon of GPULEASE_ADDRESS."""
