"""`gpulease serve gateway` in a process of its own, asked over a real socket."""

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import httpx

from gpulease.protocol.address import ADDRESS_VARIABLE
from helpers.daemon import Daemon, python_environment
from helpers.waiting import wait_until

START_LIMIT_S: Final = 30.0
_URL: Final = re.compile(r"listens on (\S+),")

BINARY: Final = {"Content-Type": "application/octet-stream"}


class GatewayProcess:
    """One gateway, at a TCP port that was free, or at `listen`."""

    def __init__(self, daemon: Daemon, folder: Path, *options: str, listen: str = "tcp:127.0.0.1:0") -> None:
        command = [sys.executable, "-P", "-m", "gpulease.client.cli.__main__", "serve", "gateway"]
        command += ["--listen", listen, "--store", f"sqlite:{folder / 'store'}", *options]
        self._log_path = folder / "gateway.log"
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=python_environment() | {ADDRESS_VARIABLE: daemon.address, "PYTHONUNBUFFERED": "1"},
            )
        self.url = wait_until(self._url, "the gateway listens", START_LIMIT_S, seen=self.log)

    def _url(self) -> str:
        assert self.process.poll() is None, self.log()
        found = _URL.search(self.log())
        return found[1] if found else ""

    def log(self) -> str:
        """All it has said."""
        return self._log_path.read_text(errors="replace")

    def client(self, **options: Any) -> httpx.Client:
        """Somebody who asks it; to be closed."""
        if self.url.startswith("http+unix://"):
            transport = httpx.HTTPTransport(uds=self.url.removeprefix("http+unix://"))
            return httpx.Client(base_url="http://gateway", transport=transport, timeout=60, **options)
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def stop(self) -> None:
        """SIGTERM, and proof that it ended in good order."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, self.log()
        assert "has stopped" in self.log()
        assert "Traceback" not in self.log(), self.log()

    def discard(self) -> None:
        """End it whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def infer(
    client: httpx.Client, key: str | None, content: Any, output_len: int, *, model: str = "affine", **headers: str
) -> httpx.Response:
    """One request in bytes."""
    keys = {} if key is None else {"Idempotency-Key": key}
    query = {"output_len": str(output_len)}
    return client.post(f"/v1/models/{model}/infer", content=content, params=query, headers=BINARY | keys | headers)
