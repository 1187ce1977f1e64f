"""`gpulease demo`: what leases guarantee to tenants, measured against a real daemon."""

import contextlib
import sys
from typing import Final

import click

from gpulease.client.cli.fleet_demo import run_fleet_demo
from gpulease.client.cli.live_lines import LiveLines
from gpulease.client.cli.tenants_demo import PRIVATE_VRAM, run_tenants_demo
from gpulease.client.console.exit_status import EXIT_FAILED
from gpulease.client.console.private_daemon import private_daemon, running_address
from gpulease.client.console.reports import first_card
from gpulease.client.console.tables import size_text
from gpulease.client.console.transform import transform_ptx
from gpulease.protocol.json_text import indented_json

_NEXT: Final = """
Next: `gpulease verify` breaks every rule on this host's card; `gpulease top` shows leases live; `gpulease demo --fleet`
kills one of three nodes. Ten lines of your own: README.md, "A tenant's ten lines"."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
@click.option(
    "--fleet",
    "of_fleet",
    is_flag=True,
    help="Show three daemons that share an etcd: one is killed, and another takes over its name.",
)
@click.option(
    "--driver",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    help="The private daemon's driver: cuda uses the host's card.",
)
def demo(as_json: bool, of_fleet: bool, driver: str) -> None:
    """Show three tenants on a card: the first computes, the second runs an endless kernel, the third gets its memory.

    Uses the running daemon; without one, starts a private one on the embedded driver, which needs no GPU. A fleet's
    daemons, and its etcd, are always private. Every figure is measured; the exit status is 1 if a claim does not hold.
    """
    # With --json nothing is printed until the end.
    lines = LiveLines(is_silent=as_json)
    if of_fleet:
        report = run_fleet_demo(transform_ptx(), lines.say)
        if as_json:
            click.echo(indented_json(report))
        return
    # A private daemon ends with this block, even if a claim fails.
    with contextlib.ExitStack() as stack:
        running = running_address()
        if running is None:
            place = "on the embedded driver (no GPU needed)" if driver == "cpu" else "on this host's card"
            lines.say(f"No daemon runs here: starting a private one {place}.")
        address = running or stack.enter_context(private_daemon(driver, (PRIVATE_VRAM[driver],)))
        card = first_card(address)
        lines.say(
            f"Card 0 of {address}: {card['name']}, {size_text(card['capacity_bytes'])} (driver {card['driver']})."
        )
        lines.say("ann, bob and carol are three leases of yours, each with a separate process and context.\n")
        report, claims = run_tenants_demo(address, lines, transform_ptx(), is_private=running is None)
    # Print the claims in the order in which they were tested. If any failed, so does the command.
    broken = [claim for claim in claims if not claim.holds]
    if as_json:
        click.echo(indented_json(report))
    for claim in claims:
        lines.say(f"{'held  ' if claim.holds else 'BROKEN'} {claim.claim}: {claim.found}")
    lines.say(_NEXT)
    if broken:
        sys.exit(EXIT_FAILED)
