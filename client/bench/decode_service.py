"""Times of a decoder that serves tenants while regions of some are revoked, compared with the engine alone.

    python -m gpulease.client.bench.decode_service [MODEL | SHAPE [SECONDS [SEQUENCES [FIGURE...]]]]

SECONDS is the time for each figure, SEQUENCES the maximum number of live sequences, 8 or more. Without a FIGURE, all
are measured: throughput, survivors, rebinds, shares. Uses the running daemon, or a private one. Prints one JSON object
per figure.
"""

import asyncio
import contextlib
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import Any, Final

import numpy as np

from gpulease.client.bench.decode_shapes import SHAPES
from gpulease.client.bench.figures import percentile, print_figures
from gpulease.client.console.private_daemon import private_daemon, running_address
from gpulease.client.decode import (
    Checkpoint,
    Decoder,
    DecoderSettings,
    RandomCheckpoint,
    SamplingParameters,
    TenantConfig,
    open_model,
)
from gpulease.client.decode.decode_reports import DecoderObserver, ForwardRevoked, RebindReport, StepReport
from gpulease.client.decode.row_records import NO_ROW, PAGE, ROW
from gpulease.client.decode.scheduler.tenant_state import LiveSequence

TENANTS: Final = 8
BATCHES: Final = (1, 8, 64, 256)
POSITIONS: Final = 1024
"""Number of positions of a sequence: enough for prompts, replays and the measured steps."""

TEMPERATURE: Final = 0.8
WARM_TOKENS: Final = 32
"""Number of tokens that each sequence emits before its steps are timed."""

LEAST_STEPS: Final = 8
"""Minimum number of steps that are timed, however slow they are."""

REVOKE_EVERY_S: Final = 1.0
PROMPT: Final = 512
"""Number of tokens in each prompt that is rebound."""


class DecoderTimes(DecoderObserver):
    """Figures from a decoder's reports, since `clear`.

    Attributes:
        gaps: Seconds between two tokens of a sequence, by tenant.
        tokens: Number of tokens, by tenant.
        rebinds: Seconds from a request's loss to its next token.
        flips: Seconds from the change of a region's word to the report.
        step_ends: Times of the ends of steps, in monotonic seconds.
    """

    def __init__(self) -> None:
        self.gaps: dict[str, list[float]] = defaultdict(list)
        self.tokens: Counter[str] = Counter()
        self.rebinds: list[float] = []
        self.flips: list[float] = []
        self.step_ends: list[float] = []
        self._last: dict[str, float] = {}

    def clear(self) -> None:
        """Forget all figures except the time of each sequence's last token: the gap to its next one still counts."""
        self.gaps.clear()
        self.tokens.clear()
        self.rebinds.clear()
        self.flips.clear()
        self.step_ends.clear()

    def on_step(self, report: StepReport) -> None:
        """Record the time between each token and the previous one of its sequence, by tenant."""
        now, last = time.monotonic(), self._last
        self.step_ends.append(now)
        for event in report.tokens:
            request = event.request
            # A request that continues after a loss has another id; its sequence is the same.
            name = request.continues or request.request_id
            self.tokens[request.tenant_id] += 1
            if name in last:
                self.gaps[request.tenant_id].append(now - last[name])
            last[name] = now

    def on_rebind(self, report: RebindReport) -> None:
        """Record the seconds from the loss to the next token."""
        self.rebinds.append(report.latency_s)

    def on_forward_revoked(self, report: ForwardRevoked) -> None:
        """Record the seconds from the change of the region's word to the report."""
        if report.flip_to_report_s is not None:
            self.flips.append(report.flip_to_report_s)


