"""Splits the claims of all live leases into messages of bounded size, and collects them again."""

from collections.abc import Iterator

from gpulease.daemon.fleet.fleet_messages import CLAIMS_PER_MESSAGE, LiveClaimsPart
from gpulease.daemon.fleet.rules.fleet_events import LiveClaims


def parts_of(live: LiveClaims) -> Iterator[LiveClaimsPart]:
    """Yield the messages that carry all claims; at least one."""
    epochs, quotas = list(live.epochs.items()), list(live.quotas.items())
    count = len(epochs) + len(quotas)
    for start in range(0, count or 1, CLAIMS_PER_MESSAGE):
        # Count the rows of both tables in one sequence: first the names, then the quotas.
        end = start + CLAIMS_PER_MESSAGE
        names = epochs[start:end]
        leases = quotas[max(0, start - len(epochs)) : max(0, end - len(epochs))]
        yield LiveClaimsPart(dict(names), dict(leases), is_last=end >= count)


class LiveParts:
    """Collects the parts that `parts_of` made."""

    def __init__(self) -> None:
        self._epochs: dict[str, int] = {}
        self._quotas: dict[str, str] = {}

    def take(self, part: LiveClaimsPart) -> LiveClaims | None:
        """Take one part. Returns all claims after the last part, None before."""
        # Parts arrive in order on one channel, so the last one completes them.
        self._epochs.update(part.epochs)
        self._quotas.update(part.quotas)
        if not part.is_last:
            return None
        claims = LiveClaims(self._epochs, self._quotas)
        self._epochs, self._quotas = {}, {}
        return claims
