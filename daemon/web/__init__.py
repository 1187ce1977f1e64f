"""The web process, which serves the web page, health checks and metrics over HTTP (`--http`).

The broker parses no HTTP. It opens the listening socket, starts this process, and serves it over the ordinary protocol
as a peer that may read everything and change nothing. When an operator ends a lease on the page, this process passes
the request to the broker with the operator's token, and the broker checks the token.

Before it reads the first byte of a request, the process enters the workers' sandbox. An attacker who takes over the
process can see the leases, use two sockets and a few system calls, and read the operator's token when an operator next
uses the page.
"""
