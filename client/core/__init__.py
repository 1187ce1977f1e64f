"""The engine of both faces. Nothing here waits: its procedures are generators that yield the steps to wait for."""
