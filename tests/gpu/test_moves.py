"""Sessions move between two real cards, also during work: nothing is lost. Measures how long their tenants wait."""

import asyncio
import contextlib
import json
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Final, Self

import pytest
from click.testing import CliRunner

from gpulease.client import Buffer, Busy, GpuLease, GpuSession, KernelArgs, Region, Unsupported
from gpulease.client.cli.__main__ import main
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.address import ADDRESS_VARIABLE
from gpulease.protocol.messages import LeaseMove, MovedSession
from helpers.card_daemon import daemon_on
from helpers.daemon import Daemon
from helpers.decode.card_moves import outputs_alone, outputs_around_moves
from helpers.nvml import SLACK_BYTES, Cards
from helpers.pointers import POINTERS, count_args

pytestmark = pytest.mark.gpu

MIB, GIB = 1 << 20, 1 << 30
CONFIG = """
warm_contexts = {warm_contexts}
[limits]
park_memory = "48GiB"
overcommit = 4.0
park_stay_ms = 0
"""
PREPARED_S: Final = 6.0
"""Seconds of idle time in which a worker prepares the host memory for 16 GiB."""

STEP_BYTES: Final = 49 * MIB + 4096
"""Distance between nodes in a buffer. Several nodes in each step of a copy would show no more faults."""

PASSING = ("has sent a request", "returning", "is being opened or ended")


@pytest.fixture(autouse=True)
def _two_cards(cards: Cards) -> None:
    if len(cards.uuids()) < 2:
        pytest.skip("a move needs two cards")


@contextlib.contextmanager
def two_card_node(cards: Cards, warm_contexts: int = 0, *, direct_moves: bool = True) -> Iterator[Daemon]:
    config = CONFIG.format(warm_contexts=warm_contexts) + f"direct_moves = {str(direct_moves).lower()}\n"
    with daemon_on(cards, vram=("40GiB",), config=config) as daemon:
        yield daemon


def lease_of(node: Daemon, size_bytes: int) -> GpuLease:
    return node.builder(size_bytes).device(0).lease_secs(300).timeout(30).parkable().acquire()


def move(node: Daemon, lease: GpuLease, device: str) -> MovedSession:
    until = time.monotonic() + 30
    while True:
        try:
            moved: MovedSession = ask(Opcode.LEASE_MOVE, LeaseMove(lease.lease_id, device), node.address)
        except (Busy, Unsupported) as error:
            if time.monotonic() > until or not any(words in str(error) for words in PASSING):
                raise
            time.sleep(0.005)
        else:
            return moved


class Tenant:
    """A program that works in its session until the end of the block: kernels follow a ring of addresses, and count.

    Attributes:
        longest_s: Duration of its longest operation in seconds.
        rounds: Number of rounds of work.

    Args:
        places: The buffers or regions with the ring's nodes.
    """

    def __init__(self, session: GpuSession, places: Sequence[Buffer | Region]) -> None:
        self._session = session
        self._module, self._counted = session.module_load(POINTERS), session.mem_alloc(8)
        nodes = [(place, at) for place in places for at in range(0, place.size_bytes - 16, STEP_BYTES)]
        self._nodes = nodes
        for (here, at), (there, then) in zip(nodes, nodes[1:] + nodes[:1], strict=True):
            session.mem_write(here, at, struct.pack("<QQ", there.handle + then, 0))
        self._first = KernelArgs().push_u64(nodes[0][0].handle + nodes[0][1]).push_u32(len(nodes))
        regions = [place for place in places if isinstance(place, Region)]
        self._regions = session.region_set(regions) if regions else None
        session.sync()
        self.longest_s, self.rounds = 0.0, 0
        self._is_over = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work)

    def _work(self) -> None:
        session = self._session
        try:
            while not self._is_over.is_set():
                began = time.monotonic()
                session.launch(self._module, "chase", [1], [1], self._first, regions=self._regions)
                session.launch(self._module, "count", [1], [1], count_args(self._counted))
                session.sync()
                self.longest_s = max(self.longest_s, time.monotonic() - began)
                self.rounds += 1
        except BaseException as error:
            self._error = error

    def take_longest_s(self) -> float:
        longest_s, self.longest_s = self.longest_s, 0.0
        return longest_s

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_over.set()
        self._thread.join()
        if error is not None:
            return
        if self._error is not None:
            raise self._error
        assert self.rounds
        for place, offset in self._nodes:
            assert struct.unpack("<Q", self._session.mem_read(place, offset + 8, 8)) == (self.rounds,)
        assert struct.unpack("<Q", self._session.mem_read(self._counted, 0, 8)) == (5 + self.rounds,)


