"""The values in etcd that one process could not read: how many it met, and which exist now."""

from itertools import islice
from typing import Final

from gpulease.daemon.fleet.etcd.transactions import KeyValue
from gpulease.protocol.counts import counted
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.foreign_text import printable

MAX_REMEMBERED: Final = 64
"""Keys that are remembered. Stops a foreign writer of many keys from filling memory."""

MAX_SHOWN: Final = 3
"""Keys in one sentence. Keeps a line of the log and of health short."""

MAX_KEY_CHARS: Final = 200
"""Longest key that is shown; etcd's keys may have a megabyte."""


@dataclass(slots=True)
class _Found:
    mod_revision: int
    reason: str
    seen_ns: int


class UnreadableRecords:
    """Keys with unreadable values.

    Attributes:
        count: Unreadable values since the process began. Each revision of a key counts once, as long as at most
          MAX_REMEMBERED keys are unreadable at a time.
    """

    def __init__(self) -> None:
        self.count = 0
        self._found: dict[bytes, _Found] = {}

    def add(self, item: KeyValue, reason: str, now_ns: int = 0) -> None:
        """Count a value that could not be read at that time."""
        # Each revision counts once, however often it is read.
        before = self._found.pop(item.key, None)
        if before is None or before.mod_revision != item.mod_revision:
            self.count += 1
        # Forget the key that was met longest ago.
        while len(self._found) >= MAX_REMEMBERED:
            del self._found[next(iter(self._found))]
        self._found[item.key] = _Found(item.mod_revision, reason, now_ns)

    def forget(self, key: bytes) -> None:
        """Forget a key that has another value now, or none."""
        self._found.pop(key, None)

    def forget_before(self, seen_ns: int) -> None:
        """Forget the keys last met before that time: they may be gone since."""
        while self._found:
            # The dictionary is in the order of the last meetings.
            key, found = next(iter(self._found.items()))
            if found.seen_ns >= seen_ns:
                return
            del self._found[key]

    def sentence(self) -> str:
        """Return what an operator should know of the present ones; "" without any."""
        if not self._found:
            return ""
        shown = [f"{shown_key(key)} ({found.reason})" for key, found in islice(self._found.items(), MAX_SHOWN)]
        if len(self._found) > MAX_SHOWN:
            shown.append(f"and {len(self._found) - MAX_SHOWN} more")
        values = counted(len(self._found), "value")
        return (
            f"{values} in etcd can't be read: {', '.join(shown)}."
            " Find out who wrote that, and delete it if no newer daemon did"
        )


def shown_key(key: bytes) -> str:
    """Return a key as safe text for an operator: without control characters, and cut."""
    text = key[:MAX_KEY_CHARS].decode(errors="backslashreplace")
    return printable(text, instead="?")[:MAX_KEY_CHARS]
