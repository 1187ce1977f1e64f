"""The core of both APIs. It never waits itself: its procedures are generators that yield the steps to wait for."""
