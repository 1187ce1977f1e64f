"""A command of `gpulease serve` in a separate process."""

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import ClassVar, Final

from gpulease.protocol.address import ADDRESS_VARIABLE
from helpers.daemon import Daemon, python_environment
from helpers.waiting import wait_until

START_LIMIT_S: Final = 120.0


class ServingProcess:
    """One server. Subclasses define the lines that it prints with its URL, and when it has stopped."""

    listens: ClassVar[re.Pattern[str]]
    stopped: ClassVar[str]

    def __init__(self, daemon: Daemon, log_path: Path, *words: str) -> None:
        command = [sys.executable, "-P", "-m", "gpulease.client.cli.__main__", "serve", *words]
        self._log_path = log_path
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
        found = self.listens.search(self.log())
        return found[1] if found else ""

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def stop(self) -> None:
        """Send SIGTERM, and check that the server ends cleanly."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, self.log()
        assert self.stopped in self.log()
        assert "Traceback" not in self.log(), self.log()

    def discard(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
