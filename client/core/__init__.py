"""The core of both APIs. It never waits itself: procedures are generators that yield the steps to wait for."""
