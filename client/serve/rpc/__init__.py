"""Calls through memory shared with a server on the same host; `protocol.rpc` has the layout and its rules.

    with RpcClient("unix:/run/models.sock") as models:
        models.describe()
        models.call(1, image).payload

Neither side spins while it is idle: a server sleeps until a caller rings, and a caller polls for its reply for a
bounded time and then sleeps. To ring is to send one byte, called a bell, through the connection's socket.
"""

from gpulease.client.serve.rpc.client import CallFailed, CallTimedOut, RpcClient
from gpulease.client.serve.rpc.server import Answer, Handler, Outcome, RpcServer

__all__ = ["Answer", "CallFailed", "CallTimedOut", "Handler", "Outcome", "RpcClient", "RpcServer"]
