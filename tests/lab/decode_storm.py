"""A decoder under load while its tenants' regions are revoked constantly, and a check of everything that it produces.

    PYTHONPATH=.dev python -m tests.lab.decode_storm --minutes 10

Each output is compared with that of the same request
before the storm. At the end, each request that ended must have exactly one record in the daemon's audit log, and the
log must be whole. Uses the running daemon, or a private one. Exits with 1 if anything is wrong.
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
"""Each tenant's requests: tokens of the prompt, tokens of the output, and whether the caller hangs up halfway."""

POSITIONS: Final = 96
"""Positions of a sequence: the longest request fits."""

SEQUENCES: Final = 8
"""Live sequences. Steps of more than 16 rows need kernels that the embedded driver compiles slowly."""

REVOKE_EVERY_S: Final = 0.05

READINGS: Final = 40
"""Samples of memory during the storm, so that each quarter has ten."""

PAUSE_S: Final = 0.1
"""Seconds until the next request after one that failed: a decoder that has ended refuses all of them at once."""

GROWTH_KIB: Final = 4096.0
"""Largest growth of memory during the storm's second half: a thousand rebinds that leak 4 KiB each are noticed."""

KIB: Final = 1024

# Few tombstones, so that their table is full before the second half starts.
_SETTINGS: Final = """\
audit = "{audit}"
[limits]
max_tombstones = 256
"""

RIGHT_ENDS: Final = frozenset({CompletionReason.MAX_TOKENS_REACHED, CompletionReason.END_OF_SEQUENCE})


@dataclass(frozen=True, slots=True)
class StormPlan:
    """The requested storm.

    Attributes:
        checkpoint: The model.
        for_s: Seconds of revocations.
        sequences: Number of live sequences, of all tenants.
        audit: The folder of the daemon's audit log; None: records are neither written nor checked.
    """

    checkpoint: Checkpoint
    for_s: float
    sequences: int
    audit: Path | None


@dataclass(frozen=True, slots=True)
class _Request:
    """A request that is sent repeatedly; the caller reads `wanted` tokens of its output, then hangs up."""

    tenant: str
    number: int
    prompt: tuple[int, ...]
    tokens: int
    wanted: int


class _Heard(DecoderObserver):
    """Counts of the decoder's reports.

    Attributes:
        tokens: Number of tokens, by tenant.
        replays: Number of requests that continued after a loss.
        finished: Numbers of the requests that ended, with which their ids end.
    """

    def __init__(self) -> None:
        # Counts since the storm's beginning.
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

    def __init__(self, decoder: Decoder, heard: _Heard, run: str) -> None:
        # A run's ids begin with a name of its own: other runs may write to the same audit log.
        self.decoder, self.heard, self.run = decoder, heard, run
        self.outputs = self.wrong = self.revoked = 0
        self.errors: Counter[str] = Counter()
        self.requests = list(_requests(decoder.engine.forward.weights.config.vocabulary))
        self.quiet: dict[_Request, list[int]] = {}
        self._numbers = 0

    async def hear_quiet_outputs(self) -> None:
        """Compute each request's output while nothing is revoked."""
        # All requests at once: quiet outputs depend on no other request.
        found = await asyncio.gather(*(self._output(request, request.tokens) for request in self.requests))
        self.quiet.update(zip(self.requests, found, strict=True))

    async def repeat(self, requests: Sequence[_Request], until: float) -> None:
        """Send requests one after the other, and compare their outputs, until that monotonic time."""
        for request in itertools.cycle(requests):
            if time.monotonic() >= until:
                return
            try:
                found = await self._output(request, request.wanted)
            # No error is expected: a revoked region is replaced without the caller's notice.
            except GpuLeaseError as error:
                self.errors[f"{type(error).__name__}: {error}"] += 1
                await asyncio.sleep(PAUSE_S)
                continue
            self.outputs += 1
            # Compare the part that was read: a caller that hung up has half of it.
            self.wrong += found != self.quiet[request][: request.wanted]

    async def revoke(self, until: float) -> None:
        """Revoke regions at random; a tenant's next one only after the tenant got another token."""
        rng, at_loss = random.Random(1), Counter[str]()
        while time.monotonic() < until:
            await asyncio.sleep(REVOKE_EVERY_S)
            tenant = rng.choice(TENANTS)
            pool, tokens = self.decoder.regions.pools.get(tenant), self.heard.tokens[tenant]
            # Only after another token: revoking a region again before it was used would test nothing.
            if pool is not None and pool.region.is_alive and tokens > at_loss[tenant]:
                at_loss[tenant] = tokens
                await pool.region.revoke("bench")
                self.revoked += 1

    async def _output(self, request: _Request, wanted: int) -> list[int]:
        """The first tokens of a request's output; then hangs up."""
        # Each try has another id, so that each has a record of its own.
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
            # Hang up in any case; after the whole output this changes nothing.
            generation.cancel()
        return found


