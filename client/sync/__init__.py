"""The blocking face of the library."""