def show(what: str, moved: MovedSession, longest_s: float) -> None:
    took_s, gib = moved.took_us / 1e6, moved.moved_bytes / GIB
    print(f"{what}: {gib:.2f} GiB in {took_s:.3f} s, {gib / took_s:.1f} GiB/s; longest round {longest_s:.3f} s")


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize(("gib", "warm_contexts"), [(1, 0), (16, 0), (16, 1)])
def test_a_session_at_work_moves_back_and_forth(cards: Cards, gib: int, warm_contexts: int, is_direct: bool) -> None:
    with (
        two_card_node(cards, warm_contexts, direct_moves=is_direct) as node,
        lease_of(node, gib * GIB + 128 * MIB) as lease,
        GpuSession(lease) as session,
    ):
        buffer = session.mem_alloc(gib * GIB)
        tenant = Tenant(session, [buffer])
        time.sleep(PREPARED_S * gib / 16)
        before = cards.used_bytes()
        with tenant:
            for turn in range(4):
                card = 1 - turn % 2
                moved = move(node, lease, str(card))
                assert moved.card_uuid == cards.uuids()[card]
                time.sleep(0.5)
                last_move = node.query(lease.lease_id)["park"]["last_move"]
                way = "directly" if last_move["is_direct"] else f"through the host, as {last_move['reason']}"
                # Whether a direct move is possible depends on the cards.
                assert (
                    last_move["is_direct"] == is_direct
                    or last_move["reason"] == "the cards can't access each other's memory"
                )
                show(f"{gib} GiB, {way}, {warm_contexts} warm contexts", moved, tenant.take_longest_s())
                assert cards.used_bytes()[1 - card] < before[0] - gib * GIB + SLACK_BYTES + GIB


def test_an_idle_session_moves_into_prepared_memory(cards: Cards) -> None:
    with two_card_node(cards) as node, lease_of(node, 16 * GIB + 64 * MIB) as lease, GpuSession(lease) as session:
        buffer, module = session.mem_alloc(16 * GIB), session.module_load(POINTERS)
        session.mem_write(buffer, 16 * GIB - 16, struct.pack("<QQ", buffer.handle + 16 * GIB - 16, 0))
        session.sync()
        for turn in range(3):
            time.sleep(PREPARED_S)
            moved = move(node, lease, str(1 - turn % 2))
            began = time.monotonic()
            args = KernelArgs().push_u64(buffer.handle + 16 * GIB - 16).push_u32(10)
            session.launch(module, "chase", [1], [1], args)
            session.sync()
            show(f"16 GiB, idle, turn {turn}", moved, time.monotonic() - began)
            assert struct.unpack("<Q", session.mem_read(buffer, 16 * GIB - 8, 8)) == (10 * (turn + 1),)


def test_regions_move_with_their_session_at_work(cards: Cards) -> None:
    with two_card_node(cards) as node, lease_of(node, 3 * GIB) as lease, GpuSession(lease) as session:
        buffer, region, small = session.mem_alloc(GIB), lease.region(GIB), lease.region(2 * MIB)
        tenant = Tenant(session, [buffer, region, small])
        time.sleep(1.0)
        with tenant:
            for turn in range(4):
                moved = move(node, lease, str(1 - turn % 2))
                time.sleep(0.3)
                show(f"1 GiB and regions of 1 GiB and 2 MiB, turn {turn}", moved, tenant.take_longest_s())
        region.revoke("maintenance")
        assert bytes(session.mem_read(small, 16, 4)) == bytes(4)


def test_a_drained_card_is_emptied_while_its_programs_work(cards: Cards) -> None:
    with two_card_node(cards) as node, contextlib.ExitStack() as stack:
        tenants, leases = [], []
        for size in (4 * GIB, GIB, 256 * MIB):
            lease = stack.enter_context(lease_of(node, size + 64 * MIB))
            session = stack.enter_context(GpuSession(lease))
            tenants.append(Tenant(session, [session.mem_alloc(size)]))
            leases.append(lease)
        time.sleep(2.0)
        used = cards.used_bytes()
        with contextlib.ExitStack() as at_work:
            for tenant in tenants:
                at_work.enter_context(tenant)
            began = time.monotonic()
            done = CliRunner().invoke(
                main, ["drain", "--device", "0", "--move", "--json"], env={ADDRESS_VARIABLE: node.address}
            )
            took_s = time.monotonic() - began
            assert done.exit_code == 0, done.output
            # Each session has moved to one of the other cards.
            assert cards.uuids()[0] not in {one["card_uuid"] for one in json.loads(done.output)}
            time.sleep(0.3)
        longest = [f"{tenant.longest_s:.3f}" for tenant in tenants]
        print(f"drain --move: 4, 1 and 0.25 GiB in {took_s:.3f} s; longest rounds {', '.join(longest)} s")
        assert cards.used_bytes()[0] < used[0] - 5 * GIB
        assert all(node.query(lease.lease_id)["card_uuid"] != cards.uuids()[0] for lease in leases)


def test_a_decode_engine_moves_without_a_replay(cards: Cards) -> None:
    with two_card_node(cards) as node:
        alone = asyncio.run(outputs_alone(node, tokens=200))
        moves = asyncio.run(outputs_around_moves(node, cards.uuids()[:2], tokens=200))
    assert moves.outputs == alone
    assert not moves.rebinds
    figures = ", ".join(f"{took_s:.3f}" for took_s in moves.took_s)
    print(f"decode engine: moves {figures} s; longest step {moves.longest_s:.3f} s of {moves.median_s:.4f} s")
