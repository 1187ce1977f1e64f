"""The broker's control operations: `daemon/broker` and `daemon/leases` behind it.

The invariant. Whatever several tenants, an operator and strangers over TCP request, in whatever order and at whatever
time:

- every request is answered exactly once, or its connection was closed; at the end no request waits, and nothing is kept
  of peers that left;
- the lease table's own rules hold after every step (`LeaseTable.validate`), and none of its effects fails;
- a tenant receives news of, and can renew, free, revoke, or attach to, only its own leases and those that a token
  permits: one that was issued to it, for that, for this generation, and that has not expired nor been revoked; a token
  opens one session, once;
- operators' operations are executed for operators only.
"""

import asyncio
import os
from collections.abc import Callable, Iterator

from gpulease.daemon.leases.events import PoolTimerFired, ShutdownRequested
from gpulease.daemon.record.metrics import families
from gpulease.protocol import Opcode
from gpulease.protocol import messages as m
from gpulease.protocol.capabilities import AttachOption, Permission
from gpulease.protocol.lease_options import EXCLUSIVITY
from gpulease.protocol.opcodes import GPU_RESOURCE_TYPE
from gpulease.protocol.primitives import LeaseParameter, Tlv

from .draws import Draws
from .tenants import CARDS, NAMES, Peer, Scene
from .vector_seeds import said_by
from .virtual import VirtualLoop, virtual_time

MAX_BYTES = 768
MAX_STEPS = 60
SETTLED_S = 40.0
"""Seconds. After twice that, everything has ended: the longest wait, spawn, lease, reclaim and linger in succession."""

DRAIN_S = 60.0


# --- requests ---


def alloc(scene: Scene, draws: Draws) -> m.LeaseAlloc:
    device = draws.pick((None, None, None, "0", "1", CARDS[0].uuid, "nope"))
    values = [bytes([draws.pick((0, 0, 1, 2, 3, 4, 255))])] * draws.pick((0, 1, 1, 1, 2))
    parameters = tuple(LeaseParameter(EXCLUSIVITY.tag, value) for value in values)
    kind = GPU_RESOURCE_TYPE if not draws.chance(16) else 6
    size, ttl_ms = draws.pick((100, 1, 300, 380, 700, 980, 0, 1 << 40)), draws.pick((1000, 8000, 100, 3000, 8001, 0))
    return m.LeaseAlloc(kind, size, ttl_ms, draws.pick((0, 0, 1000, 6000, 6001)), device, parameters)


def lease(scene: Scene, draws: Draws) -> int:
    way, leases = draws.byte(), scene.known.leases
    return leases[-1 - way % min(4, len(leases))] if way < 200 else leases[way % len(leases)]


def issue(scene: Scene, draws: Draws) -> m.CapabilityIssue:
    audience = scene.audience_of(draws.pick(NAMES)) if not draws.chance(8) else draws.sized(32)
    permissions = draws.pick(
        (int(Permission.LEASE_FREE), 0x38, 0x10, 0x3F, 0x7F, 0x02, 0x40, 0x80, 0x05, 0xFF, 0x100, 0)
    )
    ttl_ms, nonce = draws.pick((1000, 60_000, 300_000, 300_001, 0, 10)), draws.pick((0, 0, 0, 1, 2))
    return m.CapabilityIssue(lease(scene, draws), permissions, audience, ttl_ms, nonce)


def revoke_token(scene: Scene, draws: Draws) -> m.CapabilityRevoke:
    """Return a revocation by token, or by a nonce as in the requests for tokens."""
    if draws.chance(4):
        return m.CapabilityRevoke(lease(scene, draws), draws.pick((1, 2, 3, 0)), b"")
    return m.CapabilityRevoke(0, 0, token(scene, draws))


