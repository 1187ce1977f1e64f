"""The `[fleet]` table as a value: which fleet a node belongs to, and how it is seen there."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from gpulease.daemon.fleet.etcd.endpoints import parse_endpoints
from gpulease.daemon.host.extras import check_installed
from gpulease.protocol.address import parse_address
from gpulease.protocol.lease_names import NAME

NEEDED: Final = ("grpc", "google.protobuf", "msgspec")
"""The packages that reach etcd and read what it has, from the extra `fleet`."""

MIN_HORIZON_S: Final = 2
"""A shorter horizon is lost by an etcd that elects a leader, which takes one to two seconds."""

MAX_HORIZON_S: Final = 600
"""A longer one keeps a dead node's names away for a quarter of an hour: the operator mistyped the unit."""

HISTORY_S: Final = 60
"""Seconds of history that are kept at least. A directory that is cut off finds another member of etcd within 12 s and
goes on from where it was; one that was away for longer reads all anew. 10,000 nodes write 0.2 GiB in so long."""

MIN_HISTORY_S: Final = 15
"""A directory that moves to another member of etcd within 12 s finds all changes of meanwhile."""

MAX_HISTORY_S: Final = 86_400
"""A thousand nodes write 5 GiB in a day: the operator mistyped the unit."""

ETCD_QUOTA_BYTES: Final = 2 << 30
"""etcd's default (etcd, --quota-backend-bytes)."""

MIN_ETCD_QUOTA_BYTES: Final = 64 << 20
"""A smaller one is full before a fleet has compacted twice."""

MAX_LABELS: Final = 16
"""Each inventory that a node writes carries its labels."""


class Isolated(Enum):
    """The choice for new leases without a name while the node is cut off from etcd: refuse them, or grant them."""

    HOLD = "hold"
    SERVE = "serve"


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """The `[fleet]` table.

    Attributes:
        etcd: The members of etcd, as `etcd://HOST[:PORT][,HOST[:PORT]...]`.
        ca: The CA of etcd's certificates; None for etcd without TLS.
        certificate: A PEM file of this node's certificate for etcd, whose common name is etcd's user.
        key: The file of that certificate's key.
        node: The node's id; "" for the host's name.
        addresses: Where tenants reach the node; () for the TLS addresses that it listens on.
        labels: What the operator says of the node.
        horizon_s: Seconds without a beat after which the node's claimed leases have ended.
        isolated: What becomes of requests for leases without a name while the node is cut off.
        history_s: Seconds of etcd's history that the fleet keeps; 0: this node leaves all of it to etcd.
        etcd_quota_bytes: etcd's own bound of its database, where etcd does not say it.
    """

    etcd: tuple[str, ...]
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    node: str = ""
    addresses: tuple[str, ...] = ()
    labels: MappingProxyType[str, str] = field(default_factory=lambda: MappingProxyType({}))
    horizon_s: int = 30
    isolated: Isolated = Isolated.HOLD
    history_s: int = HISTORY_S
    etcd_quota_bytes: int = ETCD_QUOTA_BYTES

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key belong together")
        if self.certificate is not None and self.ca is None:
            raise ValueError("certificate needs ca, by which etcd is known")
        if not MIN_HORIZON_S <= self.horizon_s <= MAX_HORIZON_S:
            raise ValueError(f"horizon_s is {self.horizon_s}; it must be between {MIN_HORIZON_S} and {MAX_HORIZON_S}")
        if self.history_s and not MIN_HISTORY_S <= self.history_s <= MAX_HISTORY_S:
            raise ValueError(
                f"history_s is {self.history_s}; it must be 0, or between {MIN_HISTORY_S} and {MAX_HISTORY_S}"
            )
        if self.etcd_quota_bytes < MIN_ETCD_QUOTA_BYTES:
            raise ValueError(f"etcd_quota is {self.etcd_quota_bytes} bytes; etcd's is at least {MIN_ETCD_QUOTA_BYTES}")


def parse_etcd(value: Any) -> tuple[str, ...]:
    """Return the `HOST:PORT` of each member of an etcd. Raises ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text: write etcd://HOST,HOST:PORT")
    check_installed(NEEDED, "fleet")
    return parse_endpoints(value)


def parse_node(value: Any) -> str:
    """Return a node's id. Raises ValueError."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ValueError(f"{value!r} is no node's id: use letters, digits, dots, dashes and underscores")
    return value


def parse_labels(table: Any) -> MappingProxyType[str, str]:
    """Return a node's labels by name. Raises ValueError."""
    if not isinstance(table, dict) or len(table) > MAX_LABELS:
        raise ValueError(f"it must be a table of at most {MAX_LABELS} labels")
    for name, value in table.items():
        if not NAME.fullmatch(name) or not isinstance(value, str) or not NAME.fullmatch(value):
            raise ValueError(f"{name} = {value!r} is no label: use letters, digits, dots, dashes and underscores")
    return MappingProxyType(dict(table))


def parse_addresses(value: Any) -> tuple[str, ...]:
    """Return the addresses that tenants reach the node by. Raises ValueError."""
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError('it must be a list of addresses, such as ["tls:gpu1.example:7443"]')
    return tuple(str(parse_address(text)) for text in value)


def parse_isolated(value: Any) -> Isolated:
    """Return the choice for a node that is cut off. Raises ValueError."""
    try:
        return Isolated(value)
    except ValueError:
        raise ValueError(f'it must be "{Isolated.HOLD.value}" or "{Isolated.SERVE.value}"') from None
