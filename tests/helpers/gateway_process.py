"""`gpulease serve gateway` in a separate process, called over a real socket."""

import re
from pathlib import Path
from typing import Any, Final

import httpx

from helpers.daemon import Daemon
from helpers.serving_process import ServingProcess

BINARY: Final = {"Content-Type": "application/octet-stream"}


class GatewayProcess(ServingProcess):
    """A gateway that listens at `listen`, by default on a free TCP port."""

    listens = re.compile(r"listens on (\S+),")
    stopped = "has stopped"

    def __init__(self, daemon: Daemon, folder: Path, *options: str, listen: str = "tcp:127.0.0.1:0") -> None:
        store = f"sqlite:{folder / 'store'}"
        super().__init__(daemon, folder / "gateway.log", "gateway", "--listen", listen, "--store", store, *options)

    def client(self, **options: Any) -> httpx.Client:
        """Return an HTTP client of the gateway. The test must close it."""
        if self.url.startswith("http+unix://"):
            transport = httpx.HTTPTransport(uds=self.url.removeprefix("http+unix://"))
            return httpx.Client(base_url="http://gateway", transport=transport, timeout=60, **options)
        return httpx.Client(base_url=self.url, timeout=60, verify=False, **options)


def infer(
    client: httpx.Client, key: str | None, content: Any, output_len: int, *, model: str = "affine", **headers: str
) -> httpx.Response:
    keys = {} if key is None else {"Idempotency-Key": key}
    query = {"output_len": str(output_len)}
    return client.post(f"/v1/models/{model}/infer", content=content, params=query, headers=BINARY | keys | headers)
