"""Drivers, with which a worker computes: the interface, and the two drivers that implement it."""
