"""Measuring leases: the figures `gpulease bench` prints."""
