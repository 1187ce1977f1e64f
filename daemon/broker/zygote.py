"""The zygote as the broker sees it: start it, ask it for workers, notice when it dies."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Final

from gpulease.daemon.channel import ChannelClosed, channel_pair, close_all, receive_message, send_message
from gpulease.daemon.sandbox.settings import SandboxSettings
from gpulease.daemon.worker.spec import WorkerSpec

START_TIMEOUT_S: Final = 60.0
"""How long the zygote may take to import what it needs; a cold disk takes seconds."""


class ZygoteBroken(Exception):
    """The zygote can't preload the driver: no worker could ever start.

    Attributes:
        hint: What the operator can do, a sentence or "".
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class Zygote:
    """One zygote process and the channel to it.

    Args:
        on_message: Called with each message and its descriptors, which are then the callee's.
        on_exit: Called once when the zygote is gone; its workers die with it.

    Attributes:
        findings: Which measures its workers are under, as it said when it was ready.
    """

    def __init__(
        self,
        driver: str,
        on_message: Callable[[dict[str, Any], list[int]], None],
        on_exit: Callable[[], None],
        sandbox: SandboxSettings,
    ) -> None:
        self.findings: list[dict[str, Any]] = []
        self._driver = driver
        self._sandbox = sandbox
        self._on_message = on_message
        self._on_exit = on_exit
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._preloaded: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Start the process and wait until it can fork workers. Raises ZygoteBroken."""
        loop = asyncio.get_running_loop()
        try:
            self._channel = self._launch()
        except OSError as error:
            raise ZygoteBroken(f"no process can be started: {error.strerror or error}") from None
        self._preloaded = loop.create_future()
        loop.add_reader(self._channel, self._read)
        try:
            await asyncio.wait_for(self._preloaded, START_TIMEOUT_S)
        except TimeoutError:
            self.stop()
            raise ZygoteBroken(f"the zygote was not ready after {START_TIMEOUT_S:g} s") from None
        except BaseException:
            self.stop()
            raise

    def _launch(self) -> socket.socket:
        """Start the process; from this thread, whose end would be its end too (prctl(2), PR_SET_PDEATHSIG)."""
        ours, theirs = channel_pair()
        ours.setblocking(False)
        command = [sys.executable, "-P", "-m", "gpulease.daemon.zygote"]
        arguments = [self._driver, str(theirs.fileno()), str(os.getpid()), self._sandbox.to_text()]
        # A BLAS that starts threads when it is imported would make every fork unsafe.
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with contextlib.ExitStack() as undo, theirs:
            undo.callback(ours.close)
            # Its own session: a Ctrl-C at the broker's terminal is the broker's to handle.
            self._process = subprocess.Popen(
                command + arguments,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
            )
            undo.pop_all()
        return ours

    def spawn(self, spec: WorkerSpec, channel_fd: int, page_fd: int) -> None:
        """Ask for a worker. Raises ChannelClosed or BlockingIOError if the zygote can't be asked now."""
        if self._channel is None:
            raise ChannelClosed("the zygote is not running")
        send_message(self._channel, spec.to_message(), (channel_fd, page_fd))

    def stop(self) -> None:
        """End the zygote, and with it all its workers. Nothing is called back."""
        self._close_channel()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _read(self) -> None:
        while self._channel is not None:
            try:
                message, fds = receive_message(self._channel)
            except BlockingIOError:
                return
            except ChannelClosed:
                self._gone()
                return
            self._take(message, fds)

    def _take(self, message: dict[str, Any], fds: list[int]) -> None:
        waiting = self._preloaded is not None and not self._preloaded.done()
        if waiting and self._preloaded is not None:
            close_all(fds)
            if message["op"] == "preloaded":
                self.findings = message["sandbox"]
                self._preloaded.set_result(None)
            else:
                self._preloaded.set_exception(ZygoteBroken(str(message.get("reason")), hint=str(message.get("hint"))))
            return
        self._on_message(message, fds)

    def _gone(self) -> None:
        self.stop()
        if self._preloaded is not None and not self._preloaded.done():
            self._preloaded.set_exception(ZygoteBroken("the zygote died while it was starting; its log says why"))
            return
        self._on_exit()

    def _close_channel(self) -> None:
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel)
            self._channel.close()
            self._channel = None
