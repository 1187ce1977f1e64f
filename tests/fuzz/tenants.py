"""Tenants, an operator and strangers over TCP that use one broker, and what each may receive: see `control`."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from gpulease.daemon.broker.connection_limiter import ConnectionLimiter
from gpulease.daemon.broker.control_connection import ControlConnection
from gpulease.daemon.broker.token_service import TokenService
from gpulease.daemon.capabilities.claims import Demand
from gpulease.daemon.contract.guests import Guest
from gpulease.daemon.gpus.emulated_cards import EmbeddedCards
from gpulease.daemon.leases.devices import Card
from gpulease.daemon.leases.quotas import CoreLimits, TenantLimits, TenantRules
from gpulease.daemon.leases.table import LeaseTable
from gpulease.protocol import Connection, Goodbye, LocalProtocolError, Opcode, Reply, Role
from gpulease.protocol import messages as m
from gpulease.protocol.capabilities import ALL_PERMISSIONS, NODE_LEASE, SESSION_PERMISSIONS, Permission
from gpulease.protocol.codec import build_body
from gpulease.protocol.connection import Notification, RegionNotification
from gpulease.protocol.failures import Failure
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.opcodes import RevokeOutcome

from .draws import Draws
from .virtual import CLOCK, SimulatedSocket, SimulatedWorkers, Wire, broker_of

SIZES = [1000, 400]
LIMITS = CoreLimits(
    max_ttl_s=8,
    max_leases=12,
    max_leases_per_tenant=6,
    max_waiting=5,
    max_waiting_per_tenant=3,
    max_hold_back_s=1,
    max_wait_s=6,
    max_tombstones=5,
    max_story_entries=8,
    spawn_timeout_s=2,
    adopt_timeout_s=1,
    reclaim_timeout_s=3,
    tenants=TenantRules(by_name={"bob": TenantLimits(max_vram_bytes=700, max_ttl_s=3, acquires_per_minute=600)}),
)
CARDS = tuple(
    Card(fact.uuid, fact.index, fact.name, fact.capacity_bytes, 20) for fact in EmbeddedCards(SIZES).discover({})
)
UIDS = {"ann": 60_001, "bob": 60_002, "root": 0, "tcp": None, "uid:60003": 60_003}
NAMES = tuple(UIDS)
TENANT_OF_UID = {60_001: "ann", 60_002: "bob", 0: "root"}
OPERATOR = "root"


@dataclass(frozen=True)
class Issue:
    lease_id: int
    audience: bytes
    permissions: Permission
    generation: int
    expires_ns: int
    token: bytes


@dataclass
class Known:
    """What is true of leases and tokens, as seen from outside."""

    owner: dict[int, str] = field(default_factory=dict)
    generation: dict[int, int] = field(default_factory=dict)
    issues: list[Issue] = field(default_factory=list)
    leases: list[int] = field(default_factory=lambda: [NODE_LEASE, 5])
    attached_by_token: dict[tuple[int, str], int] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    """A request in progress: its body, when it was sent, and the leases' generations at that time."""

    op: Opcode
    body: Any
    sent_ns: int
    generation: int


class Scene:
    def __init__(self, draws: Draws) -> None:
        # The inode of each file identifies the peer whose socket is handed over.
        self.places = {name: os.memfd_create(f"peer-{name}") for name in NAMES}
        self.name_of = {os.fstat(fd).st_ino: name for name, fd in self.places.items()}
        demands = frozenset(demand for demand in Demand if draws.chance(6))
        self.workers = SimulatedWorkers(draws.byte)
        self.table = LeaseTable(CARDS, LIMITS, draws.below(2))
        self.runtime = broker_of(self.table, TokenService(self.table, demands, None), self.workers, SIZES)
        self.workers.on_attach = self.on_attach
        self.limiter = ConnectionLimiter(12, 4)
        self.known = Known()
        self.peers: list[Peer] = []

    def audience_of(self, name: str) -> bytes:
        return self.runtime.tokens.authority().audience_of(name)

    def lets(self, name: str, lease_id: int, permission: Permission, asked: Asked) -> bool:
        """Return whether a token of that tenant may have permitted the operation since it was requested."""
        audience = self.audience_of(name)
        return any(
            issue.lease_id == lease_id
            and issue.audience == audience
            and issue.permissions & permission
            and issue.generation >= asked.generation
            and issue.expires_ns > asked.sent_ns
            for issue in self.known.issues
        )

    def on_attach(self, lease_id: int, inode: int, guest: Guest | None) -> None:
        name, known = self.name_of[inode], self.known
        if guest is None:
            assert known.owner.get(lease_id) == name, f"{name} is in a session of {known.owner.get(lease_id)}"
            return
        fitting = [
            issue for issue in known.issues if issue.lease_id == lease_id and issue.audience == self.audience_of(name)
        ]
        good = [issue for issue in fitting if issue.expires_ns > CLOCK.now_ns]
        assert any(not guest.permissions & ~issue.permissions for issue in good)
        assert guest.expires_ns > CLOCK.now_ns
        assert guest.generation == known.generation[lease_id]
        key = (lease_id, name)
        known.attached_by_token[key] = known.attached_by_token.get(key, 0) + 1
        assert known.attached_by_token[key] <= len(fitting), "a token opened two sessions"


