"""The worker's hot path in native code: launches, syncs, and the ring that they come through."""
