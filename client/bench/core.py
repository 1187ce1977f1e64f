"""Measures the lease core alone: ten thousand leases without processes."""

import json
import subprocess
import sys
from typing import Final

from gpulease.client.bench.bounds import keeps_bounds
from gpulease.client.console.exit_status import MissingPrerequisite

LEASES: Final = 10_000
TIMEOUT_S: Final = 300
"""Longest time for one run, in seconds. Stops a core that hangs from blocking the benchmark."""

KEPT: Final = ((), ("journal",), ("audit",), ("journal", "audit"), ("journal", "audit", "log"))
"""The records that the daemon keeps in each run. "log" is a complete log, with every event of each tenant."""


def measure_core(leases: int) -> dict[str, dict[str, float]]:
    """Measure the core once for each set in KEPT. Returns the figures by the set's name. Raises MissingPrerequisite."""
    return {" + ".join(kinds) or "nothing kept": core_figures(leases, kinds) for kinds in KEPT}


def keeps_core_bounds(figures: dict[str, dict[str, float]]) -> bool:
    """True if every run, except those with the complete log, keeps the bounds of a host with a card."""
    return all(
        keeps_bounds("cuda", {"core": path_figures})
        for name, path_figures in figures.items()
        if "log" not in name.split(" + ")
    )


def core_figures(leases: int, kinds: tuple[str, ...], *, has_expiry: bool = True) -> dict[str, float]:
    """Measure one run, and with `has_expiry` also how late leases expire. Raises MissingPrerequisite."""
    # Measure in a separate process, because the client imports nothing of the daemon.
    command = [sys.executable, "-P", "-m", "gpulease.daemon.bench.lease_table"]
    command += [*([] if has_expiry else ["--no-expiry"]), str(leases), *kinds]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S, check=False)
    try:
        # The figures are the last line. Lines of a log may precede it.
        figures: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last_line = (result.stderr.decode(errors="replace").strip() or "no output").splitlines()[-1]
        raise MissingPrerequisite(f"the core can't be measured: {last_line}") from None
    return figures
