"""Typical kernels of users, which are compiled and run on a daemon with either driver.

`PYTHONPATH=.dev python -m tests.lab.kernel_suite` prints a JSON object for each case, and the number of cases with each
outcome. `--table EMBEDDED.jsonl CARD.jsonl` makes a table of tools, features and drivers from two such outputs.
"""

import importlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final

import click
import numpy as np

from gpulease.client import GpuBuilder, GpuLeaseError, GpuSession

from .kernel_cases.trial import Case, Trial

VRAM_BYTES: Final = 256 << 20

SUITE: Final = ("cuda_cases", "network_cases", "feature_cases", "triton_cases", "numba_cases", "array_cases")
"""Modules with cases. If a compiler is not installed, its module is left out and reported."""


def cases() -> tuple[list[Case], list[str]]:
    """Load all cases. Returns them, and the modules whose compiler is not installed."""
    found: list[Case] = []
    lacking = []
    for name in SUITE:
        try:
            module = importlib.import_module(f".kernel_cases.{name}", __package__)
        except ImportError:
            lacking.append(name)
            continue
        for cases in (module.CASES, getattr(module, "PTX_CASES", None)):
            found += cases.all if cases is not None else []
    return found, lacking


def outcome_of(case: Case, session: GpuSession) -> dict[str, Any]:
    """Run a case. Returns the figures to print.

    `outcome` is "ok", "wrong", "refused" (if the case says that its driver refuses it) or "failed". `said` is the
    error's text.
    """
    trial = Trial(session)
    outcome, said = "ok", ""
    try:
        results = list(case.run(trial))
        if not results:
            outcome, said = "failed", "it compares nothing"
        # Errors are relative to the largest expected value, so that values near zero do not dominate.
        for found, wanted in results:
            left, right = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
            scale = max(float(np.abs(right).max(initial=0)), 1e-30)
            if left.shape != right.shape or not np.all(np.abs(left - right) <= case.tolerance * scale):
                outcome, said = "wrong", "the result is not numpy's"
    except GpuLeaseError as error:
        expected = case.refused_by.get(session.driver)
        outcome = "refused" if expected is not None and expected in str(error) else "failed"
        said = str(error)
    except Exception as error:
        # An error of a compiler, of numpy or of the case itself. The other cases still run.
        outcome, said = "failed", f"{type(error).__name__}: {error}"
    # A case that should be refused but runs is a failure, because the table would be wrong.
    else:
        if session.driver in case.refused_by:
            outcome, said = "failed", "it ran, though it should have been refused"
    return {
        "tool": case.tool,
        "kernel": case.name,
        "features": list(case.features),
        "driver": session.driver,
        "outcome": outcome,
        "said": said,
        "compile_ms": round(trial.compile_ms, 1),
        "launch_ms": round(trial.launch_ms, 2),
    }


def run_all(chosen: list[Case], address: str | None = None) -> Iterator[dict[str, Any]]:
    """Run cases, each on a separate lease, so that a lost session affects no other case."""
    builder = GpuBuilder(address).min_vram(VRAM_BYTES).lease_secs(600)
    for case in chosen:
        with builder.acquire() as lease, GpuSession(lease) as session:
            if case.only_on in ("", session.driver):
                yield outcome_of(case, session)


def table_of(*outputs: list[dict[str, Any]]) -> str:
    """Return a table of tools and features.

    Each driver's column has the number of kernels that run, and their times.
    """
    rows: dict[tuple[str, str], dict[str, list[dict[str, Any]]]] = {}
    for line in (line for output in outputs for line in output):
        for feature in line["features"] or ["plain"]:
            rows.setdefault((line["tool"], feature), {}).setdefault(line["driver"], []).append(line)
    text = ["| tool | feature | embedded driver | card |", "|---|---|---|---|"]
    for (tool, feature), by_driver in sorted(rows.items()):
        cells = [_cell(by_driver.get(driver, [])) for driver in ("cpu", "cuda")]
        text.append(f"| {tool} | {feature} | {cells[0]} | {cells[1]} |")
    text += ["", "The refused kernels, with the error message:", ""]
    for line in (line for output in outputs for line in output if line["outcome"] != "ok"):
        driver = "the embedded driver" if line["driver"] == "cpu" else "a card"
        text.append(f"- {line['tool']}, `{line['kernel']}`, on {driver}: {_shortened(line['said'])}")
    return "\n".join(text) + "\n"


def _shortened(said: str) -> str:
    """Return an error's sentence, without the operation that raised it and without PTX."""
    sentence = re.sub(
        r"^sync: earlier launch \d+ failed: |^module_load: (?:line \d+)?(?: of kernel \w+)?(?:: )?", "", said
    )
    return re.split(r"; this |: [.\w]+ [{%.\[(]|: \S+;|\. [A-Z]", sentence)[0]


def _cell(lines: list[dict[str, Any]]) -> str:
    if not lines:
        return "-"
    counts = Counter(line["outcome"] for line in lines)
    times_ms = [line["launch_ms"] for line in lines if line["outcome"] == "ok"]
    time = f", {median(times_ms):.{0 if median(times_ms) >= 10 else 1}f} ms" if times_ms else ""
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) + time


@click.command(help=(__doc__ or "").partition("\n\n")[0])
@click.option("--only", multiple=True, metavar="NAME", help="Run this case alone; may be given again.")
@click.option(
    "--table", nargs=2, type=click.Path(path_type=Path), metavar="FILE FILE", help="Print a table of outputs."
)
def main(only: tuple[str, ...], table: tuple[Path, Path] | None) -> None:
    """Run the suite, or make the table."""
    if table:
        outputs = [[json.loads(line) for line in path.read_text().splitlines() if line[:1] == "{"] for path in table]
        click.echo(table_of(*outputs), nl=False)
        return
    found, lacking = cases()
    if unknown := set(only) - {case.name for case in found}:
        raise click.BadParameter(f"there is no case {', '.join(sorted(unknown))}", param_hint="--only")
    counts: Counter[str] = Counter()
    for line in run_all([case for case in found if not only or case.name in only], os.environ.get("GPULEASE_ADDRESS")):
        click.echo(json.dumps(line))
        counts[line["outcome"]] += 1
    for name in lacking:
        click.echo(f"{name}: left out, its compiler is not installed")
    click.echo(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))
    raise SystemExit(bool(counts["wrong"] or counts["failed"]))


if __name__ == "__main__":
    main()
