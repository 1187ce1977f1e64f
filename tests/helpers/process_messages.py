"""An instance of every message between the broker and its helper processes, by direction."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from gpulease.daemon.contract.message_fields import Message
from gpulease.daemon.contract.messages import LivenessPing
from gpulease.daemon.fleet import fleet_messages as fleet
from gpulease.daemon.fleet.etcd.transactions import StoreSize
from gpulease.daemon.fleet.records.fleet_records import CardRecord
from gpulease.daemon.fleet.rules import fleet_events as events
from gpulease.daemon.remote import remote_messages as remote
from gpulease.daemon.web import web_messages as web
from gpulease.daemon.web.fleet_membership import FleetMembership
from gpulease.daemon.web.load_samples import CardLoads, LoadSample
from gpulease.protocol.opcodes import RevokeOutcome

LEASE: Final = f"{10:032x}"
NAMES: Final = ("URI:gpulease:tenant:ann",)
IDENTITY: Final = events.FleetIdentity(7, "first", 8, 9, is_restored=True)
MARK: Final = events.DaemonMark(4, "ab", "cd-3")


class Direction(NamedTuple):
    ops: Mapping[str, type[Message]]
    messages: Sequence[Message]


FLEET_START: Final = Direction(
    fleet.START,
    [
        fleet.FleetStart(
            etcd=("h:2379",),
            files=("ca", "key"),
            node="node-0",
            horizon_s=30.0,
            history_s=60,
            timeout_s=2.0,
            incarnation=5,
            identity=IDENTITY,
            mark=MARK,
        )
    ],
)
TO_FLEET: Final = Direction(
    fleet.TO_FLEET,
    [
        LivenessPing(),
        fleet.LiveClaimsPart({"alpha": 7}, {LEASE: "ann"}, is_last=True),
        events.RecordChanged(
            ("tls:h:1",), {"zone": "a"}, (CardRecord("GPU-a", "card", 3, 2, 1, is_partition=False),), True, "1"
        ),
        events.ClaimWanted(1, "alpha", LEASE, "ann", 5),
        events.ClaimDropped(1),
        events.ClaimEnded("alpha", 7),
        events.QuotaWanted(2, "ann", 100, LEASE, 5),
        events.QuotaDropped(2),
        events.QuotaEnded("ann", LEASE),
        fleet.HorizonSet(),
        events.MarkKept(4),
        fleet.CertificatesRenewed(("ca",)),
        events.Stopping(),
    ],
)
FROM_FLEET: Final = Direction(
    fleet.FROM_FLEET,
    [
        events.Joined(IDENTITY, 5, MARK),
        events.Remembered(IDENTITY),
        events.KeepMark(MARK),
        events.MoveHorizon(9, 5),
        events.EndClaimed(events.Reason.LOST, "another node fenced this one"),
        events.ClaimGiven(1, "alpha", 7),
        events.ClaimRefused(1, events.ClaimRefusal.TAKEN, "it is taken", 1000),
        events.QuotaGiven(2, "ann", LEASE),
        events.QuotaRefused(2, events.ClaimRefusal.TOO_LARGE, "it is too large", 1000),
        events.Stopped(has_left=True),
        events.Noted(events.Note.REFUSED, "no", "node-1", "alpha"),
        events.RecordsUnreadable(2, "2 values"),
        fleet.StoreMeasured(StoreSize("h:2379", 5, 0)),
    ],
)
TO_ACCEPTOR: Final = Direction(remote.TO_ACCEPTOR, [LivenessPing(), remote.Listen(), remote.LeftOverRelay("1F")])
FROM_ACCEPTOR: Final = Direction(
    remote.FROM_ACCEPTOR,
    [remote.RelayBegan(77), remote.RelayArrived(77, "10.0.0.1", NAMES, "1F"), remote.RelayLeft(77)],
)
TO_RELAY: Final = Direction(remote.TO_RELAY, [remote.TakeConnection()])
FROM_RELAY: Final = Direction(
    remote.FROM_RELAY, [remote.PeerVerified(NAMES, "1F"), remote.PeerRefused("there is no certificate")]
)
WEB_START: Final = Direction(web.START, [web.WebStart(("127.0.0.1",), ("gpu1",), b"digest", b"secret", "gpu1")])
TO_WEB: Final = Direction(
    web.TO_WEB,
    [
        LivenessPing(),
        web.TokenChanged(b"digest"),
        CardLoads("GPU-a", (LoadSample(5, None, 7, 6), LoadSample(6, 50, None, 6))),
        FleetMembership("gpu1", 9, 1),
        web.LeaseRevokedReply(1, RevokeOutcome.FENCED),
        web.DrainChanged(2, None, 3),
        web.FencesCleared(3, 2),
        web.ActionRefused(4, web.WebRefusal.DENIED, "There is no such card."),
    ],
)
FROM_WEB: Final = Direction(
    web.FROM_WEB,
    [
        web.RevokeLease(1, b"token", LEASE, "why"),
        web.ChangeDrain(2, b"token", 60_000, "GPU-0"),
        web.ClearFences(3, b"token", "GPU-a"),
    ],
)
DIRECTIONS: Final = {
    "fleet start": FLEET_START,
    "to fleet": TO_FLEET,
    "from fleet": FROM_FLEET,
    "to acceptor": TO_ACCEPTOR,
    "from acceptor": FROM_ACCEPTOR,
    "to relay": TO_RELAY,
    "from relay": FROM_RELAY,
    "web start": WEB_START,
    "to web": TO_WEB,
    "from web": FROM_WEB,
}