def token(scene: Scene, draws: Draws) -> bytes:
    """Return a token that was issued to some tenant, sometimes damaged."""
    way, issues = draws.byte(), scene.known.issues
    if not issues or way >= 250:
        return draws.sized(40)
    found = issues[-1 - way % min(4, len(issues))].token
    return found if way < 240 else found[: len(found) // 2] + draws.take(1) + found[len(found) // 2 + 1 :]


def open_region(scene: Scene, draws: Draws) -> m.RegionOpen:
    ttl_ms, owner = draws.pick((1000, 8000, 0, 9000)), draws.pick(("", "ann", "bob", "\x1b"))
    return m.RegionOpen(lease(scene, draws), draws.pick((1, 100, 0, 2 << 20)), ttl_ms, owner)


NOTES = (b'{"a":1}', b"{}", b"[1]", b"\xff")

Build = Callable[[Scene, Draws], m.Body]
REQUESTS: tuple[tuple[Opcode, Build], ...] = (
    (Opcode.LEASE_ALLOC, alloc),
    (Opcode.LEASE_FREE, lambda scene, draws: m.LeaseRef(lease(scene, draws))),
    (Opcode.LEASE_RENEW, lambda scene, draws: m.LeaseRenew(lease(scene, draws), draws.pick((1000, 8000, 0, 9000)))),
    (Opcode.CAPABILITY_ISSUE, issue),
    (Opcode.CAPABILITY_PRESENT, lambda scene, draws: m.CapabilityPresent(token(scene, draws))),
    (Opcode.LEASE_QUERY, lambda scene, draws: m.LeaseRef(lease(scene, draws))),
    (Opcode.LEASE_REVOKE, lambda scene, draws: m.LeaseRevoke(lease(scene, draws), "because")),
    (Opcode.LEASE_LIST_ACTIVE, lambda scene, draws: m.Empty()),
    (Opcode.FENCE_CLEAR, lambda scene, draws: m.FenceClear(draws.pick((None, "0", CARDS[1].uuid, "nope")))),
    (Opcode.GET_INVENTORY, lambda scene, draws: m.Empty()),
    (Opcode.CAPABILITY_AUDIENCE, lambda scene, draws: m.Empty()),
    (Opcode.PING, lambda scene, draws: m.Ping(draws.number(8))),
    (Opcode.LEASE_SUBSCRIBE, lambda scene, draws: m.LeaseSubscribe(lease(scene, draws))),
    (Opcode.LEASE_UNSUBSCRIBE, lambda scene, draws: m.LeaseUnsubscribe(draws.below(8))),
    (Opcode.DRAIN, lambda scene, draws: m.Drain(draws.pick((5000, 500, 0)))),
    (
        Opcode.CARD_DRAIN,
        lambda scene, draws: m.CardDrain(draws.pick(("0", "no card")), draws.pick((None, 5000, 500, 0))),
    ),
    (Opcode.DRAIN_CANCEL, lambda scene, draws: m.Empty()),
    (Opcode.METRICS, lambda scene, draws: m.Empty()),
    (Opcode.HEALTH, lambda scene, draws: m.Empty()),
    (Opcode.CAPABILITY_REVOKE, revoke_token),
    (Opcode.REGION_OPEN, open_region),
    (Opcode.REGION_CANCEL, lambda scene, draws: m.RegionCancel(lease(scene, draws), draws.below(3))),
    (Opcode.REGION_WATCH, lambda scene, draws: m.LeaseRef(lease(scene, draws))),
    (Opcode.PLACE, lambda scene, draws: m.Place(draws.number(8), 0, "", (), None, ())),
    (Opcode.FLEET_LIST, lambda scene, draws: m.Empty()),
    (Opcode.LEASE_NOTE, lambda scene, draws: m.LeaseNote(lease(scene, draws), draws.pick(NOTES))),
    (Opcode.LEASE_PARK, lambda scene, draws: m.LeaseRef(lease(scene, draws))),
    (Opcode.LEASE_MOVE, lambda scene, draws: m.LeaseMove(lease(scene, draws), draws.pick((None, "0", "no card")))),
    (Opcode.LEASE_RESIZE, lambda scene, draws: m.LeaseResize(lease(scene, draws), draws.pick((100, 200, 1, 0, 9000)))),
)


def check(data: bytes) -> None:
    loop = VirtualLoop()
    try:
        with virtual_time(loop):
            loop.run_until_complete(play(Draws(data), loop))
            assert not loop.wrong, loop.wrong[0]
    finally:
        loop.close()


async def play(draws: Draws, loop: VirtualLoop) -> None:
    scene = Scene(draws)
    scene.runtime.post(PoolTimerFired())
    try:
        for _ in range(MAX_STEPS):
            if draws.is_over:
                break
            await step(scene, draws)
            scene.table.validate()
            assert not loop.wrong, loop.wrong[0]
        await settle(scene)
    finally:
        await scene.runtime.stop()
        for fd in scene.places.values():
            os.close(fd)


async def step(scene: Scene, draws: Draws) -> None:
    match draws.below(12):
        case 0:
            await asyncio.sleep(draws.pick((0.01, 0.06, 0.5, 1.1, 3.0, 9.0)))
        case 1:
            await asyncio.sleep(0.2)
        case 2:
            await misbehave(peer_of(scene, draws), draws)
        case 3 | 4:
            attach(peer_of(scene, draws), draws)
        case _:
            peer = peer_of(scene, draws)
            op, build = draws.pick(REQUESTS)
            peer.ask(op, build(scene, draws))
    for peer in scene.peers:
        peer.pump()
    await asyncio.sleep(0)


def peer_of(scene: Scene, draws: Draws) -> Peer:
    """Return a tenant's latest connection, or a new one, which usually has completed HELLO."""
    way = draws.byte()
    name = NAMES[way % len(NAMES)]
    found = next((peer for peer in reversed(scene.peers) if peer.name == name and peer.is_open), None)
    if found is None or (way >= 240 and len(scene.peers) < 40):
        found = Peer(scene, name)
        scene.peers.append(found)
        if way % 16 != 15:
            found.ask(Opcode.HELLO, m.Hello(0, "fuzz", ()))
    return found


def attach(peer: Peer, draws: Draws) -> None:
    options = [Tlv(AttachOption.TOKEN, token(peer.scene, draws))] * draws.pick((0, 1, 1, 2))
    options += [Tlv(AttachOption.SECOND_TOKEN, token(peer.scene, draws))] * draws.pick((0, 0, 0, 1, 2))
    peer.ask(Opcode.ATTACH, m.Attach(tuple(options)), lease(peer.scene, draws))


async def misbehave(peer: Peer, draws: Draws) -> None:
    match draws.below(7):
        case 0:
            peer.wire.close()
        case 1:
            peer.is_raw = True
            peer.say(draws.sized(60))
        case 2:
            peer.is_raw = True
            peer.say(draws.pick(FRAMES))
        case 3:
            peer.unread = draws.pick((0, 100))
        case 4:
            peer.protocol.pause_writing()
        case 5:
            peer.protocol.resume_writing()
        case _:
            peer.protocol.eof_received()
            await asyncio.sleep(0)


async def settle(scene: Scene) -> None:
    """Let time pass until nothing more can happen, and then end everything."""
    for peer in scene.peers:
        peer.unread = 0
    for _ in range(2):
        for peer in scene.peers:
            peer.pump()
        await asyncio.sleep(SETTLED_S)
    scene.table.validate()
    for peer in scene.peers:
        assert not peer.is_open or peer.is_raw or not peer.asked, f"{peer.name} was never answered: {peer.asked}"
    assert not scene.runtime._pending._answers, "outcomes nobody will ever have"
    scene.runtime.post(ShutdownRequested())
    async with asyncio.timeout(DRAIN_S):
        await scene.runtime.drained()
    scene.table.validate()
    for card in scene.table.cards():
        assert card.held_bytes + card.warm_bytes == card.fenced_bytes
    tally = scene.runtime.metrics.counters
    assert scene.runtime.history.is_at_rest, "the history keeps something of who is gone"
    for pair, count in tally.counters[families.LEASES_ACQUIRED].items():
        assert tally.counters[families.LEASES_DROPPED][pair] == count, pair
    for peer in scene.peers:
        peer.wire.close()
    await asyncio.sleep(0.1)
    assert not scene.limiter._admitted


FRAMES = tuple(dict.fromkeys(said_by("client")))


def seeds() -> Iterator[bytes]:
    """Yield inputs with one lease and every request about it from every peer, and with every kind of misbehaviour."""
    request, everybody = 5, range(len(NAMES))
    got = bytes([1, 1, 1, 0, request, 0, 0, 0, 1, 0, 0, 0, 1, 0, 1, 1])
    for name in everybody:
        yield got + bytes([3, name, 0, 0, 0, 0])
        for number in range(len(REQUESTS)):
            yield got + bytes([request, name, number, 0, 0, 0, 1, 0, 1]) * 2
            yield (
                got
                + bytes([request, 0, 3, 0, name, 0, 1, 1, 0])
                + bytes([request, name, 4, 0, request, name, number, 0])
            )
        for permissions in range(12):
            yield got + bytes([request, 0, 3, name, 0, permissions, 1, 0, 0, 3, name, 0, 1, 0, 3, name, 0, 1, 0])
        for way in range(7):
            yield got + bytes([request, name, 0, 0, 0, 1, 0, 2, 2, 3, 2, name, way, 9, 1, 2, 3, 1]) * 2
    for number in range(len(FRAMES)):
        yield got + bytes([2, 255, 2, number, 1])
    yield got + bytes([request, 0, 0, 0, 1, 2, 3, 3, 0]) * 12
