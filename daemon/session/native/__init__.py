"""The worker's hot path in native code: launches and syncs as they come, and the ring they come through."""