class Peer:
    """A connection to the broker, seen from its other end."""

    def __init__(self, scene: Scene, name: str) -> None:
        self.scene = scene
        self.name = name
        self.connection = Connection(Role.CLIENT, max_payload_bytes=MAX_PAYLOAD_BYTES)
        self.asked: dict[int, Asked] = {}
        self.subscribed: dict[int, Asked] = {}
        self.outbox = b""
        self.unread = 0
        self.is_raw = False
        self.wire = Wire(SimulatedSocket(UIDS[name], scene.places[name]), self.hear, lambda: self.unread)
        protocol = ControlConnection(scene.runtime, "cpu", scene.limiter, TENANT_OF_UID)
        self.wire.protocol = self.protocol = protocol
        protocol.connection_made(self.wire)
        assert protocol.peer.tenant == name
        assert protocol.peer.is_operator == (name == OPERATOR)

    @property
    def is_open(self) -> bool:
        return not self.wire.is_closing()

    def ask(self, op: Opcode, body: m.Body, session_id: int = 0) -> None:
        assert build_body(body) is not None
        try:
            number, frame = self.connection.send_request(op, body, session_id=session_id)
        except LocalProtocolError:
            return
        lease_id = session_id or getattr(body, "lease_id", 0)
        self.asked[number] = Asked(op, body, CLOCK.now_ns, self.scene.known.generation.get(lease_id, 0))
        if op is Opcode.LEASE_SUBSCRIBE:
            self.subscribed[number] = self.asked[number]
        self.say(frame)

    def say(self, data: bytes) -> None:
        self.outbox += data
        self.pump()

    def pump(self) -> None:
        while self.outbox and self.is_open and not self.wire.is_paused:
            room = self.protocol.get_buffer(-1)
            count = min(len(room), len(self.outbox))
            room[:count], self.outbox = self.outbox[:count], self.outbox[count:]
            self.protocol.buffer_updated(count)

    def hear(self, data: bytes) -> None:
        self.connection.receive_data(data)
        while (event := self.connection.next_event()) is not None:
            if isinstance(event, Goodbye | RegionNotification):
                continue
            if isinstance(event, Notification):
                self.overhear(event)
                continue
            # A peer that sends invalid requests may get replies with request numbers that it never used.
            assert isinstance(event, Reply) or self.is_raw, event
            if isinstance(event, Reply):
                self.learn(self.asked.pop(event.request_id), event.result)

    def overhear(self, told: Notification) -> None:
        """Check that a subscription reports only leases that this peer may know of."""
        subscribed = self.subscribed[told.subscription]
        lease_id, owner = told.event.lease_id, self.scene.known.owner.get(told.event.lease_id)
        assert subscribed.body.lease_id in (NODE_LEASE, lease_id)
        if owner is not None:
            assert self.may(lease_id, ALL_PERMISSIONS, subscribed), f"{self.name} hears of a lease of {owner}"

    def learn(self, asked: Asked, result: Any) -> None:
        if not isinstance(result, Failure):
            check = ANSWERS.get(asked.op)
            if check is not None:
                check(self, asked, asked.body, result)

    def may(self, lease_id: int, permission: Permission, asked: Asked) -> bool:
        known = self.scene.known
        return (
            self.name == OPERATOR
            or known.owner.get(lease_id) == self.name
            or self.scene.lets(self.name, lease_id, permission, asked)
        )


# --- what a success says, and whether it may say that ---


