"""Checks the rules that a fleet's history must obey. Does no I/O.

All times are nanoseconds of CLOCK_BOOTTIME of the host on which all nodes of a test run.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, TypeVar


class Served(NamedTuple):
    """A claimed lease according to its node, from its grant until its end, or the last horizon before its end."""

    name: str
    node: str
    epoch: int
    from_ns: int
    to_ns: int


class Act(NamedTuple):
    """A tenant's successful operation on a named lease. It was executed between these two times."""

    name: str
    node: str
    epoch: int
    sent_ns: int
    done_ns: int


class HorizonSet(NamedTuple):
    """A node's horizon, as it was set at `at_ns`. Claimed leases of the node may live until `horizon_ns`."""

    node: str
    at_ns: int
    horizon_ns: int


class Claim(NamedTuple):
    """A claim that is in etcd after all faults have ended."""

    name: str
    node: str
    epoch: int


Seen = TypeVar("Seen", Served, Act)


@dataclass(frozen=True)
class History:
    """The observations of a test.

    Attributes:
        live: The leases that each node reports after all faults have ended: epochs by name.
    """

    served: tuple[Served, ...] = ()
    acts: tuple[Act, ...] = ()
    horizons: tuple[HorizonSet, ...] = ()
    claims: tuple[Claim, ...] = ()
    live: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """The violations of the rules, with a sentence about each.

    Attributes:
        overlaps: Two leases of a name were live at the same time.
        stale_acts: An operation was executed under an older epoch than an earlier operation.
        falling_epochs: A later lease of a name does not have a higher epoch.
        outside: A lease was granted, or an operation executed, after its node's horizon.
        orphans: A claim remains that its node does not serve.
    """

    leases: int
    acts: int
    overlaps: tuple[str, ...] = ()
    stale_acts: tuple[str, ...] = ()
    falling_epochs: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()

    @property
    def broken(self) -> tuple[str, ...]:
        return self.overlaps + self.stale_acts + self.falling_epochs + self.outside + self.orphans

    def __str__(self) -> str:
        counts = ("overlaps", "stale_acts", "falling_epochs", "outside", "orphans")
        text = ", ".join(f"{name.replace('_', ' ')} {len(getattr(self, name))}" for name in counts)
        return "\n".join([f"leases {self.leases}, operations {self.acts}: {text}", *self.broken])


def check(history: History) -> Verdict:
    served, acts = _by_name(history.served), _by_name(history.acts)
    return Verdict(
        len(history.served),
        len(history.acts),
        overlaps=tuple(text for leases in served.values() for text in _overlaps(leases)),
        stale_acts=tuple(text for done in acts.values() for text in _stale_acts(done)),
        falling_epochs=tuple(text for leases in served.values() for text in _falling(leases)),
        outside=tuple(_outside(history)),
        orphans=tuple(
            f"orphan: {claim.name} is claimed by {claim.node} in {claim.epoch}, which serves "
            f"{history.live.get(claim.node, {}).get(claim.name, 'nothing')} of that name"
            for claim in history.claims
            if history.live.get(claim.node, {}).get(claim.name) != claim.epoch
        ),
    )


def _by_name(seen: Iterable[Seen]) -> dict[str, list[Seen]]:
    found: dict[str, list[Seen]] = defaultdict(list)
    for each in seen:
        found[each.name].append(each)
    return found


def _overlaps(leases: list[Served]) -> Iterable[str]:
    """Yield a sentence about each lease that begins before an earlier one has ended. Ignore leases of no length."""
    last: Served | None = None
    for lease in sorted((lease for lease in leases if lease.from_ns < lease.to_ns), key=lambda each: each.from_ns):
        if last is not None and lease.from_ns < last.to_ns:
            for_s = (min(lease.to_ns, last.to_ns) - lease.from_ns) / 1e9
            yield f"overlap of {for_s:.3f} s: {_words(last)} and {_words(lease)}"
        if last is None or lease.to_ns > last.to_ns:
            last = lease


def _falling(leases: list[Served]) -> Iterable[str]:
    for before, after in pairwise(sorted(leases, key=lambda each: each.from_ns)):
        if after.epoch <= before.epoch:
            yield f"falling epoch: {_words(after)} after {_words(before)}"


def _stale_acts(acts: list[Act]) -> Iterable[str]:
    """Yield a sentence about each operation that was sent after one with a higher epoch was done."""
    done = sorted(acts, key=lambda each: each.done_ns)
    newest = done[0]
    position = 0
    for act in sorted(acts, key=lambda each: each.sent_ns):
        while position < len(done) and done[position].done_ns < act.sent_ns:
            newest = max(newest, done[position], key=lambda each: each.epoch)
            position += 1
        if position and act.epoch < newest.epoch:
            yield f"stale: {_words(act)} was sent after {_words(newest)} was done"


def _outside(history: History) -> Iterable[str]:
    """Yield a sentence about each grant or operation that began after its node's latest horizon at that time."""
    times: dict[str, list[int]] = defaultdict(list)
    highest: dict[str, list[int]] = defaultdict(list)
    for each in sorted(history.horizons, key=lambda each: each.at_ns):
        times[each.node].append(each.at_ns)
        highest[each.node].append(max([each.horizon_ns, *highest[each.node][-1:]]))
    begun: list[tuple[Served | Act, int]] = [(lease, lease.from_ns) for lease in history.served]
    begun += [(act, act.sent_ns) for act in history.acts]
    for what, began_ns in begun:
        # An operation that began before a horizon was set may have been executed after that.
        until_ns = what.done_ns if isinstance(what, Act) else began_ns
        known = bisect_right(times[what.node], until_ns)
        horizon_ns = highest[what.node][known - 1] if known else 0
        if began_ns >= horizon_ns:
            yield f"outside: {_words(what)} began {(began_ns - horizon_ns) / 1e9:.3f} s after its horizon"


def _words(what: Served | Act) -> str:
    begin, end = what[3] / 1e9, what[4] / 1e9
    return f"{what.name} on {what.node} in epoch {what.epoch} ({begin:.3f} to {end:.3f} s)"


def capped(lease: Served, horizons: Iterable[HorizonSet]) -> Served:
    """Return a lease that ends at the first gap between its node's horizons, whatever its node recorded later."""
    until_ns = 0
    for each in sorted((each for each in horizons if each.node == lease.node), key=lambda each: each.at_ns):
        if each.at_ns > max(until_ns, lease.from_ns):
            break
        until_ns = max(until_ns, each.horizon_ns)
    return lease._replace(to_ns=max(lease.from_ns, min(lease.to_ns, until_ns))) if until_ns > lease.from_ns else lease
