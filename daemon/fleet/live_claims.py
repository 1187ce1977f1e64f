"""The messages between the broker and the fleet process, one msgpack map each, by the channel of the process's start.

from      messages
broker    start, once: the settings
          live: the claims of the leases that there are, in parts
          record: how the node's record is to read
          claim, drop, ended: a claim is wanted, is wanted no more, or its lease is gone
          horizon_set: the broker has written the last horizon to the control pages
process   ready, once; horizon, lost, claimed, refused, noted
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

CLAIMS_PER_MESSAGE: Final = 256
"""Claims in one message: 256 names of 128 characters fit into a datagram three times."""


def live_messages(claims: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Yield the messages that tell of all claims, epochs by name."""
    rows = list(claims.items())
    for start in range(0, len(rows) or 1, CLAIMS_PER_MESSAGE):
        part = rows[start : start + CLAIMS_PER_MESSAGE]
        yield {"op": "live", "claims": part, "is_last": start + len(part) == len(rows)}


class LiveParts:
    """Collects the parts of what `live_messages` made."""

    def __init__(self) -> None:
        self._claims: dict[str, int] = {}

    def take(self, claims: Iterable[tuple[str, int]], *, is_last: bool) -> dict[str, int] | None:
        """Take one part; returns all claims with the last one."""
        self._claims.update((name, int(epoch)) for name, epoch in claims)
        if not is_last:
            return None
        whole, self._claims = self._claims, {}
        return whole
