"""`gpulease verify`: the command and its tables. `client.verify` has the tests."""

import sys
from dataclasses import asdict
from typing import Any, Final

import click

from gpulease.client.console.tables import fitted, output_width
from gpulease.client.verify.matrix import FaultResult, MatrixReport, run_matrix
from gpulease.protocol.json_text import indented_json

EXIT_BREACH: Final = 1


@click.command()
@click.option(
    "--driver", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", help="The private daemon's driver."
)
@click.option("--only", metavar="TEXT", default="", help="Run only the checks whose names contain TEXT.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of progress and tables.")
def verify(driver: str, only: str, as_json: bool) -> None:
    """Try to violate every lease guarantee on this host's first card.

    Meanwhile a second tenant works on the card, and the command checks that this tenant is not affected.

    It starts a private daemon, which does not affect the leases of a running daemon, but uses the card's time. The exit
    status is 1 if any guarantee does not hold.
    """
    # Show progress on stderr after each fault, and print the report at the end.
    report = run_matrix(driver, only, _ignore if as_json else _show_progress)
    click.echo(_json(report) if as_json else _tables(report))
    sys.exit(EXIT_BREACH if report.breaches else 0)


def _show_progress(row: FaultResult) -> None:
    click.echo(f"{row.fault}: {row.breach or 'held'}", err=True)


def _ignore(row: FaultResult) -> None:
    pass


def _json(report: MatrixReport) -> str:
    scene = report.scene
    document = {
        "title": scene.title(),
        "driver": scene.driver,
        "card": scene.card_name,
        "faults": [asdict(row) for row in report.faults],
        "claims": [asdict(claim) for claim in report.claims],
        "breaches": report.breaches,
    }
    return indented_json(document)


def _tables(report: MatrixReport) -> str:
    head = [
        "fault",
        "error",
        "the lease",
        "neighbour",
        "p50 us",
        "baseline p50",
        "p99 us",
        "baseline p99",
        "memory returned",
        "within ms",
        "",
    ]
    parts, width = [report.scene.title()], output_width()
    if report.faults:
        # On a narrow terminal, leave out the baseline figures first, then the neighbour's others, then the time.
        droppable = ("baseline p99", "baseline p50", "p99 us", "p50 us", "within ms")
        parts.append(fitted(head, [_cells(row) for row in report.faults], width, droppable=droppable, texts=("fault",)))
    if report.claims:
        rows = [
            [claim.name, "BREACH" if claim.breach else "held", claim.breach or claim.found] for claim in report.claims
        ]
        parts.append(fitted(["promise", "", "what was found"], rows, width, is_text_last=True))
    return "\n\n".join(parts)


def _cells(row: FaultResult) -> list[Any]:
    # A fault without an outcome has a breach instead.
    error_text = row.told
    return [
        row.fault,
        error_text.error if error_text else "-",
        error_text.cause if error_text else "-",
        "error" if row.during.error else f"{row.during.rounds} rounds",
        f"{row.during.p50_us:.0f}",
        f"{row.quiet.p50_us:.0f}",
        f"{row.during.p99_us:.0f}",
        f"{row.quiet.p99_us:.0f}",
        "exactly" if row.more_mib <= 0 else f"but {row.more_mib} MiB",
        f"{error_text.reclaim_ms:.0f}" if error_text else "-",
        row.breach or "held",
    ]
