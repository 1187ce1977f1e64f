"""The messages between the broker and the web process, on the channel that the broker opened at the process's start.

    from      messages                                             descriptors with them
    broker    WebStart, once: the settings                         the process's connection, and the listening sockets
              TokenChanged, CardLoads, FleetMembership, Ping
              LeaseRevoked, DrainChanged, FencesCleared or ActionRefused, for each action
    process   RevokeLease, ChangeDrain, ClearFences: the actions that operators request by the page
              what every helper process sends

An attacker may have taken over the web process. So the broker bounds each field of an action, and checks the operator's
token that comes with it.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, ClassVar, Final

from gpulease.daemon.contract.message_fields import (
    BYTES,
    TEXT,
    U64,
    LeaseText,
    Message,
    Request,
    Text,
    by_op,
    converted,
    integer,
    listed,
    matching,
    messages_of,
    one_of,
    text,
)
from gpulease.daemon.contract.messages import LivenessPing
from gpulease.daemon.web.fleet_membership import FleetMembership
from gpulease.daemon.web.load_samples import CardLoads
from gpulease.protocol.fast_dataclass import dataclass
from gpulease.protocol.opcodes import RevokeOutcome

MAX_HOSTS: Final = 256
"""Maximum number of names in the Host header under which the page is served."""

MAX_REASON_CHARS: Final = 512
"""Maximum length of the reason that a tenant receives; the audit log keeps at most that many characters."""

MAX_WITHIN_MS: Final = (1 << 32) - 1
"""The longest time of a drain: 49 days, the most that the protocol's DRAIN can express."""

Hosts = Annotated[tuple[str, ...], listed(TEXT, MAX_HOSTS)]
Bytes = Annotated[bytes, BYTES]
Card = Annotated[str, matching("[A-Za-z0-9-]{1,64}")]
CardOrNode = Annotated[str, matching("[A-Za-z0-9-]{0,64}")]


class WebRefusal(Enum):
    """The reason why the broker refused an action."""

    WRONG_TOKEN = "wrong_token"
    TOO_MANY = "too_many"
    DENIED = "denied"
    FAILED = "failed"
    """The broker could not read or perform the request because of a fault of the daemon. The log describes the fault.
    """


# --- broker to process ---


@dataclass(frozen=True, slots=True)
class WebStart(Message):
    """The process's first message.

    Attributes:
        hosts: Names of this host under which the page is served.
        others: Further names, from the settings.
        token_digest: See TokenChanged.
        secret: Key for the tenants' pseudonyms.
        node: The host's name, for the page.
    """

    OP: ClassVar[str] = "start"
    hosts: Hosts
    others: Hosts
    token_digest: Bytes
    secret: Bytes
    node: Text


@dataclass(frozen=True, slots=True)
class TokenChanged(Message):
    """Accept another operator's token from now on. `digest` is the token's SHA-256; b"" for no token."""

    OP: ClassVar[str] = "token"
    digest: Bytes


@dataclass(frozen=True, slots=True)
class LeaseRevokedReply(Message):
    OP: ClassVar[str] = "revoked"
    request: Request
    outcome: Annotated[RevokeOutcome, converted(RevokeOutcome, int)]


@dataclass(frozen=True, slots=True)
class DrainChanged(Message):
    """The outcome of ChangeDrain.

    Attributes:
        left_ms: Milliseconds until the remaining leases are ended; None if there is no drain.
        leases: The number of active leases of the node, or of the card.
    """

    OP: ClassVar[str] = "drain_set"
    request: Request
    left_ms: Annotated[int | None, U64.or_nil()]
    leases: Annotated[int, U64]


@dataclass(frozen=True, slots=True)
class FencesCleared(Message):
    """The outcome of ClearFences; `count` is the number of slices."""

    OP: ClassVar[str] = "fences_cleared"
    request: Request
    count: Annotated[int, U64]


@dataclass(frozen=True, slots=True)
class ActionRefused(Message):
    """The action was not performed, or its outcome is unknown; `message` is a sentence for the operator."""

    OP: ClassVar[str] = "refused"
    request: Request
    why: Annotated[WebRefusal, one_of(WebRefusal)]
    message: Text


# --- process to broker ---


@dataclass(frozen=True, slots=True)
class RevokeLease(Message):
    """Revoke a lease. `token` is the token in the operator's request, which the broker checks."""

    OP: ClassVar[str] = "revoke"
    request: Request
    token: Bytes
    lease_id: LeaseText
    reason: Annotated[str, text(MAX_REASON_CHARS)]


@dataclass(frozen=True, slots=True)
class ChangeDrain(Message):
    """Drain the node or a card within `within_ms`; None ends the drain. `token` is as in RevokeLease.

    Attributes:
        card: The card's UUID; "" for the node.
    """

    OP: ClassVar[str] = "drain"
    request: Request
    token: Bytes
    within_ms: Annotated[int | None, integer(0, MAX_WITHIN_MS).or_nil()]
    card: CardOrNode


@dataclass(frozen=True, slots=True)
class ClearFences(Message):
    """Allow a card's fenced memory to be granted again. `token` is as in RevokeLease."""

    OP: ClassVar[str] = "clear_fences"
    request: Request
    token: Bytes
    card: Card


# --- directions ---

START: Final = by_op(WebStart)

ActionOutcome = LeaseRevokedReply | DrainChanged | FencesCleared | ActionRefused

ToWeb = (
    LivenessPing
    | TokenChanged
    | CardLoads
    | FleetMembership
    | LeaseRevokedReply
    | DrainChanged
    | FencesCleared
    | ActionRefused
)
TO_WEB: Final[Mapping[str, type[ToWeb]]] = messages_of(ToWeb)

FromWeb = RevokeLease | ChangeDrain | ClearFences
FROM_WEB: Final[Mapping[str, type[FromWeb]]] = messages_of(FromWeb)