def _requests(vocabulary: int) -> list[_Request]:
    # Every tenant has a request of each kind, with a prompt of its own.
    made = []
    for number, (tenant, (length, tokens, hangs_up)) in enumerate(
        (tenant, kind) for tenant in TENANTS for kind in KINDS
    ):
        rng = random.Random(number)
        prompt = tuple(rng.randrange(3, vocabulary) for _ in range(length))
        made.append(_Request(tenant, number, prompt, tokens, tokens // 2 if hangs_up else tokens))
    return made


async def run_storm(address: str, plan: StormPlan, say: Callable[[str], object]) -> dict[str, Any]:
    """Run a storm; returns the report.

    Args:
        address: The daemon's address.
        plan: The storm.
        say: Receives what happens next.

    Raises what `Decoder.open` raises, and Unsupported if the plan names an audit log and the daemon keeps none.
    """
    # As many live sequences for each tenant as fit, and blocks for the longest request of each.
    each = max(1, plan.sequences // len(TENANTS))
    blocks = each * -(-POSITIONS // PAGE)
    tenants = [TenantConfig(name, each, blocks, max_waiting=len(KINDS) + each) for name in TENANTS]
    rows = each * len(TENANTS)
    settings = DecoderSettings(2 * rows, rows, rows, POSITIONS, rebinds_at_once=1_000_000_000)
    # The observers see every report: one counts, the other writes the audit records.
    heard = _Heard()
    audit = await DecodeAudit.of(plan.checkpoint) if plan.audit is not None else None
    observers = [heard, *([audit] if audit is not None else [])]
    async with contextlib.AsyncExitStack() as stack:
        opened = Decoder.open(plan.checkpoint, tenants, settings, address=address, observers=observers)
        decoder = await stack.enter_async_context(opened)
        if audit is not None:
            await stack.enter_async_context(audit.writing(lambda: decoder.engine.lease))
        storm = _Storm(decoder, heard, f"storm-{os.urandom(4).hex()}")
        say("each request while nothing is revoked")
        # Step 1: the right outputs. Step 2: the storm. Step 3: the audit log, after the decoder has written everything.
        await storm.hear_quiet_outputs()
        say(f"the storm, for {plan.for_s:g} s")
        memory = await _load_and_revoke(storm, each, plan.for_s, address)
    report = {
        "seconds": plan.for_s,
        "outputs": storm.outputs,
        "wrong": storm.wrong,
        "errors": dict(storm.errors),
        "tokens": heard.tokens.total(),
        "revoked": storm.revoked,
        "rebinds": decoder.rebinds,
        "replays": heard.replays,
        "memory": memory,
    }
    # After the decoder has closed, every record is written.
    if plan.audit is not None:
        say("the audit log")
        report["audit"] = await asyncio.to_thread(audited, plan.audit, storm.run, heard.finished, _digests(storm))
    return report


async def _load_and_revoke(storm: _Storm, each: int, for_s: float, address: str) -> dict[str, Any]:
    """Load and revoke for some seconds; returns how the memory developed. The last requests run to their end."""
    until = time.monotonic() + for_s
    # Each load begins with another of its tenant's requests, so that all kinds run at once.
    loads = [
        storm.repeat(own[number % len(own) :] + own[: number % len(own)], until)
        for own in ([one for one in storm.requests if one.tenant == tenant] for tenant in TENANTS)
        for number in range(each)
    ]
    async with asyncio.TaskGroup() as tasks:
        for work in (*loads, storm.revoke(until)):
            # Memory is sampled while the others work; the group ends with the last of them.
            tasks.create_task(work)
        return await _memory(address, for_s)


async def _memory(address: str, for_s: float) -> dict[str, Any]:
    """Sample the memory of the daemon's processes and of this one."""
    at_s: list[float] = []
    readings: list[dict[str, float]] = []
    began = time.monotonic()
    for number in range(READINGS):
        # At even distances, however long a sample takes.
        await asyncio.sleep(max(0.0, began + for_s * (number + 1) / READINGS - time.monotonic()))
        readings.append(await asyncio.to_thread(_memory_kib, address))
        at_s.append(time.monotonic() - began)
    return {name: memory_figures(at_s, [reading[name] for reading in readings]) for name in readings[0]}


def memory_figures(at_s: Sequence[float], kib: Sequence[float]) -> dict[str, float | bool]:
    """Means of the first and the last quarter, the second half's growth, and whether that is flat."""
    # A line through the second half: caches and tables have filled by then.
    quarter, trend = max(1, len(kib) // 4), trend_of(at_s, kib, GROWTH_KIB)
    return {
        "first_quarter_mib": sum(kib[:quarter]) / quarter / KIB,
        "last_quarter_mib": sum(kib[-quarter:]) / quarter / KIB,
        "growth_mib": trend.growth / KIB,
        "is_flat": trend.is_flat,
    }


def _memory_kib(address: str) -> dict[str, float]:
    """Memory in KiB by process; only this one's if the daemon is on another host or another user's."""
    # This process always; the daemon's where this user may read them.
    found = {"bench": float(rss_kib(os.getpid()))}
    with contextlib.suppress(ValueError, OSError):
        daemon = footprints_of(broker_pid(address))
        found |= {"broker": float(daemon.broker.rss_kib), "worker": daemon.worker_pss_kib * daemon.workers}
    return found


def _digests(storm: _Storm) -> dict[int, str]:
    return {request.number: TokenDigest.of(tokens).sha256 for request, tokens in storm.quiet.items()}


def audited(folder: Path, run: str, finished: Sequence[int], digests: dict[int, str]) -> dict[str, Any]:
    """Compare the audit log with the requests that ended, and verify the log's chain.

    Args:
        folder: The log's folder.
        run: What the ids of this run's requests begin with.
        finished: Numbers of the requests that ended.
        digests: SHA-256 of the right output, by the kind of request.

    Raises CalledProcessError if the log can't be read.
    """
    counts: Counter[int] = Counter()
    wrong = 0
    # Every record of the kind that the decoder writes.
    for line in _audit("show", "--json", "--kind", "note", str(folder)).splitlines():
        # A request's id is RUN-KIND-NUMBER.
        note = json.loads(line)["data"]["note"]
        said, _, number = str(note.get("request", "")).rpartition("-")
        whose, _, kind = said.rpartition("-")
        # Other runs, and other decoders, may write to the same log.
        if whose == run:
            counts[int(number)] += 1
            wrong += note["reason"] in RIGHT_ENDS and note["output"]["sha256"] != digests[int(kind)]
    # The chain of hashes says whether any record was changed, removed or added.
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
    """Run `gpulease audit`; returns its output. Status 1 says that the log is not whole, which the output says too."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "gpulease.client.cli", "audit", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    # Status 1 is a verdict, not a failure.
    if done.returncode not in (0, 1):
        raise click.ClickException(f"the audit log can't be read: {done.stderr.strip()}")
    return done.stdout


def is_sound(report: dict[str, Any]) -> bool:
    """True if nothing was wrong, nothing grew, and the audit log, if one was given, has everything exactly once."""
    # Without revocations and outputs nothing was shown, so both must have happened.
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
    """The report of a storm on the running daemon, or on a private one with an audit log.

    Raises what `run_storm` raises, and MissingPrerequisite.
    """
    with contextlib.ExitStack() as stack:
        # A private daemon keeps the audit log that is checked; a running one must be given by its folder.
        address = running_address()
        if address is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpulease-")))
            audit = folder / "audit"
            address = stack.enter_context(private_daemon(driver, settings=_SETTINGS.format(audit=audit)))
        return asyncio.run(run_storm(address, StormPlan(checkpoint, minutes * 60, sequences, audit), say))


if __name__ == "__main__":
    main()
