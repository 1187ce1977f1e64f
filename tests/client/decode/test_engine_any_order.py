"""A decoder with engines that are lost, refused, replaced and blamed in any order, on a virtual clock.

The decoder is real, from `submit` to the rows of a step. Its engines are simulated: each token depends on the tokens
that a row really reads through its table and its region's memory, so a row on the wrong engine shows.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from gpulease.client.decode.checkpoint import RandomCheckpoint
from gpulease.client.decode.decode_errors import CompletionReason, NoModelLoaded, RequestBreaksEngine
from gpulease.client.decode.decode_requests import SamplingParameters, TenantConfig
from gpulease.client.decode.engine.engine import BlockPool
from gpulease.client.decode.engine.forward_pass import StepLimits
from gpulease.client.decode.row_records import NO_ROW, PAGE, RESULT, Results, Rows, StepGuidance
from gpulease.client.decode.scheduler.scheduler import ContinuousBatchScheduler, SchedulerSettings
from gpulease.client.decode.supervisor.decoder import Decoder
from gpulease.client.decode.supervisor.generation import Generation
from gpulease.client.decode.supervisor.serving_engine import EngineSpec, EngineUser, ServingEngine
from gpulease.client.decode.supervisor.tenant_regions import TenantRegions
from gpulease.client.errors import (
    CapacityExceeded,
    Disconnected,
    Drained,
    GpuLeaseError,
    GpuSessionFailed,
    RegionRevoked,
    Revoked,
)
from gpulease.protocol import Failure, Status
from helpers.decode.random_models import LIGHT
from helpers.virtual_time import VirtualTimeLoop

from .simulated_engine import STRAY, VOCABULARY, continuation, next_token

TENANTS = (TenantConfig("a", 2, 12), TenantConfig("b", 3, 12), TenantConfig("c", 1, 6))
LIMITS = StepLimits(max_rows=12, tables=5, positions=90)
SCHEDULER = SchedulerSettings(
    max_sequences=5,
    max_rows=12,
    prefill_rows=8,
    context=90,
    vocabulary=LIGHT.vocabulary,
    replay_wait_s=5.0,
    rebinds_at_once=3,
    rebind_interval_s=1.0,
)
SPEC = EngineSpec(RandomCheckpoint(LIGHT, 1), LIMITS, True, 1 << 30, TENANTS)

POISON_BITS = 20
"""Lowest bits of a seed: 1 + the position from which on the request ends the engine that computes it; 0: it is sound.
The other bits are the request's number, so that no two seeds are equal."""

STEP_S, CLOSE_S = 0.01, 0.3
LONG_ENOUGH_S = 2000.0
"""Seconds: longer than every wait, and than all engines together that poisoned requests may end."""


def killed() -> GpuLeaseError:
    return GpuSessionFailed("killed", "", Failure(Status.SESSION_FAILED, "", is_kill=True))


Loss = Callable[[], Exception]
LOSSES: list[Loss] = [
    lambda: Revoked("gone"),
    lambda: Disconnected("away"),
    lambda: GpuSessionFailed("a kernel failed"),
    killed,
    lambda: KeyError("a mistake"),
]


class World:
    """What the machine decides about engines, and what it knows of them.

    Attributes:
        engines: Every engine that was opened, in that order.
        refusals: What the next openings raise.
        open_s: How long an opening takes.
        computing: The place of the last engine that started a step.
        blamed: For each loss in a step, the seeds of the requests that had rows under way.
    """

    def __init__(self, scheduler: ContinuousBatchScheduler) -> None:
        self.scheduler = scheduler
        self.engines: list[SimulatedServing] = []
        self.refusals: list[Exception] = []
        self.open_s = 0.0
        self.blamed: list[set[int]] = []
        self.addresses = 1
        self.computing = 0

    async def open(self, spec: EngineSpec, user: EngineUser, *_: Any) -> "SimulatedServing":
        """Replace `ServingEngine.open`."""
        await asyncio.sleep(self.open_s)
        if self.refusals:
            raise self.refusals.pop()
        serving = SimulatedServing(self, user)
        for tenant in spec.tenants:
            await serving.regions.open(tenant)
        self.engines.append(serving)
        return serving

    @property
    def open_engines(self) -> int:
        return sum(engine.is_open for engine in self.engines)


