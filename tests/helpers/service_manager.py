"""A service manager for one daemon, like systemd: starts it, receives its notifications, stores descriptors for it."""

import array
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from gpulease.client import GpuBuilder
from helpers.daemon import MARK, START_LIMIT_S, STOP_LIMIT_S, python_environment
from helpers.processes import ProcessInfo, marked
from helpers.waiting import wait_until

MAX_FDS: Final = 16


class ServiceManager:
    """Starts daemons one after another in one folder.

    Attributes:
        said: The notifications of the running daemon, split into assignments, in order.
        kept: The descriptors that daemons have stored here, by name.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gpul-", dir="/tmp"))
        self.path = self.folder / "d.sock"
        self.said: list[str] = []
        self.kept: dict[str, list[int]] = {}
        self.process: subprocess.Popen[bytes] | None = None
        self._mark = uuid.uuid4().hex
        self._log = self.folder / "log"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.folder / "notify"))
        self._socket.setblocking(False)

    @property
    def address(self) -> str:
        return f"unix:{self.path}"

    def start(
        self,
        *arguments: str,
        config: str | None = None,
        units: Sequence[tuple[socket.socket, str]] = (),
        watchdog_s: float | None = None,
        listens: bool = True,
        environment: dict[str, str] | None = None,
    ) -> None:
        """Start a daemon with the sockets of `units` and the stored descriptors. Does not wait until it is ready."""
        self.said = []
        given = [(sock.fileno(), name) for sock, name in units]
        given += [(fd, name) for name, fds in self.kept.items() for fd in fds]
        variables = python_environment() | {MARK: self._mark, "NOTIFY_SOCKET": str(self.folder / "notify")}
        if given:
            variables["LISTEN_FDNAMES"] = ":".join(name for _, name in given)
        if watchdog_s is not None:
            variables["WATCHDOG_USEC"] = str(int(watchdog_s * 1e6))
        command = [sys.executable, "-P", "-m", "helpers.handing_over", ",".join(str(fd) for fd, _ in given)]
        command += [sys.executable, "-P", "-m", "gpulease.daemon", "--log-format", "human", *arguments]
        command += ["--driver", "cpu", "--vram", "1GiB"] + ["--listen", self.address] * listens
        if config is not None:
            self.configure(config)
            command += ["--config", str(self.folder / "config.toml")]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=variables | (environment or {}),
                pass_fds=[fd for fd, _ in given],
            )

    def configure(self, config: str) -> None:
        (self.folder / "config.toml").write_text(config)

    def start_ready(self, *arguments: str, **options: object) -> None:
        """Start a daemon, and wait until it reports that it is ready."""
        self.start(*arguments, **options)  # type: ignore[arg-type]
        self.wait_for("READY=1")

    def hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                data, ancillary, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(MAX_FDS * 4))
                words = data.decode().split("\n")
                fds = array.array("i")
                for _, _, rights in ancillary:
                    fds.frombytes(rights[: len(rights) - len(rights) % fds.itemsize])
                self._take(words, list(fds))

    def _take(self, words: list[str], fds: list[int]) -> None:
        self.said += words
        name = next((word.removeprefix("FDNAME=") for word in words if word.startswith("FDNAME=")), "stored")
        if "FDSTORE=1" in words:
            self.kept.setdefault(name, []).extend(fds)
        else:
            assert not fds, "descriptors come with FDSTORE=1 alone"
        if "FDSTOREREMOVE=1" in words:
            for fd in self.kept.pop(name, []):
                os.close(fd)

    def wait_for(self, word: str, times: int = 1) -> None:
        """Wait until the daemon has sent that assignment `times` times. Fails with the log if the daemon ends."""

        def is_said() -> bool:
            self.hear()
            assert self.process is not None
            if self.process.poll() is not None and self.said.count(word) < times:
                raise AssertionError(f"the daemon ended with status {self.process.returncode}:\n{self.log()}")
            return self.said.count(word) >= times

        wait_until(is_said, f"{word} is said", START_LIMIT_S, seen=lambda: (self.said, self.log()))

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.send(number)
        return self.wait_for_exit()

    def wait_for_exit(self) -> int:
        """Wait until the daemon has ended, and return its exit status."""
        assert self.process is not None
        status = self.process.wait(STOP_LIMIT_S)
        self.hear()
        return status

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def builder(self) -> GpuBuilder:
        return GpuBuilder(self.address).min_vram(1 << 20).lease_secs(60)

    def processes(self) -> list[ProcessInfo]:
        return marked(f"{MARK}={self._mark}")

    def discard(self) -> None:
        for info in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(info.pid, signal.SIGKILL)
        if self.process is not None:
            self.process.wait()
        self.hear()
        for fds in self.kept.values():
            for fd in fds:
                os.close(fd)
        self._socket.close()
        shutil.rmtree(self.folder)
