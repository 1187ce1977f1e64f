"""The messages between the broker and the fleet process, one msgpack map each, by the channel of the process's start.

from      messages
broker    start, once: the settings
          live: the claims of the leases that there are, names and quotas' bytes, in parts
          record: how the node's record is to read
          claim, drop, ended: a claim is wanted, is wanted no more, or its lease is gone
          count, drop_count, give_back: likewise for bytes of a quota
          stop: the daemon stops
          horizon_set: the broker has written the last horizon to the control pages
          mark_kept: the journal has the mark of that beat
process   ready, once; joined, remembered, mark, horizon, lost, claimed, refused, counted, not_counted, noted,
          unreadable, store
          stopped, the answer to stop
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

CLAIMS_PER_MESSAGE: Final = 256
"""Claims in one message: 256 names or tenants of 128 characters fit into a datagram twice."""


class Live(NamedTuple):
    """The claims of the leases that there are.

    Attributes:
        claims: Epochs by name.
        quotas: Tenants by lease, in 32 hexadecimal digits, of leases with bytes of a quota.
    """

    claims: Mapping[str, int]
    quotas: Mapping[str, str]


NOTHING_LIVES: Final = Live({}, {})


def live_messages(live: Live) -> Iterator[dict[str, Any]]:
    """Yield the messages that tell of all claims."""
    rows = [("claims", row) for row in live.claims.items()] + [("quotas", row) for row in live.quotas.items()]
    for start in range(0, len(rows) or 1, CLAIMS_PER_MESSAGE):
        part = rows[start : start + CLAIMS_PER_MESSAGE]
        of_kind = {name: [row for kind, row in part if kind == name] for name in Live._fields}
        yield {"op": "live", **of_kind, "is_last": start + len(part) == len(rows)}


class LiveParts:
    """Collects the parts of what `live_messages` made."""

    def __init__(self) -> None:
        self._claims: dict[str, int] = {}
        self._quotas: dict[str, str] = {}

    def take(
        self, claims: Iterable[tuple[str, int]], quotas: Iterable[tuple[str, str]], *, is_last: bool
    ) -> Live | None:
        """Take one part; returns all claims with the last one."""
        self._claims.update((name, int(epoch)) for name, epoch in claims)
        self._quotas.update((lease, str(tenant)) for lease, tenant in quotas)
        if not is_last:
            return None
        whole = Live(self._claims, self._quotas)
        self._claims, self._quotas = {}, {}
        return whole
