"""The ways in which a client's bytes reach the daemon and the workers: sockets, rings in shared memory, TLS."""
