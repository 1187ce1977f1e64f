"""The web page, the health checks and the metrics (`--http`): a process next to the broker.

The broker parses no HTTP. It holds the listening socket, starts this process, and serves it over the ordinary protocol
as a peer that may see everything and change nothing. When an operator ends a lease on the page, this process passes the
request to the broker with the operator's token, and the broker checks the token.

An attacker who takes this process over has a view of the leases, two sockets and very few system calls, and the
operator's token from its next use on. Before it reads the first byte of a request, the process enters the workers'
sandbox.
"""
