"""`gpulease metrics` and `gpulease health`, for programs that monitor a node."""

import sys

import click

from gpulease.client.console.reports import Report, health_of, json_text
from gpulease.client.console.tables import MISSING, fitted, is_terminal, output_width, shown
from gpulease.client.sync.driver import ask
from gpulease.protocol import Opcode
from gpulease.protocol.messages import Empty


@click.command()
def metrics() -> None:
    """Print the node's metrics in Prometheus's format; for operators."""
    text = ask(Opcode.METRICS, Empty()).exposition
    if is_terminal():
        # Escape control characters, which a terminal would interpret. A program gets the daemon's text unchanged.
        text = "\n".join(map(shown, text.split("\n")))
    click.echo(text, nl=False)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def health(as_json: bool) -> None:
    """Show whether the daemon can grant leases. If it can't, show why; the exit status is then 1."""
    report = ask(Opcode.HEALTH, Empty()).report
    is_ready, checks = health_of(report)
    if as_json:
        click.echo(json_text(report))
    else:
        rows = [[check["check"], _word(check), check["detail"] or MISSING] for check in checks]
        click.echo(fitted(["check", "result", "what is wrong"], rows, output_width(), is_text_last=True))
    if not is_ready:
        sys.exit(1)


def _word(check: Report) -> str:
    """A check's result in one word. A check that passes may still warn the operator."""
    if not check["ok"]:
        return "FAILS"
    return "warning" if check["detail"] else "ok"
