"""Processes whose end the loop waits for: it is told by their descriptors (pidfd_open(2)), and never held up."""

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Callable

from gpulease.daemon.processes import exit_text


class Child:
    """One that was started here: reaped when it has ended, be that an hour after it was killed."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        """Raises OSError, and ends it, if there is no descriptor left to watch it by."""
        self._process = process
        self._ended = asyncio.Event()
        try:
            self._pidfd = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.wait()
            raise
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def kill(self) -> None:
        """End it, if it has not ended yet."""
        self._process.kill()

    async def end(self, within_s: float) -> str | None:
        """How it ended, in words, once it has; None if it has not in time."""
        try:
            async with asyncio.timeout(within_s):
                await self._ended.wait()
        except TimeoutError:
            return None
        status = self._process.returncode
        return exit_text(status << 8 if status >= 0 else -status)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._process.wait()
        self._ended.set()


def reap_later(pid: int, on_end: Callable[[int], None]) -> None:
    """Tell when a process has ended that was not started here, and reap it if it is a child all the same.

    A descendant becomes one when its own parent dies (see processes.adopt_orphans); what an earlier daemon left never
    does.
    """
    loop = asyncio.get_running_loop()
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        on_end(pid)
        return

    def reap() -> None:
        loop.remove_reader(pidfd)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        os.close(pidfd)
        on_end(pid)

    loop.add_reader(pidfd, reap)
