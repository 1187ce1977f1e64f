"""Showing the service manager that the loop goes round (WatchdogSec= of systemd.service(5), sd_watchdog_enabled(3)).

It is the loop itself that does it: a thread would go on while the loop is stuck.
"""

import asyncio
from collections.abc import MutableMapping
from typing import Final

from gpulease.daemon.supervisor.notifying import USEC_PER_S, Notifier

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
