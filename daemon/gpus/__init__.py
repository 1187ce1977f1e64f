"""The host's cards, and the readings that prove their memory free after a lease."""
