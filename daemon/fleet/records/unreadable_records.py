"""Counts the values in etcd that a process could not read, and lists those that exist now."""

from itertools import islice
from typing import Final

from gpulease.daemon.fleet.etcd.transactions import KeyValue
from gpulease.protocol.counts import counted
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.foreign_text import printable

MAX_REMEMBERED: Final = 64
"""Maximum number of keys that are remembered."""

MAX_SHOWN: Final = 3
"""Maximum number of keys in one sentence of the log or a health report."""

MAX_KEY_CHARS: Final = 200
"""Maximum characters of a key that are shown. A key in etcd may have a megabyte."""


@dataclass(slots=True)
class _Unreadable:
    mod_revision: int
    reason: str
    seen_ns: int


class UnreadableRecords:
    """Keys with unreadable values.

    Attributes:
        count: Unreadable values since the process began. Each revision of a key counts once, provided that at most
            MAX_REMEMBERED keys are unreadable at a time.
    """

    def __init__(self) -> None:
        self.count = 0
        self._records: dict[bytes, _Unreadable] = {}

    def add(self, item: KeyValue, reason: str, now_ns: int = 0) -> None:
        """Count a value that could not be read at the time `now_ns`."""
        # Each revision counts once, however often it is read.
        before = self._records.pop(item.key, None)
        if before is None or before.mod_revision != item.mod_revision:
            self.count += 1
        # Forget the key that was read longest ago.
        while len(self._records) >= MAX_REMEMBERED:
            del self._records[next(iter(self._records))]
        self._records[item.key] = _Unreadable(item.mod_revision, reason, now_ns)

    def forget(self, key: bytes) -> None:
        """Forget a key that now has another value or none."""
        self._records.pop(key, None)

    def forget_older(self, seen_ns: int) -> None:
        """Forget the keys that were last read before `seen_ns`, because they may have been deleted."""
        while self._records:
            # The dictionary is in the order of the last reads.
            key, oldest = next(iter(self._records.items()))
            if oldest.seen_ns >= seen_ns:
                return
            del self._records[key]

    def sentence(self) -> str:
        """Return a text for operators about the values that are unreadable now; "" if there are none."""
        if not self._records:
            return ""
        parts = [f"{shown_key(key)} ({record.reason})" for key, record in islice(self._records.items(), MAX_SHOWN)]
        if len(self._records) > MAX_SHOWN:
            parts.append(f"and {len(self._records) - MAX_SHOWN} more")
        values = counted(len(self._records), "value")
        return (
            f"{values} in etcd can't be read: {', '.join(parts)}. Find out what wrote them; delete them "
            "unless a newer daemon did"
        )


def shown_key(key: bytes) -> str:
    """Return a key as safe text for an operator, cut and without control characters."""
    text = key[:MAX_KEY_CHARS].decode(errors="backslashreplace")
    return printable(text, instead="?")[:MAX_KEY_CHARS]
