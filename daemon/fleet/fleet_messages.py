"""The messages between the broker and the fleet process, on the channel that the broker opened at the process's start.

    from      messages
    broker    FleetStart, once: the settings
              LiveClaimsPart: the claims of all live leases, in parts
              RecordChanged
              ClaimWanted, ClaimDropped, ClaimEnded; QuotaWanted, QuotaDropped, QuotaEnded
              HorizonSet, MarkKept: what a join or heartbeat waits for
              CertificatesRenewed                                  with the certificates' descriptors
              Stopping; Ping
    process   Joined, Remembered, KeepMark, MoveHorizon, EndClaimed
              ClaimGiven or ClaimRefused, for each ClaimWanted; QuotaGiven or QuotaRefused, for each QuotaWanted
              Noted, RecordsUnreadable, StoreMeasured
              Stopped; and what every helper process sends

Most messages are events or effects of the rules, which `rules/fleet_events.py` declares.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final

from gpulease.daemon.contract.message_fields import (
    LEASE_TEXT,
    TEXT,
    U64,
    Flag,
    Message,
    Text,
    by_op,
    decimal,
    listed,
    mapped,
    messages_of,
    nested,
    row,
)
from gpulease.daemon.contract.messages import LivenessPing
from gpulease.daemon.fleet.etcd.transactions import StoreSize
from gpulease.daemon.fleet.rules.fleet_events import (
    ClaimDropped,
    ClaimEnded,
    ClaimGiven,
    ClaimRefused,
    ClaimWanted,
    DaemonMark,
    EndClaimed,
    FleetIdentity,
    Joined,
    KeepMark,
    MarkKept,
    MoveHorizon,
    Noted,
    QuotaDropped,
    QuotaEnded,
    QuotaGiven,
    QuotaRefused,
    QuotaWanted,
    RecordChanged,
    RecordsUnreadable,
    Remembered,
    Stopped,
    Stopping,
)
from gpulease.protocol.fast_dataclass import dataclass

CLAIMS_PER_MESSAGE: Final = 256
"""Maximum number of claims in one message. 256 names or tenants of 128 characters take less than half a datagram."""

MAX_ENDPOINTS: Final = 256
"""Maximum number of endpoints of etcd in a message. A cluster has three or five members."""

MAX_FILES: Final = 3
"""Maximum number of certificate files: a CA, a key and a certificate."""

MAX_SECONDS: Final = 1e9

Files = Annotated[tuple[str, ...], listed(TEXT, MAX_FILES)]
Seconds = Annotated[float, decimal(0, MAX_SECONDS)]


# --- broker to process ---


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStart(Message):
    """The process's first message. The open files of etcd's certificates come with it.

    Attributes:
        etcd: etcd's endpoints.
        files: The kind of each descriptor's file: "ca", "key" or "certificate".
        node: The node's id.
        horizon_s: See FleetTerms.
        history_s: Age in seconds from which etcd's history is removed; 0 to remove none.
        timeout_s: Maximum seconds for one request to etcd.
        incarnation: The create revision of the node's record by the journal; 0 if the node is not a member.
        identity: The store that it joined.
        mark: Its last heartbeat.
    """

    OP: ClassVar[str] = "start"
    etcd: Annotated[tuple[str, ...], listed(TEXT, MAX_ENDPOINTS)]
    files: Files
    node: Text
    horizon_s: Seconds
    history_s: Annotated[int, U64]
    timeout_s: Seconds
    incarnation: Annotated[int, U64]
    identity: Annotated[FleetIdentity, nested(FleetIdentity)]
    mark: Annotated[DaemonMark, nested(DaemonMark)]


@dataclass(frozen=True, slots=True)
class LiveClaimsPart(Message):
    """A part of LiveClaims.

    Attributes:
        epochs: Epochs by name.
        quotas: Tenants by lease.
        is_last: Whether this is the last part.
    """

    OP: ClassVar[str] = "live"
    epochs: Annotated[Mapping[str, int], mapped(TEXT, U64, CLAIMS_PER_MESSAGE)]
    quotas: Annotated[Mapping[str, str], mapped(LEASE_TEXT, TEXT, CLAIMS_PER_MESSAGE)]
    is_last: Flag


@dataclass(frozen=True, slots=True)
class HorizonSet(Message):
    """The broker has written the last membership deadline to the control pages."""

    OP: ClassVar[str] = "horizon_set"


@dataclass(frozen=True, slots=True)
class CertificatesRenewed(Message):
    """A certificate for etcd was replaced on disk. The open files come with the message; `files` names them."""

    OP: ClassVar[str] = "certificates"
    files: Files


# --- process to broker ---


@dataclass(frozen=True, slots=True)
class StoreMeasured(Message):
    """The member of etcd with the largest database."""

    OP: ClassVar[str] = "store"
    store: Annotated[StoreSize, row(StoreSize, endpoint=TEXT, size_bytes=U64, quota_bytes=U64)]


# --- directions ---

START: Final = by_op(FleetStart)

ToFleet = (
    LivenessPing
    | LiveClaimsPart
    | RecordChanged
    | ClaimWanted
    | ClaimDropped
    | ClaimEnded
    | QuotaWanted
    | QuotaDropped
    | QuotaEnded
    | HorizonSet
    | MarkKept
    | CertificatesRenewed
    | Stopping
)
TO_FLEET: Final[Mapping[str, type[ToFleet]]] = messages_of(ToFleet)

FromFleet = (
    Joined
    | Remembered
    | KeepMark
    | MoveHorizon
    | EndClaimed
    | ClaimGiven
    | ClaimRefused
    | QuotaGiven
    | QuotaRefused
    | Stopped
    | Noted
    | RecordsUnreadable
    | StoreMeasured
)
FROM_FLEET: Final[Mapping[str, type[FromFleet]]] = messages_of(FromFleet)
