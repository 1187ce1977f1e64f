"""Logs changes at the paths of Unix sockets: a socket or lock file was removed, or made again."""

from typing import Final

from gpulease.daemon.host.unix_place import PlaceChange
from gpulease.daemon.log.catalogue import LogEvent
from gpulease.daemon.log.writer import log_event

_EVENTS: Final = {
    PlaceChange.SOCKET_ANEW: LogEvent.SOCKET_ANEW,
    PlaceChange.LOCK_ANEW: LogEvent.SOCKET_LOCK_ANEW,
}


def log_place_change(change: PlaceChange, path: str, reason: str) -> None:
    if change is PlaceChange.LOST:
        log_event(LogEvent.SOCKET_LOST, path=path, reason=reason)
    else:
        log_event(_EVENTS[change], path=path)


def log_restoring_fault(error: Exception) -> None:
    """Log an error that no `UnixPlace.restore` expects."""
    log_event(LogEvent.DAEMON_FAULT, is_fault=True, doing="making sockets again")
