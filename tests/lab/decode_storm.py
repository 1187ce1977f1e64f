"""Loads a decoder while its tenants' regions are constantly revoked, and checks all of its outputs and records.

    PYTHONPATH=.dev python -m tests.lab.decode_storm --minutes 10

Each output is compared with that of the same request before the storm. At the end, each request that ended must have
exactly one record in the daemon's audit log, and the log must be intact. Uses the running daemon, or a private one.
Exits with 1 if anything is wrong.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from gpulease.client.bench.decode_service import checkpoint_named
from gpulease.client.console.private_daemon import private_daemon, running_address
from gpulease.client.console.tables import table
from gpulease.client.decode import (
    TINY_MODEL,
    Checkpoint,
    Decoder,
    DecoderSettings,
    SamplingParameters,
    TenantConfig,
)
from gpulease.client.decode.decode_errors import CompletionReason
from gpulease.client.decode.decode_reports import DecoderObserver, FinishedRequest, RebindReport, StepReport
from gpulease.client.decode.row_records import PAGE
from gpulease.client.decode.supervisor.decode_audit import DecodeAudit, TokenDigest
from gpulease.client.errors import GpuLeaseError
from gpulease.protocol.json_text import indented_json

from .footprint import broker_pid, footprints_of, rss_kib
from .trend import trend_of

TENANTS: Final = ("ann", "bob", "cid", "dot")
KINDS: Final = ((5, 12, False), (17, 32, False), (40, 48, True), (64, 24, False))
"""Each tenant's requests: number of tokens of the prompt and of the output, and whether the caller cancels halfway."""

POSITIONS: Final = 96
"""Maximum number of positions of a sequence. The longest request fits."""

SEQUENCES: Final = 8
"""Default number of live sequences. Steps of over 16 rows need kernels that the embedded driver compiles slowly."""

REVOKE_EVERY_S: Final = 0.05

READINGS: Final = 40
"""Number of memory samples during the storm, so that each quarter has ten."""

PAUSE_S: Final = 0.1
"""Seconds between a failed request and the next one, because a decoder that has ended refuses all requests at once."""

GROWTH_KIB: Final = 4096.0
"""Largest growth of memory in the storm's second half. This detects a thousand rebinds that leak 4 KiB each."""

KIB: Final = 1024

# The limit on tombstones is low, so that their table is full before the second half starts.
_SETTINGS: Final = """\
audit = "{audit}"
[limits]
max_tombstones = 256
"""

RIGHT_ENDS: Final = frozenset({CompletionReason.MAX_TOKENS_REACHED, CompletionReason.END_OF_SEQUENCE})


@dataclass(frozen=True, slots=True)
class StormPlan:
    """The parameters of a storm.

    Attributes:
        checkpoint: The model.
        for_s: Duration of the storm in seconds.
        sequences: Number of live sequences of all tenants together.
        audit: The folder of the daemon's audit log; None: records are neither written nor checked.
    """

    checkpoint: Checkpoint
    for_s: float
    sequences: int
    audit: Path | None


@dataclass(frozen=True, slots=True)
class _Request:
    """A request that is sent repeatedly. The caller reads `wanted` of its `tokens` tokens, then cancels it."""

    tenant: str
    number: int
    prompt: tuple[int, ...]
    tokens: int
    wanted: int


class _ReportCounts(DecoderObserver):
    """Counts the decoder's reports.

    Attributes:
        tokens: Number of tokens, by tenant.
        replays: Number of replays after a loss.
        finished: Numbers of the requests that ended. A request's id ends with its number.
    """

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        self.replays = 0
        self.finished = array("L")

    def on_step(self, report: StepReport) -> None:
        for event in report.tokens:
            self.tokens[event.request.tenant_id] += 1

    def on_rebind(self, report: RebindReport) -> None:
        """Count a request that continued after a loss."""
        self.replays += 1

    def on_finished(self, report: FinishedRequest) -> None:
        """Record the number of the request that ended."""
        self.finished.append(int(report.request_id.rpartition("-")[2]))


