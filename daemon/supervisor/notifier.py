"""How the daemon is, told to the service manager by datagrams: sd_notify(3), "Standalone Implementations".

Where there is no service manager nothing is told. A datagram never blocks the loop: one that finds no room is lost,
unless it is of those that must arrive, which are tried again for a while.

Showing the service manager that the loop goes round (WatchdogSec= of systemd.service(5), sd_watchdog_enabled(3)).

It is the loop itself that does it: a thread would go on while the loop is stuck.
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

ADDRESS_VARIABLE: Final = "NOTIFY_SOCKET"

TELL_TIMEOUT_S: Final = 5.0
"""For what must arrive, while the service manager reads nothing."""

MAX_STATUS_CHARS: Final = 512
"""Of one line for `systemctl status`; texts from settings could be longer than a datagram."""

EXTENSION_S: Final = 30.0
"""More time for a start or a stop, asked for three times in it: a loop that is stuck asks for nothing."""

USEC_PER_S: Final = 1_000_000

_PAUSE_S: Final = 0.05


class Notifier:
    """The way to the service manager. Args: address: NOTIFY_SOCKET; "" to tell nobody."""

    def __init__(self, address: str = "") -> None:
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)

    @classmethod
    def taken_from(cls, environment: MutableMapping[str, str]) -> "Notifier":
        """As the environment says, out of which it is taken: children have nothing to tell."""
        address = environment.pop(ADDRESS_VARIABLE, "")
        if address and address[0] not in "/@":
            why = f"{ADDRESS_VARIABLE} is {address!r}, no local socket"
            log_event(LogEvent.MANAGER_DEAF, f"nothing is told to the service manager: {why}", reason=why)
            address = ""
        return cls(address)

    @property
    def is_heard(self) -> bool:
        """Whether there is a service manager."""
        return self._socket is not None

    def tell(self, *assignments: str, fds: Sequence[int] = ()) -> bool:
        """Tell it once; False if there was no room. What nobody takes any more is lost, and logged once."""
        if self._socket is None:
            return True
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._socket.sendmsg(["\n".join(assignments).encode()], rights, 0, self._address)
        except BlockingIOError:
            return False
        except OSError as error:
            said = f"the service manager can't be told how the daemon is any more: {error.strerror}"
            log_event(LogEvent.MANAGER_DEAF, said, reason=error.strerror)
            self.close()
        return True

    async def tell_surely(self, *assignments: str, fds: Sequence[int] = ()) -> None:
        """Tell it what it waits for, or acts on."""
        until = time.monotonic() + TELL_TIMEOUT_S
        while time.monotonic() < until:
            if self.tell(*assignments, fds=fds):
                return
            await asyncio.sleep(_PAUSE_S)
        said = f"the service manager takes no word: it was to hear {assignments[0]}"
        log_event(LogEvent.MANAGER_DEAF, said, reason="it reads nothing")

    def tell_status(self, text: str) -> None:
        """One line for people."""
        self.tell(status(text))

    @contextlib.asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """Ask for more time, again and again, until the block is left (EXTEND_TIMEOUT_USEC)."""
        task = asyncio.get_running_loop().create_task(self._ask_for_time())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _ask_for_time(self) -> None:
        while self.is_heard:
            self.tell(f"EXTEND_TIMEOUT_USEC={int(EXTENSION_S * USEC_PER_S)}")
            await asyncio.sleep(EXTENSION_S / 3)

    def close(self) -> None:
        """Tell nothing more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def status(text: str) -> str:
    """The assignment of a line for people: bounded, and in one line."""
    return f"STATUS={' '.join(text.split())[:MAX_STATUS_CHARS]}"


MAX_USEC: Final = 2**62
"""More is no time, but a number that a timer does not hold."""

_INTERVAL: Final = "WATCHDOG_USEC"
_PROCESS: Final = "WATCHDOG_PID"


def interval_s(environment: MutableMapping[str, str], pid: int) -> float | None:
    """How often the service manager wants to hear of this process; None if it does not watch it.

    The variables are taken out: what they say is meant for one process, not for its children.
    """
    text, process = environment.pop(_INTERVAL, ""), environment.pop(_PROCESS, "")
    if process and process != str(pid):
        return None
    if not (text.isascii() and text.isdigit()) or not 0 < int(text[:20]) <= MAX_USEC:
        return None
    return int(text) / USEC_PER_S


class Watchdog:
    """Feeds the service manager's watchdog from the running loop, twice in each interval, until it is stopped.

    One that is not fed sends SIGABRT.
    """

    def __init__(self, notifier: Notifier, every_s: float | None) -> None:
        self._notifier = notifier
        self._pause_s = 0.0 if every_s is None else every_s / 2
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> bool:
        """From now on; False if nobody watches."""
        is_watched = bool(self._pause_s) and self._notifier.is_heard
        if is_watched:
            self._feed()
        return is_watched

    def _feed(self) -> None:
        self._notifier.tell("WATCHDOG=1")
        self._timer = asyncio.get_running_loop().call_later(self._pause_s, self._feed)

    def stop(self) -> None:
        """No longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
