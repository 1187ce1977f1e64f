"""How a client's bytes travel: a Unix or TCP socket, TLS, or a ring in shared memory."""
