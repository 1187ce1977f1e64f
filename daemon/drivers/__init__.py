"""Drivers, through which a worker uses a card: the interface, and its two implementations."""
