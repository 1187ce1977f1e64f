"""Notifications to the service manager by datagrams (sd_notify(3), "Standalone Implementations"), and its watchdog.

Nothing is sent without a service manager. A datagram never blocks the event loop: if the socket has no room, the
datagram is lost, or retried for a while if it must arrive.
"""

import array
import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, MutableMapping, Sequence
from typing import Final

from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event
from gpulease.protocol.time_units import US_PER_S

ADDRESS_VARIABLE: Final = "NOTIFY_SOCKET"

SEND_TIMEOUT_S: Final = 5.0
"""Time, in seconds, for which the notifier retries a notification that must arrive."""

MAX_STATUS_CHARS: Final = 512
"""Maximum length of a line for `systemctl status`. Texts from settings could exceed a datagram."""

EXTENSION_S: Final = 30.0
"""The time by which a notification extends a start. The loop sends three such notifications in that time, and a stuck
loop none."""

_PAUSE_S: Final = 0.05


class Notifier:
    """The notification socket.

    Args:
        address: The value of NOTIFY_SOCKET; "" without a service manager.
    """

    def __init__(self, address: str = "") -> None:
        # "@" stands for an abstract socket: its name begins with a zero byte (unix(7)).
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)

    @classmethod
    def taken_from(cls, environment: MutableMapping[str, str]) -> "Notifier":
        """Return the notifier of the environment, and remove its variable, because children must not notify."""
        address = environment.pop(ADDRESS_VARIABLE, "")
        # Other kinds of sockets (vsock:) are for machines, not for processes of this host.
        if address and address[0] not in "/@":
            reason = f"{ADDRESS_VARIABLE} must name a local socket, not {address!r}"
            log_event(LogEvent.MANAGER_DEAF, reason=reason)
            address = ""
        return cls(address)

    @property
    def is_connected(self) -> bool:
        return self._socket is not None

    def send(self, *assignments: str, fds: Sequence[int] = ()) -> bool:
        """Send assignments once. Returns False if the socket's buffer is full.

        If the service manager is gone, logs that once and sends nothing more.
        """
        # Without a service manager every notification counts as sent.
        if self._socket is None:
            return True
        # Send text and descriptors in one datagram, because the text states the descriptors' purpose (FDSTORE=1).
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._socket.sendmsg(["\n".join(assignments).encode()], rights, 0, self._address)
        except BlockingIOError:
            return False
        except OSError as error:
            log_event(LogEvent.MANAGER_DEAF, reason=error.strerror)
            self.close()
        return True

    async def send_reliably(self, *assignments: str, fds: Sequence[int] = ()) -> None:
        """Send assignments on which the service manager waits or acts. Retries for SEND_TIMEOUT_S."""
        deadline_s = time.monotonic() + SEND_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if self.send(*assignments, fds=fds):
                return
            await asyncio.sleep(_PAUSE_S)
        log_event(LogEvent.MANAGER_DEAF, reason=f"it accepts no notifications: {assignments[0]} was not sent")

    def send_status(self, text: str) -> None:
        self.send(status(text))

    @contextlib.asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """Extend the start's time limit until the block is left (EXTEND_TIMEOUT_USEC)."""
        task = asyncio.get_running_loop().create_task(self._ask_for_time())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _ask_for_time(self) -> None:
        # Three times in each extension, so that one lost datagram does no harm.
        while self.is_connected:
            self.send(f"EXTEND_TIMEOUT_USEC={int(EXTENSION_S * US_PER_S)}")
            await asyncio.sleep(EXTENSION_S / 3)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def status(text: str) -> str:
    """Return the assignment of a status line, bounded and without line breaks."""
    return f"STATUS={' '.join(text.split())[:MAX_STATUS_CHARS]}"


MAX_USEC: Final = 2**62
"""The longest interval in microseconds. The event loop's timer can't represent a longer one."""

_INTERVAL: Final = "WATCHDOG_USEC"
_PROCESS: Final = "WATCHDOG_PID"


def interval_s(environment: MutableMapping[str, str], pid: int) -> float | None:
    """Return the watchdog's interval for this process in seconds; None without a watchdog.

    Removes the variables from the environment: they are meant for one process, not for its children.
    """
    # Remove both variables, even if they are for another process.
    text, process = environment.pop(_INTERVAL, ""), environment.pop(_PROCESS, "")
    if process and process != str(pid):
        return None
    if not (text.isascii() and text.isdigit()) or not 0 < int(text[:20]) <= MAX_USEC:
        return None
    return int(text) / US_PER_S


class Watchdog:
    """Feeds the service manager's watchdog from the event loop, twice in each interval.

    The loop itself feeds it, because a thread would keep feeding while the loop is stuck. An unfed watchdog sends
    SIGABRT. WatchdogSec= of systemd.service(5) and sd_watchdog_enabled(3) describe the protocol.
    """

    def __init__(self, notifier: Notifier, every_s: float | None) -> None:
        self._notifier = notifier
        self._pause_s = 0.0 if every_s is None else every_s / 2
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> bool:
        """Start feeding. Returns False if the service manager set no watchdog."""
        is_watched = bool(self._pause_s) and self._notifier.is_connected
        if is_watched:
            self._feed()
        return is_watched

    def _feed(self) -> None:
        # Feed the watchdog before the timer is set again: this call proves that the loop runs.
        self._notifier.send("WATCHDOG=1")
        self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._feed)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
