"""`PYTHONPATH=.dev python -m tests.lab.load`: checks that a daemon does not grow under load, and times its replies.

For minutes, leases are acquired and ended on a private daemon, which keeps a journal and an audit log. At intervals all
leases rest, and the footprint of the daemon's processes is sampled. It must not grow by more than `BOUNDS`.
"""

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from gpulease.client.bench.figures import percentile
from gpulease.client.console.private_daemon import private_daemon
from gpulease.client.console.tables import table
from gpulease.client.console.transform import transform_ptx
from gpulease.protocol.json_text import indented_json

from .churn import SLICE_BYTES, Churn
from .footprint import Footprints, broker_pid, footprints_of
from .trend import Trend, trend_of

BOUNDS: Final = {
    "broker RSS, KiB": 2048.0,
    "broker fds": 2.0,
    "broker threads": 1.0,
    "zygote RSS, KiB": 2048.0,
    "zygote fds": 2.0,
    "zygote threads": 0.5,
    "workers": 0.5,
    "worker PSS, mean KiB": 512.0,
}
"""Largest rise of a line through the second half of the samples. This detects a leak of two KiB in each of a thousand
leases, and of a descriptor in one of five hundred leases."""

PLACES: Final = 2
"""The daemon has room for this many times the leases, because on a busy host many leases are still being proved free
while others start."""

THREADS: Final = 32
"""Number of threads for the client's blocking calls, so that no operator's request waits for another one's reply."""

LIFE_S: Final = 40.0
"""Mean life of a lease in seconds. With 200 leases, five start and five end per second."""

LOOKS: Final = 20
"""Number of samples of the daemon's processes."""

# The limit on tombstones is low, so that their table is full before the second half starts.
_SETTINGS: Final = """\
state = "{folder}/state"
audit = "{folder}/audit"
[limits]
max_tombstones = 256
max_leases_per_tenant = {leases}
"""


@click.command()
@click.option("--leases", type=click.IntRange(min=1), default=200, show_default=True, help="At a time.")
@click.option("--minutes", type=click.FloatRange(min=0.01), default=10.0, show_default=True, help="Of load.")
@click.option("--life", "life_s", type=float, default=LIFE_S, show_default=True, help="Seconds that a lease lives.")
@click.option("--looks", type=click.IntRange(min=3), default=LOOKS, show_default=True, help="At rest, in that time.")
@click.option("--address", default="", help="Of a daemon of this host that runs, instead of a private one.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def main(leases: int, minutes: float, life_s: float, looks: int, address: str, as_json: bool) -> None:
    """Keep so many leases busy, and exit with 1 if the daemon grows or errs."""
    report = measure(leases, minutes, life_s, looks, address, partial(click.echo, err=True))
    click.echo(indented_json(report) if as_json else tables(report))
    sys.exit(0 if report["is_flat"] and not report["surprises"] else 1)


def measure(
    leases: int, minutes: float, life_s: float, looks: int, address: str, say: Callable[[str], object]
) -> dict[str, Any]:
    """Run the load. Returns the report.

    Args:
        leases: Number of leases at the same time.
        minutes: Duration of the load.
        life_s: Mean life of a lease in seconds.
        looks: Number of samples.
        address: A daemon of this host; "" for a private one.
        say: Receives a line about each sample.

    Raises:
        MissingPrerequisite: The private daemon does not start.
        ValueError: The daemon is not on this host.
    """
    with contextlib.ExitStack() as stack:
        if not address:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpulease-")))
            settings = _SETTINGS.format(folder=folder, leases=PLACES * leases)
            vram = (str(PLACES * leases * SLICE_BYTES),)
            address = stack.enter_context(private_daemon("cpu", vram, settings=settings))
        churn = Churn(address, leases, life_s, transform_ptx())
        at_s, seen = asyncio.run(_looks(churn, broker_pid(address), minutes * 60, looks, say))
    # One series for each figure, and a trend for those with a bound.
    series = {name: [look.series()[name] for look in seen] for name in seen[0].series()}
    trends = {name: trend_of(at_s, series[name], bound) for name, bound in BOUNDS.items()}
    return {
        "leases": leases,
        "minutes": minutes,
        "ended": dict(churn.ended),
        "surprises": churn.surprises,
        "control_ms": {name: _figures(samples) for name, samples in churn.took_ms.items()},
        "at_s": at_s,
        "series": series,
        "trends": {name: _trend_fields(series[name], trend) for name, trend in trends.items()},
        "is_flat": all(trend.is_flat for trend in trends.values()),
    }


async def _looks(
    churn: Churn, broker: int, seconds: float, looks: int, say: Callable[[str], object]
) -> tuple[list[float], list[Footprints]]:
    at_s: list[float] = []
    seen: list[Footprints] = []
    # Operators' requests and searches for processes block, and must never wait for each other.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS))
    began = time.monotonic()
    async with churn.running():
        for look in range(looks):
            # Take the samples at even intervals.
            await asyncio.sleep(max(0.0, began + seconds * (look + 1) / looks - time.monotonic()))
            # Sample only at rest, because leases that are being granted or proved free would distort the figures.
            async with churn.at_rest():
                seen.append(await asyncio.to_thread(footprints_of, broker))
                at_s.append(round(time.monotonic() - began, 3))
            now = seen[-1]
            say(
                f"{at_s[-1]:7.1f} s  broker {now.broker.rss_kib} KiB {now.broker.fds} fds {now.broker.threads} threads"
                f"  zygote {now.zygote.rss_kib} KiB {now.zygote.fds} fds"
                f"  {now.workers} workers of {now.worker_pss_kib:.0f} KiB  {sum(churn.ended.values())} leases ended"
            )
    return at_s, seen


def tables(report: dict[str, Any]) -> str:
    """Return the report as tables of control operations and of trends, with the verdict as the last line."""
    control = [
        [name, str(figures["count"]), *(f"{figures[part]:.1f}" for part in ("p50", "p99", "max"))]
        for name, figures in report["control_ms"].items()
    ]
    trends = [
        [
            name,
            f"{trend['first']:.0f}",
            f"{trend['last']:.0f}",
            f"{trend['growth']:+.1f}",
            f"{trend['bound']:g}",
            trend["is"],
        ]
        for name, trend in report["trends"].items()
    ]
    # Show how many leases ended in each way, because all ways should have occurred.
    ended = ", ".join(f"{count} by {ending}" for ending, count in sorted(report["ended"].items()))
    return "\n\n".join(
        [
            f"{report['leases']} leases at a time for {report['minutes']:g} minutes; ended: {ended}",
            table(["control operation, ms", "count", "p50", "p99", "max"], control),
            table(["held at rest", "first", "last", "growth, 2nd half", "may be", ""], trends),
            *report["surprises"][:20],
            f"{len(report['surprises'])} surprises; {'flat' if report['is_flat'] else 'NOT FLAT'}",
        ]
    )


def _trend_fields(values: list[float], trend: Trend) -> dict[str, Any]:
    return {
        "first": values[0],
        "last": values[-1],
        "growth": round(trend.growth, 2),
        "bound": trend.bound,
        "is": "flat" if trend.is_flat else "GROWS",
    }


def _figures(samples: list[float]) -> dict[str, float]:
    # Include the maximum, because an operator notices a single slow reply.
    parts = {f"p{part}": round(percentile(samples, part), 3) for part in (50, 99)}
    return {"count": len(samples), **parts, "max": round(max(samples), 3)}


if __name__ == "__main__":
    main()