class SimulatedServing:
    """A lease, its engine and its regions, with the interface of `ServingEngine` that the decoder uses."""

    max_steps = 2
    ranked = normed = None
    remaining_s = 1e9
    shares_clock = False
    is_of_fleet = True

    def __init__(self, world: World, user: EngineUser) -> None:
        self.world, self.is_open, self.is_hung = world, True, False
        self.engine = self.lease = self
        self.is_alive, self.revoked, self.address = True, False, "simulated"
        self.fault: Exception | None = None
        self.steps: list[tuple[Rows, set[int]]] = []
        self.last = np.zeros(0, RESULT)
        self.memory: dict[tuple[int, int, int], int] = {}
        self.tables: dict[tuple[int, int], int] = {}
        me = cast(ServingEngine, self)
        self.regions = TenantRegions(
            cast(Any, self),
            user.scheduler,
            user.log,
            lambda tenant, pool: user.region_opened(me, tenant, pool),
            lambda error: user.engine_failed(me, error),
            life_s=1e9,
        )

    # --- regions ---

    async def open_pool(self, blocks: int, *, tenant: str, ttl_secs: float) -> BlockPool:
        self.world.addresses += 1
        number = self.world.addresses
        region = SimpleNamespace(lease_id=number, address=number << 20, remaining_s=1e9, revoked=False)
        return BlockPool(cast(Any, region), blocks)

    async def save_pool(self, pool: BlockPool, _: object) -> None:
        """Refuse the copy: here only ended regions are copied, and so the decoder learns of their end."""
        raise refused(pool.region.lease_id)

    async def close_pool(self, pool: BlockPool) -> None:
        await asyncio.sleep(0)

    # --- steps ---

    async def start(
        self,
        rows: Rows,
        pools: Iterable[BlockPool],
        guidance: StepGuidance | None = None,
        prefixes: Sequence[tuple[int, Sequence[int]]] = (),
        *,
        chosen: "NDArray[np.intp] | None" = None,
        is_pooled: bool = False,
    ) -> int:
        assert self.is_open, "a step on an engine that was let go"
        # At most one engine computes: none starts a step once a later one has.
        number = self.world.engines.index(self)
        assert number >= self.world.computing
        self.world.computing = number
        await asyncio.sleep(0)
        regions = {int(pool.region.lease_id) for pool in pools}
        if revoked := [pool for pool in pools if pool.region.revoked]:
            raise refused(revoked[0].region.lease_id)
        # What a lost step writes makes no difference: its sequences begin again, in other regions.
        for table, blocks in prefixes:
            self.tables.update({(table, index): block for index, block in enumerate(blocks)})
        self.steps.append((rows.copy(), regions))
        return len(self.steps)

    async def finish(self) -> Results:
        await asyncio.sleep(STEP_S)
        if self.is_hung:
            await asyncio.Event().wait()
        rows, regions = self.steps[0]
        if error := self.fault or self._poisoned(rows):
            self.world.blamed.append({int(seed) for step, _ in self.steps for seed in step["seed"]})
            raise error
        for pool in self.regions.pools.values():
            if pool.region.revoked and pool.region.lease_id in regions:
                self.steps.clear()
                raise refused(pool.region.lease_id)
        self.steps.pop(0)
        self.last = self._compute(rows)
        return self.last.copy()

    def _poisoned(self, rows: Rows) -> Exception | None:
        first = (rows["seed"] % (1 << POISON_BITS)).astype(np.int64) - 1
        is_fatal = (first >= 0) & (rows["position"] >= first)
        return GpuSessionFailed("a kernel failed") if is_fatal.any() else None

    def _compute(self, rows: Rows) -> Results:
        results = np.ones(len(rows), RESULT)
        tokens = [
            int(row["token"]) if row["source"] == NO_ROW else int(self.last["token"][row["source"]]) for row in rows
        ]
        for row, token in zip(rows, tokens, strict=True):
            base, position = int(row["base"]), int(row["position"])
            self.tables[int(row["table"]), position // PAGE] = int(row["block"])
            self.memory[base, int(row["block"]), position % PAGE] = token
        for place, row in enumerate(rows):
            base, table = int(row["base"]), int(row["table"])
            read = [
                self.memory.get((base, self.tables.get((table, position // PAGE), NO_ROW), position % PAGE), STRAY)
                for position in range(int(row["position"]) + 1)
            ]
            results["token"][place] = next_token(read)
        return results

    # --- the end ---

    async def close(self) -> None:
        assert self.is_open, "closed twice"
        self.is_open = self.is_alive = False
        await self.regions.close()

    async def abandon(self) -> None:
        self.is_open = self.is_alive = False
        await asyncio.sleep(CLOSE_S)
        await self.regions.close()


def refused(lease_id: int) -> RegionRevoked:
    return RegionRevoked("gone", "", Failure(Status.REVOKED, "", region=lease_id))


class EnginesInAnyOrder(RuleBasedStateMachine):
    """State machine that draws the next event."""

    @initialize()
    def begin(self) -> None:
        self.loop = VirtualTimeLoop()
        self.scheduler = ContinuousBatchScheduler(SCHEDULER, TENANTS)
        self.world = World(self.scheduler)
        self.expected: dict[str, list[int]] = {}
        self.generations: list[Generation] = []
        self.moves: list[asyncio.Task[None]] = []
        self.patch = patch.object(ServingEngine, "open", self.world.open)
        self.patch.start()
        self.decoder = Decoder(SPEC, self.scheduler, None, clock=self.loop.time)
        self.context = self.decoder._serve()
        self.do(self.context.__aenter__)

    def do(self, work: Callable[[], Any]) -> Any:
        """Run work in the loop, asynchronous or not."""

        async def part() -> Any:
            result = work()
            return await result if asyncio.iscoroutine(result) else result

        return self.loop.run_until_complete(part())

    @property
    def engine(self) -> SimulatedServing:
        return cast(SimulatedServing, self.decoder._supervisor.serving)

    # --- callers ---

    @rule(
        tenant=st.sampled_from("aabbbc"),
        prompt=st.integers(1, 30),
        tokens=st.integers(1, 40),
        first=st.integers(1, 20),
        wait_s=st.sampled_from([0.5, 20.0, 400.0]),
        poison=st.sampled_from([None, None, None, 0, 8, 33]),
    )
    def submit(self, tenant: str, prompt: int, tokens: int, first: int, wait_s: float, poison: int | None) -> None:
        number = len(self.generations) + 1
        given = [(first + place) % VOCABULARY for place in range(prompt)]
        sampling = SamplingParameters(seed=(number << POISON_BITS) + (0 if poison is None else 1 + poison))
        generation = self.do(
            lambda: self.decoder.submit(
                given, max_tokens=tokens, tenant_id=tenant, sampling=sampling, wait_s=wait_s, request_id=f"r{number}"
            )
        )
        self.expected[generation.request_id] = continuation(given, tokens, frozenset())
        self.generations.append(generation)

    @precondition(lambda self: self.generations)
    @rule(place=st.integers(0, 99))
    def cancel(self, place: int) -> None:
        self.do(self.generations[place % len(self.generations)].cancel)

    @rule(seconds=st.sampled_from([0.0, 0.005, 0.02, 0.1, 0.5, 3.0, 70.0]))
    def wait(self, seconds: float) -> None:
        self.do(lambda: asyncio.sleep(seconds))

    # --- engines ---

    @rule(loss=st.sampled_from(LOSSES))
    def lose_in_a_step(self, loss: Loss) -> None:
        self.engine.fault = loss()

    @rule(loss=st.sampled_from(LOSSES[:3]), hangs=st.booleans())
    def report_loss(self, loss: Loss, hangs: bool) -> None:
        self.engine.is_hung |= hangs
        self.do(lambda: self.decoder._supervisor.engine_failed(cast(ServingEngine, self.engine), loss()))

    @rule(warning=st.sampled_from([Drained("soon"), Disconnected("away")]))
    def warn(self, warning: GpuLeaseError) -> None:
        self.do(lambda: self.decoder._supervisor.lease_warned(cast(ServingEngine, self.engine), warning))

    @rule()
    def lose_an_earlier_engine_again(self) -> None:
        """Reports about an engine that is no longer used change nothing."""

        def report_late() -> None:
            supervisor = self.decoder._supervisor
            phase, current = supervisor.life.phase, self.engine
            for engine in self.world.engines:
                if engine is not current:
                    supervisor.engine_failed(cast(ServingEngine, engine), Revoked("late"))
            assert supervisor.life.phase is phase

        self.do(report_late)

    @rule(count=st.integers(1, 4), error=st.sampled_from([CapacityExceeded("full"), Disconnected("away"), OSError()]))
    def refuse_engines(self, count: int, error: Exception) -> None:
        self.world.refusals = [error] * count

    @rule(seconds=st.sampled_from([0.0, 0.015, 1.0]))
    def open_slowly(self, seconds: float) -> None:
        self.world.open_s = seconds

    @rule()
    def move(self) -> None:
        self.moves.append(self.loop.create_task(self.decoder.move()))
        self.do(lambda: asyncio.sleep(0))

    @precondition(lambda self: any(not task.done() for task in self.moves))
    @rule()
    def give_up_a_move(self) -> None:
        next(task for task in self.moves if not task.done()).cancel()
        self.do(lambda: asyncio.sleep(0))

    @rule(tenant=st.sampled_from("abc"))
    def revoke_a_region(self, tenant: str) -> None:
        if pool := self.engine.regions.pools.get(tenant):
            cast(Any, pool.region).revoked = True

    # --- what holds at any time, and in the end ---

    @invariant()
    def no_token_is_lost_or_doubled(self) -> None:
        for generation in self.generations:
            expected = self.expected[generation.request_id]
            assert generation.tokens == expected[: len(generation.tokens)]
            if generation.reason is CompletionReason.MAX_TOKENS_REACHED:
                assert generation.tokens == expected

    @invariant()
    def only_those_who_were_computed_alone_are_given_up(self) -> None:
        for generation in self.generations:
            if isinstance(generation.error, RequestBreaksEngine):
                assert {generation.request.sampling.seed} in self.world.blamed

    @invariant()
    def at_most_one_engine_waits_beside_the_current_one(self) -> None:
        assert self.world.open_engines <= 2
        assert self.decoder._supervisor.life.failure is None

    def teardown(self) -> None:
        if not hasattr(self, "context"):
            return
        try:
            self.everything_ends()
        finally:
            self.patch.stop()
            self.loop.close()

    def everything_ends(self) -> None:
        # Every request is answered once engines can be opened again.
        self.world.refusals.clear()
        self.do(lambda: asyncio.sleep(LONG_ENOUGH_S))
        if self.engine.is_hung or self.engine.fault:
            self.report_loss(LOSSES[0], False)
            self.do(lambda: asyncio.sleep(LONG_ENOUGH_S))
        self.no_token_is_lost_or_doubled()
        assert [generation.request_id for generation in self.generations if generation.reason is None] == []
        assert all(task.done() for task in self.moves)
        assert self.decoder.is_serving
        assert self.world.open_engines == 1
        # Every tenant is served again.
        place = len(self.generations)
        for tenant in TENANTS:
            self.submit(tenant.id, 5, 9, 1, 20.0, None)
        self.do(lambda: asyncio.sleep(30.0))
        self.no_token_is_lost_or_doubled()
        reasons = {generation.reason for generation in self.generations[place:]}
        assert reasons == {CompletionReason.MAX_TOKENS_REACHED}
        # The decoder's end answers what still runs, and nothing begins after it.
        running = self.do(lambda: self.decoder.submit([1, 2, 3], max_tokens=40, tenant_id="a"))
        self.do(lambda: self.context.__aexit__(None, None, None))
        assert running.reason is CompletionReason.ENGINE_ERROR
        closed = self.decoder._supervisor.life.phase
        self.decoder._supervisor.life.close(GpuLeaseError("again"))
        assert self.decoder._supervisor.life.phase is closed
        with pytest.raises(NoModelLoaded):
            self.decoder.submit([1], max_tokens=1, tenant_id="a")
        with pytest.raises(NoModelLoaded):
            self.do(self.decoder.move)
        assert self.world.open_engines == 0
        assert not asyncio.all_tasks(self.loop)
        for task in self.moves:
            with suppress(asyncio.CancelledError):
                task.exception()


TestEnginesInAnyOrder = EnginesInAnyOrder.TestCase
TestEnginesInAnyOrder.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
