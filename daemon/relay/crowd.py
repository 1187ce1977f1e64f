"""Who gives way when there are too many: whoever comes from where most come from. So a host crowds out itself alone."""

import ipaddress
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, Protocol, TypeVar

SITE_PREFIX_BITS: Final = 64
"""Of an IPv6 address, what one site has all addresses behind (RFC 4291, 2.5.4)."""


class FromSomewhere(Protocol):
    """One of a crowd."""

    @property
    def source(self) -> str:
        """See `source_of`."""


One = TypeVar("One", bound=FromSomewhere)


def source_of(host: str) -> str:
    """Where an address counts as coming from: an IPv4 address is a source, an IPv6 address's site is."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.version == 4:
        return str(address)
    return str(ipaddress.ip_network((int(address), SITE_PREFIX_BITS), strict=False))


def first_of_the_largest(crowd: Iterable[One], may_go: Callable[[One], bool] = lambda one: True) -> One | None:
    """Of those who may go, the first from the source of which there are most; None if nobody may."""
    everybody = list(crowd)
    counts = Counter(one.source for one in everybody)
    return max(filter(may_go, everybody), key=lambda one: counts[one.source], default=None)


def first_of_the_fewest(waiting: Iterable[One], inside: Iterable[FromSomewhere]) -> One:
    """Of those who wait, the first from the source of which fewest are inside."""
    counts = Counter(one.source for one in inside)
    return min(waiting, key=lambda one: counts[one.source])
