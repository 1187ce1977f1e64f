"""The web page and the health checks, when the operator asks for them (`--http`): a process beside the broker.

The broker parses no HTTP. It holds the listening socket, starts this process, and speaks the ordinary protocol with it
as with a peer who may see all and change nothing. That an operator ends a lease by the page is passed on to the broker
with the operator's token, which is looked at there. Whoever takes this process over has a view of the leases, two
sockets and next to no system calls, and the token from when an operator next uses it: it is shut in as workers are,
before the first byte of a request is read.
"""
