"""The lease core under load: ten thousand leases without their processes."""

import json
import subprocess
import sys
from typing import Final

import click

from gpulease.client.cli.exit_status import CannotStart
from gpulease.client.cli.tables import table

LEASES: Final = 10_000
TIMEOUT_S: Final = 300
"""For one run; a core that hangs must not hang the benchmark."""

KEPT: Final = ((), ("journal",), ("audit",), ("journal", "audit"), ("journal", "audit", "log"))
"""What the daemon keeps besides, in one run each. The log is at its fullest then: of each tenant, every event is still
told."""

GOALS: Final = {"mixed_per_s": 5000.0, "expiry_late_p99_ms": 10.0}
"""At least so many grants and renewals a second; at most so late. Both with and without the journal and the audit log;
the run with the full log is shown beside them."""

_ROWS: Final = (
    ("grants_per_s", "grants a second, until all are there"),
    ("renewals_per_s", "renewals a second"),
    ("mixed_per_s", "grants and renewals a second, beside frees"),
    ("grants_cpu_us", "a grant costs the broker's thread, us"),
    ("renewals_cpu_us", "a renewal costs it, us"),
    ("mixed_cpu_us", "a grant or a renewal beside frees, us"),
    ("expiry_late_p50_ms", "expiry after its deadline, ms, p50"),
    ("expiry_late_p99_ms", "expiry after its deadline, ms, p99"),
    ("expiry_late_max_ms", "expiry after its deadline, ms, max"),
    ("burst_late_p99_ms", "the same if 1,000 end at one moment, ms, p99"),
)


def run_core(leases: int | None, as_json: bool) -> None:
    """Measure and print; exits with 1 if a goal is missed."""
    count = leases or LEASES
    figures = {" + ".join(kept) or "nothing kept": core_figures(count, kept) for kept in KEPT}
    click.echo(json.dumps({"leases": count, "figures": figures}, indent=2) if as_json else _table(count, figures))
    judged = [found for name, found in figures.items() if "log" not in name.split(" + ")]
    sys.exit(0 if all(map(reaches_goals, judged)) else 1)


def core_figures(leases: int, kept: tuple[str, ...]) -> dict[str, float]:
    """Of one run, in a process of its own. Raises CannotStart."""
    command = [sys.executable, "-P", "-m", "gpulease.daemon.bench.lease_table", str(leases), *kept]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False)
    try:
        figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = (done.stderr.decode(errors="replace").strip() or "no output").splitlines()[-1]
        raise CannotStart(f"the core can't be measured: {said}") from None
    return figures


def reaches_goals(figures: dict[str, float]) -> bool:
    """Whether it is fast enough and in time."""
    return (
        figures["mixed_per_s"] >= GOALS["mixed_per_s"] and figures["expiry_late_p99_ms"] <= GOALS["expiry_late_p99_ms"]
    )


def _table(leases: int, figures: dict[str, dict[str, float]]) -> str:
    head = [f"{leases} leases, no processes", *figures]
    rows = [[text, *(f"{found[name]:.2f}" for found in figures.values())] for name, text in _ROWS]
    return table(head, rows)