class _Storm:
    """Requests, revocations and comparisons on one decoder."""

    def __init__(self, decoder: Decoder, reports: _ReportCounts, run: str) -> None:
        # Ids of requests begin with this run's name, because other runs may write to the same audit log.
        self.decoder, self.reports, self.run = decoder, reports, run
        self.outputs = self.wrong = self.revoked = 0
        self.errors: Counter[str] = Counter()
        self.requests = list(_requests(decoder.engine.forward.weights.config.vocabulary))
        self.expected: dict[_Request, list[int]] = {}
        self._numbers = 0

    async def compute_expected_outputs(self) -> None:
        """Compute each request's output while nothing is revoked."""
        # Outputs do not depend on other requests, so compute all of them together.
        found = await asyncio.gather(*(self._output(request, request.tokens) for request in self.requests))
        self.expected.update(zip(self.requests, found, strict=True))

    async def repeat(self, requests: Sequence[_Request], until: float) -> None:
        """Send requests one after another, and compare their outputs, until the monotonic time `until`."""
        for request in itertools.cycle(requests):
            if time.monotonic() >= until:
                return
            try:
                found = await self._output(request, request.wanted)
            # No error is expected, because callers do not notice that a revoked region is replaced.
            except GpuLeaseError as error:
                self.errors[f"{type(error).__name__}: {error}"] += 1
                await asyncio.sleep(PAUSE_S)
                continue
            self.outputs += 1
            # Compare the part that the caller has read.
            self.wrong += found != self.expected[request][: request.wanted]

    async def revoke(self, until: float) -> None:
        """Revoke regions at random, each only after its tenant got a token since the last revocation."""
        rng, at_loss = random.Random(1), Counter[str]()
        while time.monotonic() < until:
            await asyncio.sleep(REVOKE_EVERY_S)
            tenant = rng.choice(TENANTS)
            pool, tokens = self.decoder.regions.pools.get(tenant), self.reports.tokens[tenant]
            # Revoking a region before it was used would test nothing.
            if pool is not None and pool.region.is_alive and tokens > at_loss[tenant]:
                at_loss[tenant] = tokens
                await pool.region.revoke("bench")
                self.revoked += 1

    async def _output(self, request: _Request, wanted: int) -> list[int]:
        """Return the first `wanted` tokens of a request's output, then cancel the request."""
        # Use a new id each time, so that each has a separate record.
        self._numbers += 1
        generation = self.decoder.submit(
            request.prompt,
            max_tokens=request.tokens,
            tenant_id=request.tenant,
            sampling=SamplingParameters(temperature=0.8, seed=request.number),
            request_id=f"{self.run}-{request.number}-{self._numbers}",
        )
        found: list[int] = []
        try:
            async for emitted in generation:
                found.append(emitted.token)
                if len(found) == wanted:
                    break
        finally:
            # Cancel in any case. After the whole output this has no effect.
            generation.cancel()
        return found


