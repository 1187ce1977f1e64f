"""One control request over a connection of its own."""

from gpulease.client.sync.driver import ask as ask