def granted(peer: Peer, asked: Asked, body: m.LeaseAlloc, grant: m.LeaseGrant) -> None:
    known = peer.scene.known
    assert grant.lease_id not in known.owner
    assert grant.size_bytes == body.size_bytes
    assert grant.ttl_ms <= body.ttl_ms
    known.owner[grant.lease_id], known.generation[grant.lease_id] = peer.name, grant.generation
    known.leases.append(grant.lease_id)


def renewed(peer: Peer, asked: Asked, body: m.LeaseRenew, result: m.LeaseRenewed) -> None:
    assert peer.may(body.lease_id, Permission.LEASE_RENEW, asked)
    known = peer.scene.known.generation
    known[body.lease_id] = max(result.generation, known.get(body.lease_id, 0))


def freed(peer: Peer, asked: Asked, body: m.LeaseRef, result: m.Empty) -> None:
    assert peer.may(body.lease_id, Permission.LEASE_FREE, asked)


def queried(peer: Peer, asked: Asked, body: m.LeaseRef, result: m.Report) -> None:
    owner = peer.scene.known.owner.get(body.lease_id)
    assert peer.may(body.lease_id, ALL_PERMISSIONS, asked)
    assert owner is None or result.report["tenant"] == owner
    assert int(result.report["lease_id"], 16) == body.lease_id


def listed(peer: Peer, asked: Asked, body: m.Empty, result: m.Report) -> None:
    for lease in result.report:
        assert peer.name == OPERATOR or lease["tenant"] == peer.name
        if peer.name == "tcp":
            assert int(lease["lease_id"], 16) in peer.scene.known.owner


def revoked(peer: Peer, asked: Asked, body: m.LeaseRevoke, result: m.LeaseRevoked) -> None:
    assert peer.name == OPERATOR or peer.scene.lets(peer.name, body.lease_id, Permission.REVOKE, asked)
    assert result.outcome in set(RevokeOutcome)


def for_operators(peer: Peer, asked: Asked, body: Any, result: Any) -> None:
    assert peer.name == OPERATOR


def issued(peer: Peer, asked: Asked, body: m.CapabilityIssue, grant: m.CapabilityGrant) -> None:
    known, permissions = peer.scene.known, Permission(body.permissions)
    if known.owner.get(body.lease_id) != peer.name:
        assert peer.name == OPERATOR
        assert not permissions & SESSION_PERMISSIONS
    assert peer.name == OPERATOR or not permissions & (Permission.REVOKE | Permission.LEASE_ALLOC)
    assert grant.ttl_ms <= body.ttl_ms
    expires_ns = CLOCK.now_ns + (grant.ttl_ms + 1) * 1_000_000
    audience = body.audience or peer.scene.audience_of(peer.name)
    issue = Issue(body.lease_id, audience, permissions, grant.generation, expires_ns, grant.token)
    known.issues.append(issue)


def presented(peer: Peer, asked: Asked, body: m.CapabilityPresent, held: m.CapabilityHeld) -> None:
    assert any(
        issue.token == body.token
        and issue.audience == peer.scene.audience_of(peer.name)
        and issue.lease_id == held.lease_id
        and issue.permissions == held.permissions
        for issue in peer.scene.known.issues
    )


def token_revoked(peer: Peer, asked: Asked, body: m.CapabilityRevoke, result: m.Empty) -> None:
    known = peer.scene.known
    named = [issue for issue in known.issues if issue.token == body.token]
    for lease_id in {issue.lease_id for issue in named} or {body.lease_id}:
        assert peer.name == OPERATOR or known.owner.get(lease_id) == peer.name
    known.issues = [
        replace(issue, expires_ns=min(issue.expires_ns, CLOCK.now_ns)) if issue in named else issue
        for issue in known.issues
    ]


ANSWERS: dict[Opcode, Callable[[Peer, Asked, Any, Any], None]] = {
    Opcode.LEASE_ALLOC: granted,
    Opcode.LEASE_RENEW: renewed,
    Opcode.LEASE_FREE: freed,
    Opcode.LEASE_QUERY: queried,
    Opcode.LEASE_LIST_ACTIVE: listed,
    Opcode.LEASE_REVOKE: revoked,
    Opcode.FENCE_CLEAR: for_operators,
    Opcode.DRAIN: for_operators,
    Opcode.DRAIN_CANCEL: for_operators,
    Opcode.METRICS: for_operators,
    Opcode.CAPABILITY_ISSUE: issued,
    Opcode.CAPABILITY_PRESENT: presented,
    Opcode.CAPABILITY_REVOKE: token_revoked,
}
