"""The rules that a fleet's history must keep, as a pure function of what was seen of it.

All times are nanoseconds of CLOCK_BOOTTIME, of the one host that all nodes of a test run on.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, TypeVar


class Served(NamedTuple):
    """A claimed lease by its node's own records: from its grant until its end, or the last horizon before that."""

    name: str
    node: str
    epoch: int
    from_ns: int
    to_ns: int


class Act(NamedTuple):
    """An operation of a tenant's on a named lease that succeeded: it was done between these two times."""

    name: str
    node: str
    epoch: int
    sent_ns: int
    done_ns: int


class HorizonSet(NamedTuple):
    """A node's horizon, from a moment on. Claimed leases of the node may live until then."""

    node: str
    at_ns: int
    horizon_ns: int


class Claim(NamedTuple):
    """A claim that is in etcd when all has healed."""

    name: str
    node: str
    epoch: int


Seen = TypeVar("Seen", Served, Act)


@dataclass(frozen=True)
class History:
    """What was seen.

    Attributes:
        live: What each node says that it serves when all has healed: the epochs by name.
    """

    served: tuple[Served, ...] = ()
    acts: tuple[Act, ...] = ()
    horizons: tuple[HorizonSet, ...] = ()
    claims: tuple[Claim, ...] = ()
    live: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """What broke the rules, a sentence each.

    Attributes:
        overlaps: Two leases of one name were live at a time.
        stale_acts: A tenant's operation was done under an older epoch than one before it.
        falling_epochs: A later lease of a name has no higher epoch.
        outside: A lease was granted, or an operation done, when its node's horizon was over.
        orphans: A claim is left that its node does not serve.
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
        told = ", ".join(f"{name.replace('_', ' ')} {len(getattr(self, name))}" for name in counts)
        return "\n".join([f"leases {self.leases}, operations {self.acts}: {told}", *self.broken])


def check(history: History) -> Verdict:
    served, acts = _by_name(history.served), _by_name(history.acts)
    return Verdict(
        len(history.served),
        len(history.acts),
        overlaps=tuple(told for leases in served.values() for told in _overlaps(leases)),
        stale_acts=tuple(told for done in acts.values() for told in _stale_acts(done)),
        falling_epochs=tuple(told for leases in served.values() for told in _falling(leases)),
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
    """Each lease that begins before the longest one before it ends; one of no length is none."""
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
    """Each operation that was sent after another of a higher epoch was done: no order of the two excuses it."""
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
    """Each grant, and each operation, that began after the latest horizon of its node that was set by then."""
    times: dict[str, list[int]] = defaultdict(list)
    highest: dict[str, list[int]] = defaultdict(list)
    for each in sorted(history.horizons, key=lambda each: each.at_ns):
        times[each.node].append(each.at_ns)
        highest[each.node].append(max([each.horizon_ns, *highest[each.node][-1:]]))
    begun: list[tuple[Served | Act, int]] = [(lease, lease.from_ns) for lease in history.served]
    begun += [(act, act.sent_ns) for act in history.acts]
    for what, began_ns in begun:
        # What began before a horizon was set may have been done under it.
        until_ns = what.done_ns if isinstance(what, Act) else began_ns
        known = bisect_right(times[what.node], until_ns)
        horizon_ns = highest[what.node][known - 1] if known else 0
        if began_ns >= horizon_ns:
            yield f"outside: {_words(what)} began {(began_ns - horizon_ns) / 1e9:.3f} s after its horizon"


def _words(what: Served | Act) -> str:
    begin, end = what[3] / 1e9, what[4] / 1e9
    return f"{what.name} on {what.node} in epoch {what.epoch} ({begin:.3f} to {end:.3f} s)"


def capped(lease: Served, horizons: Iterable[HorizonSet]) -> Served:
    """A lease until the first gap between its node's horizons: there it ended, whatever its node wrote down later."""
    until_ns = 0
    for each in sorted((each for each in horizons if each.node == lease.node), key=lambda each: each.at_ns):
        if each.at_ns > max(until_ns, lease.from_ns):
            break
        until_ns = max(until_ns, each.horizon_ns)
    return lease._replace(to_ns=max(lease.from_ns, min(lease.to_ns, until_ns))) if until_ns > lease.from_ns else lease
