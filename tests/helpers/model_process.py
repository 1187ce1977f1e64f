"""`gpulease serve models` in a separate process, called over real sockets."""

import re
from pathlib import Path
from typing import Any

import httpx

from gpulease.client.serve.rpc import RpcClient
from helpers.daemon import Daemon
from helpers.gateway_process import BINARY
from helpers.serving_process import ServingProcess


class ModelProcess(ServingProcess):
    """A server that listens on a free TCP port, and on a Unix socket in `folder`, whose path must be short."""

    listens = re.compile(r"listen on (\S+) and")
    stopped = "have stopped"

    def __init__(self, daemon: Daemon, folder: Path, config: Path) -> None:
        self.rpc_address = f"unix:{folder}/rpc"
        words = ["--listen", "tcp:127.0.0.1:0", "--rpc", self.rpc_address]
        super().__init__(daemon, folder / "models.log", "models", str(config), *words)

    def http(self) -> httpx.Client:
        """Return an HTTP client of the server, which the test must close."""
        return httpx.Client(base_url=self.url, timeout=60, verify=False)

    def rpc(self, **options: Any) -> RpcClient:
        """Return a client that calls the server through shared memory; the test must close it."""
        return RpcClient(self.rpc_address, **options)


def infer(client: httpx.Client, content: Any, *, model: str = "digits", **headers: str) -> httpx.Response:
    """POST one inference request as bytes, and return the response."""
    return client.post(f"/v1/models/{model}/infer", content=content, headers=BINARY | headers)
