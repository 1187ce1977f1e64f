"""The worker's hot path in native code: launches, syncs, and the ring through which they arrive."""
