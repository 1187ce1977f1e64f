"""One worker as the broker sees it."""

import asyncio
import contextlib
import os
import signal
import socket
from dataclasses import dataclass
from typing import Final

from gpulease.daemon.broker.zygote import Zygote
from gpulease.daemon.channel import ChannelClosed, send_message
from gpulease.daemon.processes import exit_text
from gpulease.daemon.worker.guests import Guest
from gpulease.daemon.worker.page import BrokerPage
from gpulease.daemon.worker.spec import WorkerSpec
from gpulease.protocol.sharing import Wanted

MAX_HAND_OVERS: Final = 16
"""Sockets on their way to a worker that is too busy to take them. They count as nobody's connections meanwhile."""

KILLED: Final = exit_text(signal.SIGKILL)
"""How a zygote tells that a worker died of what the daemon, or anybody else, kills with."""

ENDED_BY_DAEMON: Final = "was ended by the daemon"


@dataclass(slots=True)
class Worker:
    """One worker, or one to be. `pid` is 0 until the zygote said that it has forked it.

    Attributes:
        zygote: Who made it.
        serial: Its number there.
        born_as: The lease, or warm context, it was made for.
        counted: What of its page's counters was told, see `readings`; empty before the first time.
    """

    spec: WorkerSpec
    page: BrokerPage
    channel: socket.socket
    zygote: Zygote
    serial: int = 0
    pid: int = 0
    pidfd: int = -1
    is_ready: bool = False
    is_killed: bool = False
    hand_overs: int = 0
    born_as: int = 0
    counted: tuple[int, ...] = ()

    def take_lease(self, spec: WorkerSpec) -> None:
        """Have it take a lease, or a submit, if it was made ahead."""
        self.spec = spec
        with contextlib.suppress(ChannelClosed, BlockingIOError):
            # The zygote first: a worker that has a lease must not be known to it as one that has none.
            self.zygote.change(self.serial, spec)
            send_message(self.channel, spec.to_message())

    def hand_over(self, sock_fd: int, request_id: int, rest: bytes, wanted: Wanted, guest: Guest | None) -> bool:
        """Give it a tenant's socket, or a guest's; False if it can't take it now."""
        if self.hand_overs >= MAX_HAND_OVERS:
            return False
        message = {"op": "attach", "request_id": request_id, "rest": rest}
        message |= {"ring": wanted.ring, "arena": wanted.arena_bytes}
        message["guest"] = None if guest is None else guest.to_message()
        try:
            send_message(self.channel, message, (sock_fd,))
        except (ChannelClosed, BlockingIOError):
            return False
        self.hand_overs += 1
        return True

    def kill(self) -> None:
        """End its process, if there is one."""
        with contextlib.suppress(ProcessLookupError):
            if self.pidfd >= 0:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            elif self.pid:
                # Its pidfd did not get through for want of descriptors here. The zygote reaps it, and says so first.
                os.kill(self.pid, signal.SIGKILL)

    def end_of(self, reason: str) -> tuple[str, bool]:
        """How it ended, for logs, and whether by the daemon; `reason`: as its zygote tells it."""
        # Whatever else it died of, it died of before the kill.
        is_by_daemon = self.is_killed and reason == KILLED
        return (ENDED_BY_DAEMON if is_by_daemon else reason), is_by_daemon

    def close(self) -> None:
        """Let go of all that is open for it; it is listened to no more."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.channel)
        self.channel.close()
        self.page.close()
        if self.pidfd >= 0:
            loop.remove_reader(self.pidfd)
            os.close(self.pidfd)


@dataclass(slots=True)
class Ended:
    """What is known of a worker that was reaped, until its bytes are proved back."""

    lease_id: int
    pid: int
    zygote: Zygote | None = None
    serial: int = 0
