"""`gpulease serve models` in a process of its own, asked over real sockets."""

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import httpx

from gpulease.client.rpc import RpcClient
from gpulease.protocol.address import ADDRESS_VARIABLE
from helpers.daemon import Daemon, python_environment
from helpers.gateway_process import BINARY
from helpers.waiting import wait_until

START_LIMIT_S: Final = 30.0
_URL: Final = re.compile(r"listen on (\S+) and")


class ModelProcess:
    """One server, at a TCP port that was free and a socket in `folder`, whose path is to be short."""

    def __init__(self, daemon: Daemon, folder: Path, config: Path) -> None:
        self.rpc_address = f"unix:{folder}/rpc"
        command = [sys.executable, "-P", "-m", "gpulease.client.cli.__main__", "serve", "models", str(config)]
        command += ["--listen", "tcp:127.0.0.1:0", "--rpc", self.rpc_address]
        self._log_path = folder / "models.log"
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=python_environment() | {ADDRESS_VARIABLE: daemon.address, "PYTHONUNBUFFERED": "1"},
            )
        self.url = wait_until(self._url, "the server listens", START_LIMIT_S, seen=self.log)

    def _url(self) -> str:
        assert self.process.poll() is None, self.log()
        found = _URL.search(self.log())
        return found[1] if found else ""

    def log(self) -> str:
        """All it has said."""
        return self._log_path.read_text(errors="replace")

    def http(self) -> httpx.Client:
        """Somebody who asks it over HTTP; to be closed."""
        return httpx.Client(base_url=self.url, timeout=60)

    def rpc(self, **options: Any) -> RpcClient:
        """Somebody who asks it through shared memory; to be closed."""
        return RpcClient(self.rpc_address, **options)

    def stop(self) -> None:
        """SIGTERM, and proof that it ended in good order."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, self.log()
        assert "have stopped" in self.log()
        assert "Traceback" not in self.log(), self.log()

    def discard(self) -> None:
        """End it whatever it does."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def infer(client: httpx.Client, content: Any, *, model: str = "digits", **headers: str) -> httpx.Response:
    """One request in bytes."""
    return client.post(f"/v1/models/{model}/infer", content=content, headers=BINARY | headers)
