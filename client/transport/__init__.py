"""Transports of the client's bytes: a Unix or TCP socket, TLS, or a ring in shared memory."""
