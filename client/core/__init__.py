"""The core of both APIs. Nothing here waits: procedures are generators that yield the steps to wait for."""
