"""`gpulease top`: the live view, a single frame as text, or one line of JSON per sample."""

import json
import time
from collections.abc import Mapping
from typing import Any, Final

import click

from gpulease.client.cli.top.frame import plain
from gpulease.client.cli.top.sample import LeaseLine, Sample, ScreenSamples, lease_lines, word
from gpulease.client.cli.top.sampling import Sampler
from gpulease.client.cli.top.view import MAX_EVERY_S, MIN_EVERY_S, View
from gpulease.client.console.exit_status import die_by_signal
from gpulease.client.console.number_range import NumberRange
from gpulease.client.console.tables import is_terminal, output_width
from gpulease.client.core.lease_request import address_of
from gpulease.client.errors import GpuLeaseError, Unsupported

EVERY_S: Final = 2.0
"""Seconds between two samples of the live view: short enough to show load, long enough to cost the broker little."""

ONCE_S: Final = 1.0
"""Seconds between the two samples from which a single frame computes its rates."""

PIPE_WIDTH: Final = 160
"""Width of a frame in cells if the output's width is unknown: enough for every column and for complete ids."""

_RATES: Final = ("launches_per_s", "copies_per_s", "operations_per_s", "gpu_share")


@click.command()
@click.option(
    "--every",
    "every_s",
    type=NumberRange(MIN_EVERY_S, MAX_EVERY_S),
    metavar="SECONDS",
    help="Seconds between two samples, over which rates are computed; by default"
    f" {EVERY_S:g}, or {ONCE_S:g} with --once.",
)
@click.option(
    "--once", is_flag=True, help="Print one frame as text. This is the default if the output is not a terminal."
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object per sample until interrupted; with --once, only one."
)
def top(every_s: float | None, once: bool, as_json: bool) -> None:
    """Watch cards and leases live, with owners, activity and remaining time. `?` lists the keys."""
    address = address_of(None)
    if as_json and not once:
        _stream(Sampler(address), every_s or EVERY_S)
    elif once or not is_terminal():
        # Rates need two samples.
        sampler = Sampler(address)
        before = sampler.take()
        time.sleep(every_s or ONCE_S)
        samples = ScreenSamples(sampler.take(), before)
        sampler.close()
        if as_json:
            click.echo(_json(samples))
        else:
            click.echo(plain(View(every_s or ONCE_S), samples, str(address), output_width() or PIPE_WIDTH))
    else:
        try:
            from gpulease.client.cli.top.screen import watch
        except ImportError as error:
            raise Unsupported(f"this Python has no curses: {error}", "Use --once or --json") from None
        # If the daemon does not answer at the start, report an error. If it is lost later, the view waits for it.
        first = Sampler(address)
        first.take()
        first.close()
        ended_by = watch(address, every_s or EVERY_S)
        if ended_by is not None:
            die_by_signal(ended_by)


def _stream(sampler: Sampler, every_s: float) -> None:
    before: Sample | None = None
    while True:
        try:
            sample = sampler.take()
        # Print a failure as a separate line, so that the gap is visible. At the start, it is an error.
        except GpuLeaseError as error:
            if before is None:
                raise
            click.echo(json.dumps({"error": str(error)}))
        else:
            click.echo(_json(ScreenSamples(sample, before)))
            before = sample
        time.sleep(every_s)


def _json(samples: ScreenSamples) -> str:
    sample = samples.sample
    assert sample is not None
    # Print the daemon's values, and add the rates, which need two samples.
    rates = {line.lease_id: line for line in lease_lines(sample, samples.before)}
    return json.dumps(
        {
            "interval_s": None if samples.before is None else round(sample.at_s - samples.before.at_s, 6),
            "drain_left_s": sample.drain_left_s,
            "cards": [_without(card, "sandbox") for card in sample.cards],
            "leases": [{**lease, **_rates(rates.get(word(lease, "lease_id") or ""))} for lease in sample.leases],
        }
    )


def _without(report: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in report.items() if name != key}


def _rates(line: LeaseLine | None) -> dict[str, float | None]:
    rates = {name: None if line is None else getattr(line, name) for name in _RATES}
    return {name: None if rate is None else round(rate, 3) for name, rate in rates.items()}
