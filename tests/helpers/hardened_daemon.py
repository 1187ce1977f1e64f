"""A daemon with the restrictions of its own unit, as far as tests can apply them; see `hardened`."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from gpulease.client.cli.service import UNITS
from helpers.daemon import MARK, python_environment
from helpers.hardened import MISSING
from helpers.processes import marked
from helpers.waiting import wait_until


class Hardened:
    """A daemon that was started as gpuleased.service starts it.

    Args:
        given: A TCP socket that is passed to it, if any.
        compiles: Whether it compiles all its kernels, as under the unit, and uses none that this run has compiled.
    """

    def __init__(
        self,
        folder: Path,
        config: str = "",
        given: socket.socket | None = None,
        *listen: str,
        driver: str = "cpu",
        compiles: bool = True,
    ) -> None:
        self.folder = folder
        self.address = f"unix:{folder}/d.sock"
        self.log = folder / "log"
        self.mark = uuid.uuid4().hex
        (folder / "config.toml").write_text(f'state = "{folder}/state"\nsocket_mode = "0666"\n{config}')
        fds = [] if given is None else [given.fileno()]
        command = [sys.executable, "-P", "-m", "helpers.hardened", str(UNITS / "gpuleased.service"), str(folder)]
        command += [sys.executable, "-P", "-m", "helpers.handing_over", ",".join(map(str, fds))]
        command += [sys.executable, "-P", "-m", "gpulease.daemon", "--driver", driver, "--vram", "1GiB"]
        command += ["--config", str(folder / "config.toml")]
        command += [part for address in (self.address, *listen) for part in ("--listen", address)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=python_environment() | {MARK: self.mark} | ({"GPULEASE_CPU_CACHE": ""} if compiles else {}),
                pass_fds=fds,
            )

    def wait_until_it_listens(self) -> None:
        """Wait until the daemon listens. Skips the test if this host does not permit the unit's restrictions."""

        def listens() -> bool:
            if self.process.poll() == MISSING:
                pytest.skip(self.log.read_text())
            assert self.process.poll() is None, self.log.read_text()
            return "listens on" in self.log.read_text()

        wait_until(listens, "the daemon listens", 30.0, seen=self.log.read_text)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, self.log.read_text()

    def discard(self) -> None:
        for info in marked(f"{MARK}={self.mark}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(info.pid, signal.SIGKILL)
        self.process.wait()
