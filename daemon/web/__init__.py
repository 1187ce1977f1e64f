"""The web page, the health checks and the metrics (`--http`): a process next to the broker.

The broker parses no HTTP. It opens the listening socket, starts this process, and serves it over the ordinary protocol
as a peer that may read everything and change nothing. When an operator ends a lease on the page, this process passes
the request to the broker with the operator's token, and the broker checks the token.

An attacker who takes over this process can see the leases, use two sockets and very few system calls, and read the
operator's token when it is next used. Before it reads the first byte of a request, the process enters the workers'
sandbox.
"""
