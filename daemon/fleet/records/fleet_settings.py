"""The settings of the table `[fleet]`: the node's fleet, and what the node publishes there."""

from dataclasses import field
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final

from gpulease.daemon.fleet.etcd.endpoints import parse_endpoints
from gpulease.daemon.host.absolute_paths import path_setting
from gpulease.daemon.host.extras import check_installed
from gpulease.protocol.address import parse_address
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.lease_names import NAME
from gpulease.protocol.settings_reader import Setting, check_bounds, must_be, read_size

NEEDED: Final = ("grpc", "google.protobuf", "msgspec")
"""The packages that connect to etcd and read its values, from the extra `fleet`."""

MIN_HORIZON_S: Final = 2
"""Minimum horizon in seconds. A shorter one would pass while etcd elects a leader, which takes one to two seconds."""

MAX_HORIZON_S: Final = 600
"""Maximum horizon in seconds. A longer one, which is probably in a wrong unit, would block a dead node's names for more
than ten minutes.
"""

HISTORY_S: Final = 60
"""Seconds of etcd's history that are kept by default. A directory that is cut off finds another member of etcd within
12 s and continues where it stopped. After a gap longer than the history, it reads everything again. 10,000 nodes write
0.2 GiB in 60 s."""

MIN_HISTORY_S: Final = 15
"""Minimum seconds of history, so that a directory that needs 12 s to find another member of etcd misses no change."""

MAX_HISTORY_S: Final = 86_400
"""Maximum seconds of history. A thousand nodes write 5 GiB in a day."""

ETCD_QUOTA_BYTES: Final = 2 << 30
"""etcd's default for the maximum size of its database (etcd, --quota-backend-bytes)."""

MIN_ETCD_QUOTA_BYTES: Final = 64 << 20
"""Minimum size in bytes. A smaller one is used up before a fleet has compacted twice."""

MAX_LABELS: Final = 16
"""Maximum number of a node's labels, which are in each inventory that it writes."""


class Isolated(Enum):
    """What to do with requests for leases without a name while the node is cut off from etcd: refuse or grant them."""

    HOLD = "hold"
    SERVE = "serve"


def parse_etcd(value: Any) -> tuple[str, ...]:
    """Return the `HOST:PORT` of each member of an etcd. Raises ValueError."""
    if not isinstance(value, str):
        raise must_be("a string such as etcd://HOST,HOST:PORT", value)
    check_installed(NEEDED, "fleet")
    return parse_endpoints(value)


def parse_node(value: Any) -> str:
    """Return `value` if it is a node's id. Raises ValueError otherwise."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise must_be("a node's id", value, "use letters, digits, dots, dashes and underscores")
    return value


def parse_labels(table: Any) -> MappingProxyType[str, str]:
    """Return a node's labels by name. Raises ValueError."""
    if not isinstance(table, dict) or len(table) > MAX_LABELS:
        raise must_be(f"a table of at most {MAX_LABELS} labels", table)
    for name, value in table.items():
        if not NAME.fullmatch(name) or not isinstance(value, str) or not NAME.fullmatch(value):
            raise ValueError(f"{name} = {value!r} is not a label: use letters, digits, dots, dashes and underscores")
    return MappingProxyType(dict(table))


def parse_addresses(value: Any) -> tuple[str, ...]:
    """Return the addresses at which tenants reach the node. Raises ValueError."""
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise must_be('a list of addresses, such as ["tls:gpu1.example:7443"]', value)
    return tuple(str(parse_address(text)) for text in value)


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """The `[fleet]` table.

    Raises:
        ValueError: A number is out of its bounds, or two settings contradict each other.
    """

    etcd: Annotated[
        tuple[str, ...],
        Setting(
            "The addresses of etcd's members, as etcd://HOST:PORT,HOST:PORT.",
            what="the members of etcd",
            read=parse_etcd,
            example='"etcd://etcd1.example,etcd2.example,etcd3.example"',
        ),
    ]
    ca: Annotated[
        Path | None,
        path_setting(
            "A file with the CA of etcd's certificates; without it, connections are not encrypted.",
            "/etc/gpulease/pki/etcd-ca.pem",
        ),
    ] = None
    certificate: Annotated[
        Path | None,
        path_setting(
            "This node's certificate for connections to etcd; its common name is the name of the node's user in etcd.",
            "/etc/gpulease/pki/etcd-client.pem",
        ),
    ] = None
    key: Annotated[
        Path | None, path_setting("The private key of that certificate.", "/etc/gpulease/pki/etcd-client.key")
    ] = None
    node: Annotated[
        str,
        Setting("This node's id; by default, the host's name.", what="a node's id", read=parse_node, example='"gpu1"'),
    ] = ""
    addresses: Annotated[
        tuple[str, ...],
        Setting(
            "The addresses at which tenants reach the node; by default the TLS addresses that it listens on.",
            what="a list of addresses",
            read=parse_addresses,
            example='["tls:gpu1.example:7443"]',
        ),
    ] = ()
    labels: Annotated[
        MappingProxyType[str, str],
        Setting(
            "Labels by which tenants can select this node.",
            what="a table of labels",
            read=parse_labels,
            example='{ zone = "a" }',
        ),
    ] = field(default_factory=lambda: MappingProxyType({}))
    horizon_s: Annotated[
        int,
        Setting(
            "The membership deadline: if etcd acknowledges no heartbeat for this many seconds, the "
            "node's named leases end.",
            least=MIN_HORIZON_S,
            most=MAX_HORIZON_S,
        ),
    ] = 30
    isolated: Annotated[
        Isolated,
        Setting(
            "How requests for leases without a name are handled while the node is cut off from etcd: "
            '"hold" refuses them, "serve" grants them.'
        ),
    ] = Isolated.HOLD
    history_s: Annotated[
        int,
        Setting(
            "Seconds of etcd's history that the fleet's nodes keep; they compact older revisions. With 0 "
            "they never compact, because etcd does so by itself.",
            least=MIN_HISTORY_S,
            most=MAX_HISTORY_S,
            or_zero=True,
        ),
    ] = HISTORY_S
    etcd_quota_bytes: Annotated[
        int,
        Setting(
            "The value of etcd's --quota-backend-bytes, if it is not the default. `gpulease health` warns when four"
            " fifths of it are used.",
            key="etcd_quota",
            what="a size",
            read=read_size,
            least=MIN_ETCD_QUOTA_BYTES,
            unit="bytes",
            example='"2GiB"',
        ),
    ] = ETCD_QUOTA_BYTES

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key must be given together")
        if self.certificate is not None and self.ca is None:
            raise ValueError("certificate needs ca, the CA of etcd's own certificate")
        check_bounds(self)
