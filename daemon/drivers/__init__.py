"""Drivers, which a worker computes with: the interface, and the two drivers that implement it."""