def _requests(vocabulary: int) -> list[_Request]:
    # Every tenant has a request of each kind. All prompts differ.
    made = []
    for number, (tenant, (length, tokens, hangs_up)) in enumerate(
        (tenant, kind) for tenant in TENANTS for kind in KINDS
    ):
        rng = random.Random(number)
        prompt = tuple(rng.randrange(3, vocabulary) for _ in range(length))
        made.append(_Request(tenant, number, prompt, tokens, tokens // 2 if hangs_up else tokens))
    return made


async def run_storm(address: str, plan: StormPlan, say: Callable[[str], object]) -> dict[str, Any]:
    """Run a storm. Returns the report.

    Args:
        address: The daemon's address.
        plan: The storm.
        say: Receives a line about each phase.

    Raises the errors of `Decoder.open`, and Unsupported if the plan names an audit log and the daemon keeps none.
    """
    # Divide the live sequences between the tenants, with blocks for the longest requests.
    each = max(1, plan.sequences // len(TENANTS))
    blocks = each * -(-POSITIONS // PAGE)
    tenants = [TenantConfig(name, each, blocks, max_waiting=len(KINDS) + each) for name in TENANTS]
    rows = each * len(TENANTS)
    settings = DecoderSettings(2 * rows, rows, rows, POSITIONS, rebinds_at_once=1_000_000_000)
    # One observer counts the reports, the other writes audit records.
    reports = _ReportCounts()
    audit = await DecodeAudit.of(plan.checkpoint) if plan.audit is not None else None
    observers = [reports, *([audit] if audit is not None else [])]
    async with contextlib.AsyncExitStack() as stack:
        opened = Decoder.open(plan.checkpoint, tenants, settings, address=address, observers=observers)
        decoder = await stack.enter_async_context(opened)
        if audit is not None:
            await stack.enter_async_context(audit.writing(lambda: decoder.engine.lease))
        storm = _Storm(decoder, reports, f"storm-{os.urandom(4).hex()}")
        say("each request while nothing is revoked")
        # Step 1: compute the expected outputs. Step 2: run the storm. Step 3: when the decoder has written all records,
        # check the audit log.
        await storm.compute_expected_outputs()
        say(f"the storm, for {plan.for_s:g} s")
        memory = await _load_and_revoke(storm, each, plan.for_s, address)
    report = {
        "seconds": plan.for_s,
        "outputs": storm.outputs,
        "wrong": storm.wrong,
        "errors": dict(storm.errors),
        "tokens": reports.tokens.total(),
        "revoked": storm.revoked,
        "rebinds": decoder.rebinds,
        "replays": reports.replays,
        "memory": memory,
    }
    # After the decoder has closed, every record is written.
    if plan.audit is not None:
        say("the audit log")
        report["audit"] = await asyncio.to_thread(audited, plan.audit, storm.run, reports.finished, _digests(storm))
    return report


async def _load_and_revoke(storm: _Storm, each: int, for_s: float, address: str) -> dict[str, Any]:
    """Send requests and revoke regions for `for_s` seconds. Returns how the memory developed."""
    until = time.monotonic() + for_s
    # Each load of a tenant begins with a different request, so that all kinds run at the same time.
    loads = [
        storm.repeat(own[number % len(own) :] + own[: number % len(own)], until)
        for own in ([one for one in storm.requests if one.tenant == tenant] for tenant in TENANTS)
        for number in range(each)
    ]
    async with asyncio.TaskGroup() as tasks:
        for work in (*loads, storm.revoke(until)):
            tasks.create_task(work)
        return await _memory(address, for_s)


async def _memory(address: str, for_s: float) -> dict[str, Any]:
    """Sample the memory of the daemon's processes and of this one."""
    at_s: list[float] = []
    readings: list[dict[str, float]] = []
    began = time.monotonic()
    for number in range(READINGS):
        # Take the samples at even intervals, however long each takes.
        await asyncio.sleep(max(0.0, began + for_s * (number + 1) / READINGS - time.monotonic()))
        readings.append(await asyncio.to_thread(_memory_kib, address))
        at_s.append(time.monotonic() - began)
    return {name: memory_figures(at_s, [reading[name] for reading in readings]) for name in readings[0]}


def memory_figures(at_s: Sequence[float], kib: Sequence[float]) -> dict[str, float | bool]:
    """Return the means of the first and the last quarter, the second half's growth, and whether that is flat."""
    # By the second half, caches and tables are full.
    quarter, trend = max(1, len(kib) // 4), trend_of(at_s, kib, GROWTH_KIB)
    return {
        "first_quarter_mib": sum(kib[:quarter]) / quarter / KIB,
        "last_quarter_mib": sum(kib[-quarter:]) / quarter / KIB,
        "growth_mib": trend.growth / KIB,
        "is_flat": trend.is_flat,
    }


def _memory_kib(address: str) -> dict[str, float]:
    """Return the memory by process, in KiB. The daemon is left out if it is on another host, or another user's."""
    found = {"bench": float(rss_kib(os.getpid()))}
    with contextlib.suppress(ValueError, OSError):
        daemon = footprints_of(broker_pid(address))
        found |= {"broker": float(daemon.broker.rss_kib), "worker": daemon.worker_pss_kib * daemon.workers}
    return found


def _digests(storm: _Storm) -> dict[int, str]:
    return {request.number: TokenDigest.of(tokens).sha256 for request, tokens in storm.expected.items()}


def audited(folder: Path, run: str, finished: Sequence[int], digests: dict[int, str]) -> dict[str, Any]:
    """Compare the audit log with the requests that ended, and verify the log's chain.

    Args:
        folder: The log's folder.
        run: The beginning of the ids of this run's requests.
        finished: Numbers of the requests that ended.
        digests: SHA-256 of the expected output, by the request's number in `_requests`.

    Raises CalledProcessError if the log can't be read.
    """
    counts: Counter[int] = Counter()
    wrong = 0
    for line in _audit("show", "--json", "--kind", "note", str(folder)).splitlines():
        # A request's id is RUN-KIND-NUMBER.
        note = json.loads(line)["data"]["note"]
        run_and_kind, _, number = str(note.get("request", "")).rpartition("-")
        run_of_note, _, kind = run_and_kind.rpartition("-")
        # Other runs, and other decoders, may write to the same log.
        if run_of_note == run:
            counts[int(number)] += 1
            wrong += note["reason"] in RIGHT_ENDS and note["output"]["sha256"] != digests[int(kind)]
    # The chain of hashes shows whether any record was changed, removed or added.
    verdict = json.loads(_audit("verify", "--json", str(folder)))
    return {
        "finished": len(finished),
        "recorded": counts.total(),
        "missing": len(set(finished) - set(counts)),
        "twice_or_of_nothing": counts.total() - len(set(finished) & set(counts)),
        "other_outputs": wrong,
        "chain_records": verdict["records"],
        "chain_is_whole": verdict["whole"],
    }


def _audit(*words: str) -> str:
    """Run `gpulease audit`, and return its output."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "gpulease.client.cli", "audit", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    # Status 1 is not a failure: it means that the log is not intact, and the output says so, too.
    if done.returncode not in (0, 1):
        raise click.ClickException(f"the audit log can't be read: {done.stderr.strip()}")
    return done.stdout


def is_sound(report: dict[str, Any]) -> bool:
    """Return whether all outputs were right, nothing grew, and the audit log, if any, has each request exactly once."""
    # Without revocations and outputs nothing was tested, so both must have happened.
    audit = report.get("audit")
    return (
        not report["wrong"]
        and not report["errors"]
        and report["outputs"] > 0 < report["rebinds"]
        and all(figures["is_flat"] for figures in report["memory"].values())
        and (
            audit is None
            or (
                audit["chain_is_whole"]
                and not (audit["missing"] or audit["twice_or_of_nothing"] or audit["other_outputs"])
            )
        )
    )


def storm_table(report: dict[str, Any]) -> str:
    """Lay out the report as tables of counts, memory and the audit log, with the verdict as the last line."""
    counted = [[name, str(report[name])] for name in ("outputs", "wrong", "tokens", "revoked", "rebinds", "replays")]
    memory = [
        [
            name,
            f"{figures['first_quarter_mib']:.1f}",
            f"{figures['last_quarter_mib']:.1f}",
            f"{figures['growth_mib']:+.2f}",
            "flat" if figures["is_flat"] else "GROWS",
        ]
        for name, figures in report["memory"].items()
    ]
    parts = [
        table([f"a storm of {report['seconds']:g} s", ""], counted),
        *(f"{count} requests failed: {error}" for error, count in report["errors"].items()),
        table(["memory, MiB", "first quarter", "last quarter", "growth, 2nd half", ""], memory),
    ]
    if audit := report.get("audit"):
        rows = [[name.replace("_", " "), str(value)] for name, value in audit.items()]
        parts.append(table(["the audit log", ""], rows))
    else:
        parts.append("No audit log was named (--audit), so none was looked at.")
    return "\n\n".join([*parts, "sound" if is_sound(report) else "NOT SOUND"])


@click.command()
@click.option("--minutes", type=click.FloatRange(min=0.01), default=10.0, show_default=True, help="Of the storm.")
@click.option("--model", default=str(TINY_MODEL), help="Its path, or llama-1b: random weights of that shape.")
@click.option(
    "--sequences", type=click.IntRange(min=4), default=SEQUENCES, show_default=True, help="That are live at a time."
)
@click.option("--driver", default="auto", show_default=True, help="Of a private daemon.")
@click.option(
    "--audit",
    type=click.Path(path_type=Path, exists=True),
    help="Folder of the running daemon's audit log; without it no records are written. A private daemon keeps one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def main(minutes: float, model: str, sequences: int, driver: str, audit: Path | None, as_json: bool) -> None:
    """Revoke one tenant's region after the other, under load. Exits with 1 if one output or record is wrong."""
    report = measure_storm(checkpoint_named(model), minutes, sequences, driver, audit, partial(click.echo, err=True))
    click.echo(indented_json(report) if as_json else storm_table(report))
    sys.exit(0 if is_sound(report) else 1)


def measure_storm(
    checkpoint: Checkpoint,
    minutes: float,
    sequences: int,
    driver: str,
    audit: Path | None,
    say: Callable[[str], object],
) -> dict[str, Any]:
    """Return the report of a storm on the running daemon, or on a private one with an audit log.

    Raises the errors of `run_storm`, and MissingPrerequisite.
    """
    with contextlib.ExitStack() as stack:
        # A private daemon has its own audit log. That of a running daemon is given by its folder.
        address = running_address()
        if address is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpulease-")))
            audit = folder / "audit"
            address = stack.enter_context(private_daemon(driver, settings=_SETTINGS.format(audit=audit)))
        return asyncio.run(run_storm(address, StormPlan(checkpoint, minutes * 60, sequences, audit), say))


if __name__ == "__main__":
    main()
