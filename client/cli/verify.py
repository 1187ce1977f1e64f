"""`gpulease verify`: test on this host's card that leases keep their promises, faults included."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

import click

from gpulease.client.cli.private_daemon import private_daemon
from gpulease.client.cli.tables import fitted, output_width
from gpulease.client.verify.claims import (
    Claim,
    canary,
    check,
    host_buffers,
    launch_gate,
    six_and_no_seventh,
    submit_beside,
)
from gpulease.client.verify.faults import Fault, Sizes, faults
from gpulease.client.verify.matrix import Row, run_matrix
from gpulease.client.verify.neighbour import neighbour
from gpulease.client.verify.scene import Scene

EXIT_BREACH: Final = 1
GIB: Final = 1 << 30

SIX_SLICES_BYTES: Final = 7 * GIB
SIX_VRAM: Final = "48GiB"

WARM_CONTEXTS: Final = 4
"""Contexts kept beside the faults: traces in the driver last for as long as any context lives."""

QUIET_S: Final = 1.0
SMALL_QUIET_S: Final = 0.05

CARD_SIZES: Final = Sizes(launches=1_000_000, long_kernels=150)
HOST_SIZES: Final = Sizes(launches=20_000, long_kernels=4)
"""Smaller, because the embedded driver compiles slowly and is not made for launches."""


@click.command()
@click.option("--driver", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", help="Of the private daemon.")
@click.option("--only", metavar="TEXT", default="", help="Only rows whose name has this in it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")
def verify(driver: str, only: str, as_json: bool) -> None:
    """Break every rule on this host's first card, beside a neighbour who must not notice.

    Starts a private daemon, so leases of a daemon that runs are not touched, but the card is busy meanwhile. Ends with
    status 1 if anything that leases promise does not hold.
    """
    with private_daemon(driver, warm_contexts=WARM_CONTEXTS) as address:
        scene = Scene.at(address)
        rows = list(_matrix(scene, only, say=not as_json))
        claims = list(_claims(scene, only))
    if _fits_six(scene) and only in "six leases":
        with private_daemon(driver, (SIX_VRAM,)) as address:
            six = Scene.at(address)
            claims.append(check("six leases", lambda: six_and_no_seventh(six, SIX_SLICES_BYTES)))
    breaches = [row.breach for row in rows if row.breach] + [claim.breach for claim in claims if claim.breach]
    if as_json:
        report = {
            "title": scene.title(),
            "driver": scene.driver,
            "card": scene.card_name,
            "faults": [asdict(row) for row in rows],
            "claims": [asdict(claim) for claim in claims],
            "breaches": len(breaches),
        }
        click.echo(json.dumps(report, indent=2))
    else:
        click.echo(_tables(scene, rows, claims))
    sys.exit(EXIT_BREACH if breaches else 0)


def _matrix(scene: Scene, only: str, *, say: bool) -> Iterator[Row]:
    wanted: list[Fault] = [
        fault for fault in faults(scene, CARD_SIZES if scene.is_card else HOST_SIZES) if only in fault.name
    ]
    if not wanted:
        return
    with neighbour(scene.address) as beside:
        for row in run_matrix(scene, beside, wanted, QUIET_S if scene.is_card else SMALL_QUIET_S):
            if say:
                click.echo(f"{row.fault}: {row.breach or 'held'}", err=True)
            yield row


def _claims(scene: Scene, only: str) -> Iterator[Claim]:
    canary_bytes = min(40 * GIB, scene.vram_bytes // 2) if scene.is_card else 16 << 20
    if only in "no byte of an earlier lease":
        yield check("no byte of an earlier lease", lambda: canary(scene, canary_bytes))
    if only in "no byte of it in the host's buffers":
        yield check("no byte of it in the host's buffers", lambda: host_buffers(scene))
    if only in "launch gate":
        yield check("launch gate", lambda: launch_gate(scene, 10 if scene.is_card else 3))
    if only in "a submit beside its session":
        yield check("a submit beside its session", lambda: submit_beside(scene))


def _fits_six(scene: Scene) -> bool:
    return not scene.is_card or scene.vram_bytes >= 48 * GIB


def _tables(scene: Scene, rows: list[Row], claims: list[Claim]) -> str:
    head = [
        "fault",
        "told",
        "the lease",
        "neighbour",
        "p50 us",
        "quiet p50",
        "p99 us",
        "quiet p99",
        "memory back",
        "within ms",
        "",
    ]
    parts, width = [scene.title()], output_width()
    if rows:
        spared = ("quiet p99", "quiet p50", "p99 us", "p50 us", "within ms")
        parts.append(fitted(head, [_cells(row) for row in rows], width, spared=spared, texts=("fault",)))
    if claims:
        told = [[claim.name, "BREACH" if claim.breach else "held", claim.breach or claim.found] for claim in claims]
        parts.append(fitted(["promise", "", "what was found"], told, width, is_text_last=True))
    return "\n\n".join(parts)


def _cells(row: Row) -> list[Any]:
    told = row.told
    return [
        row.fault,
        told.error if told else "-",
        told.cause if told else "-",
        "error" if row.during.error else f"{row.during.rounds} rounds",
        f"{row.during.p50_us:.0f}",
        f"{row.quiet.p50_us:.0f}",
        f"{row.during.p99_us:.0f}",
        f"{row.quiet.p99_us:.0f}",
        "exactly" if row.more_mib <= 0 else f"but {row.more_mib} MiB",
        f"{told.reclaim_ms:.0f}" if told else "-",
        row.breach or "held",
    ]