class _Service:
    """A decoder, and the load on it while it is measured."""

    def __init__(self, decoder: Decoder, times: DecoderTimes) -> None:
        self.decoder, self.times = decoder, times
        self._vocabulary = decoder.engine.forward.weights.config.vocabulary

    def prompt(self, seed: int, length: int) -> list[int]:
        rng = random.Random(seed)
        return [rng.randrange(3, self._vocabulary) for _ in range(length)]

    async def output(self, tenant: str, seed: int, length: int, tokens: int) -> list[int]:
        """Return the complete output of a request: its tokens."""
        sampling = SamplingParameters(temperature=TEMPERATURE, seed=seed)
        # The seed decides the output: the same request gives the same tokens.
        request = self.decoder.submit(self.prompt(seed, length), max_tokens=tokens, tenant_id=tenant, sampling=sampling)
        try:
            return [emitted.token async for emitted in request]
        finally:
            request.cancel()

    @contextlib.asynccontextmanager
    async def load(
        self, tenants: Sequence[str], per_tenant: int, length: int, tokens: int
    ) -> AsyncIterator[Counter[str]]:
        """Keep `per_tenant` requests live per tenant, and repeat each when it ends.

        Yields the number of outputs, and of those that differ from the first output of the same request.
        """
        outputs: dict[tuple[str, int], list[int]] = {}
        counts: Counter[str] = Counter(outputs=0, wrong_outputs=0)

        async def repeat(tenant: str, number: int) -> None:
            while True:
                output_tokens = await self.output(tenant, number, length, tokens)
                counts["outputs"] += 1
                # The same request must give the same output each time, even if regions were revoked in between.
                counts["wrong_outputs"] += outputs.setdefault((tenant, number), output_tokens) != output_tokens

        tasks = [asyncio.create_task(repeat(tenant, number)) for tenant in tenants for number in range(per_tenant)]
        try:
            yield counts
        finally:
            for task in tasks:
                task.cancel()
            # A task that ended in any other way than by its cancellation has failed.
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            counts["errors"] = sum(not isinstance(end, asyncio.CancelledError) for end in outcomes)

    def live(self) -> list[LiveSequence]:
        return [sequence for tenant in self.decoder.scheduler.tenants.values() for sequence in tenant.live.values()]

    async def revoke(self, tenant: str) -> bool:
        """Revoke a tenant's region; returns whether it had one."""
        # A tenant without a region has lost it moments ago.
        pool = self.decoder.regions.pools.get(tenant)
        if pool is None or not pool.region.is_alive:
            return False
        await pool.region.revoke("bench")
        return True


FIGURES: Final = ("throughput", "survivors", "rebinds", "shares")


@contextlib.asynccontextmanager
async def _serving(checkpoint: Checkpoint, address: str, max_batch: int) -> AsyncIterator[tuple[_Service, list[str]]]:
    """Open a decoder for TENANTS tenants with at most `max_batch` live sequences; yields it and the tenants' names."""
    names = [f"tenant-{number}" for number in range(TENANTS)]
    # Enough blocks for each tenant's share of the live sequences at full length.
    blocks = max_batch // TENANTS * POSITIONS // PAGE
    # One tenant has three times the weight of the others, for `shares`.
    weights = [1.0] * (TENANTS - 1) + [3.0]
    tenants = [
        TenantConfig(name, max_batch, blocks, weight, max_waiting=2 * max_batch)
        for name, weight in zip(names, weights, strict=True)
    ]
    # Allow so many rebinds at once that the limit never affects the measurement.
    prefill_rows = min(128, max_batch)
    settings = DecoderSettings(max_batch + prefill_rows, prefill_rows, max_batch, POSITIONS, rebinds_at_once=1_000_000)
    times = DecoderTimes()
    async with Decoder.open(checkpoint, tenants, settings, address=address, observers=[times]) as decoder:
        yield _Service(decoder, times), names


