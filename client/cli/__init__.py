"""The command `gpulease`."""