async def measure_throughput(
    checkpoint: Checkpoint, address: str, for_s: float, batches: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the figures of `throughput` for each batch, measured for `for_s` seconds each."""
    async with _serving(checkpoint, address, max(TENANTS, *batches)) as (service, names):
        return [await throughput(service, names, batch, for_s) for batch in batches]


async def measure(
    checkpoint: Checkpoint, address: str, for_s: float, max_batch: int, figure_names: Collection[str] = FIGURES
) -> None:
    """Print the named figures, measured for `for_s` seconds each, with at most `max_batch` live sequences."""
    async with _serving(checkpoint, address, max_batch) as (service, names):
        for batch in (batch for batch in BATCHES if batch <= max_batch and "throughput" in figure_names):
            print_figures(await throughput(service, names, batch, for_s / 4))
        if "survivors" in figure_names:
            print_figures(await survivors(service, names, for_s))
        if "rebinds" in figure_names:
            print_figures(await rebinds(service, names, for_s))
        if "shares" in figure_names:
            print_figures(await shares(service, (names[0], names[-1]), for_s))


async def throughput(service: _Service, names: Sequence[str], batch: int, for_s: float) -> dict[str, Any]:
    """Return tokens per second of `batch` sequences of all tenants, and of the engine alone in the same steps.

    The measurement takes `for_s` seconds and at least LEAST_STEPS steps. It stops early before a sequence ends, because
    all measured steps must have the same number of sequences.
    """
    length, tokens, step_ends = 16, POSITIONS - 32, service.times.step_ends
    # Divide the batch among the tenants; from a small batch, each of the first tenants gets one sequence.
    per_tenant = max(1, batch // len(names))
    async with service.load(names[: min(batch, len(names))], per_tenant, length, tokens):
        # Wait until each sequence has emitted some tokens: from then on every step has a row of each.
        await _until(lambda: service.decoder.scheduler.live_sequences == batch)
        await _until(lambda: min(sequence.length for sequence in service.live()) >= length + WARM_TOKENS)
        service.times.clear()
        first = [sequence.length for sequence in service.live()]
        deadline_s, max_steps = time.monotonic() + for_s, POSITIONS - 2 * WARM_TOKENS - max(first)
        await _until(
            lambda: (time.monotonic() >= deadline_s and len(step_ends) >= LEAST_STEPS) or len(step_ends) >= max_steps
        )
        rate = batch * _per_s(step_ends)
        steps = _ReplayedSteps(service, first, len(step_ends))
    await _until_idle(service)
    engine_alone = batch * _per_s(await steps.run())
    return {
        "figure": "throughput",
        "sequences": batch,
        "tokens_per_s": rate,
        "engine_alone": engine_alone,
        "ratio": rate / engine_alone,
    }


def _per_s(times: Sequence[float]) -> float:
    """Number of steps per second, from the times of their ends."""
    return (len(times) - 1) / (times[-1] - times[0])


class _ReplayedSteps:
    """Repeats steps that a decoder has computed, on its engine alone, without the scheduler.

    The rows have the live sequences' own block tables, blocks and positions, so that attention reads as much memory as
    under the decoder: rows that shared blocks would read them from the card's cache.

    Args:
        service: The decoder, whose live sequences have had a row in each of the steps.
        first: Each sequence's position in the first step.
        count: Number of steps.
    """

    def __init__(self, service: _Service, first: Sequence[int], count: int) -> None:
        self._engine, self._count, live = service.decoder.engine, count, service.live()
        self._pools = [service.decoder.regions.pools[sequence.tenant.config.id] for sequence in live]
        self._first = np.array(first)
        # Blocks before a sequence's window are free. Its rows name the region's first block instead.
        max_blocks = max(len(sequence.blocks) for sequence in live)
        self._blocks = np.array(
            [sequence.blocks + [0] * (max_blocks - len(sequence.blocks)) for sequence in live]
        ).clip(0)
        self._rows = rows = np.zeros(len(live), ROW)
        rows["top_p"], rows["inverse_temperature"] = 1, 1 / TEMPERATURE
        rows["table"] = [sequence.table for sequence in live]
        rows["base"] = [pool.region.address for pool in self._pools]
        rows["blocks"] = [pool.blocks for pool in self._pools]
        # The first step takes its tokens from the rows, each later step from the previous step.
        rows["source"], rows["token"] = NO_ROW, 5

    async def run(self) -> list[float]:
        """Compute the steps, two in progress, as under the decoder. Returns the times of their ends."""
        step_ends: list[float] = []
        for step in range(self._count):
            await self._start(step)
            if step:
                await self._engine.finish()
                step_ends.append(time.monotonic())
        await self._engine.finish()
        return step_ends

    async def _start(self, step: int) -> None:
        rows, position = self._rows, self._first + step
        rows["position"], rows["block"] = position, self._blocks[np.arange(len(rows)), position // PAGE]
        await self._engine.start(rows, self._pools)
        rows["source"] = np.arange(len(rows))


async def survivors(service: _Service, names: Sequence[str], for_s: float) -> dict[str, Any]:
    """Gaps between the other tenants' tokens, with and without a revocation of one tenant's region every second."""
    gaps: dict[str, list[float]] = {"quiet": [], "revoking": []}
    async with service.load(names, _sequences_per_tenant(service), 64, POSITIONS - 64) as counts:
        await asyncio.sleep(1)
        # Measure without and with revocations in turn, twice, so that a change of the host's speed affects both.
        for _ in range(2):
            for name, gaps_s in gaps.items():
                service.times.clear()
                deadline_s = time.monotonic() + for_s / 2
                while time.monotonic() < deadline_s:
                    await asyncio.sleep(REVOKE_EVERY_S)
                    if name == "revoking":
                        await service.revoke(names[0])
                # Only the gaps of the tenants that were not revoked count.
                for tenant in names[1:]:
                    gaps_s += service.times.gaps[tenant]
    await _until_idle(service)
    figures = {
        f"{name}_{label}_ms": percentile(gaps_s, part) * 1e3
        for name, gaps_s in gaps.items()
        for label, part in (("p50", 50), ("p99", 99), ("worst", 100))
    }
    # The ratio matters most, because it does not depend on the card's speed.
    ratio = figures["revoking_p99_ms"] / figures["quiet_p99_ms"]
    return {"figure": "survivors' inter-token"} | figures | {"p99_ratio": ratio} | counts


async def rebinds(service: _Service, names: Sequence[str], for_s: float) -> dict[str, Any]:
    """Return times of rebinds of a tenant with one sequence and a long prompt, while the other tenants decode."""
    service.times.clear()
    # A rebind computes the whole prompt again, so the first tenant's is long.
    async with (
        service.load(names[1:], _sequences_per_tenant(service), 64, POSITIONS - 64),
        service.load(names[:1], 1, PROMPT, 64),
    ):
        deadline_s = time.monotonic() + for_s
        while time.monotonic() < deadline_s:
            # Revoke at random times, so that revocations hit every phase of a step.
            await asyncio.sleep(random.uniform(0.1, 0.2))
            await service.revoke(names[0])
    await _until_idle(service)
    times = {"rebind_ms": service.times.rebinds, "flip_to_forward_revoked_ms": service.times.flips}
    return {"figure": "rebinds", "prompt": PROMPT, "count": len(times["rebind_ms"])} | {
        f"{name.removesuffix('_ms')}_p{part}_ms": percentile(values, part) * 1e3
        for name, values in times.items()
        if values
        for part in (50, 99)
    }


async def shares(service: _Service, names: Sequence[str], for_s: float) -> dict[str, Any]:
    """Tokens of prompts and outputs of two tenants with weights 1 and 3, both of which always have requests waiting."""
    settings = service.decoder.scheduler.settings
    # More requests than sequences, so that both tenants always have some waiting.
    async with service.load(names, settings.max_sequences + 16, 32, 32):
        await asyncio.sleep(1)
        before = [service.decoder.scheduler.tenants[name].counter for name in names]
        await asyncio.sleep(for_s)
        tenants = [service.decoder.scheduler.tenants[name] for name in names]
        # The scheduler's counter divides service by the weight: multiply by it to get tokens.
        served = [
            (tenant.counter - counter_before) * tenant.config.weight
            for tenant, counter_before in zip(tenants, before, strict=True)
        ]
    await _until_idle(service)
    return {"figure": "service of weights 1 : 3", "served": served, "ratio": served[1] / served[0]}


def _sequences_per_tenant(service: _Service) -> int:
    """Return the number of sequences per tenant if all tenants together have 64, or the maximum number if lower."""
    return max(1, min(64, service.decoder.scheduler.settings.max_sequences) // TENANTS)


async def _until_idle(service: _Service) -> None:
    """Wait until nothing is served, and every tenant has its region."""
    scheduler, decoder = service.decoder.scheduler, service.decoder
    # Wait for the requests, then for the regions, because revoked ones are opened again in the background.
    await _until(lambda: not (scheduler.live_sequences or scheduler.waiting_requests or decoder.engine.steps_under_way))
    await _until(lambda: len(decoder.regions.pools) == TENANTS)


async def _until(is_so: Callable[[], bool]) -> None:
    """Poll a condition every 10 ms: a decoder does not report that it is idle."""
    while not is_so():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def checkpoint_named(name: str) -> Checkpoint:
    """The model at a path, or random weights of a shape of `decode_shapes`. Raises ModelRejected."""
    return RandomCheckpoint(SHAPES[name], 1) if name in SHAPES else open_model(name)


def main(arguments: Sequence[str]) -> None:
    """Measure what the arguments select (see the module's docstring)."""
    # Missing arguments have defaults: the smallest shape, ten seconds, 256 sequences.
    chosen, for_s, max_batch = (*arguments[:3], *("two-layers", "10", "256")[len(arguments) :])
    names = arguments[3:] or FIGURES
    if unknown := set(names) - set(FIGURES):
        sys.exit(f"no such figure: {', '.join(sorted(unknown))}; there are {', '.join(FIGURES)}")
    checkpoint = checkpoint_named(chosen)
    with contextlib.ExitStack() as stack:
        address = running_address() or stack.enter_context(private_daemon("auto"))
        asyncio.run(measure(checkpoint, address, float(for_s), int(max_batch), names))


if __name__ == "__main__":
    main(sys.argv[1:])
