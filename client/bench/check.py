"""Measures every promised figure in one run, for `bounds` to check. `gpulease bench --check` prints the result.

The whole bench runs first, then regions, the decode engine, the lease core and the gateway. The two figures of a ratio
come from the same run; `host` represents the host's speed if nothing else does.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from gpulease.client.bench.bounds import Bound, BoundOutcome, has_fallen, load_bounds, outcomes
from gpulease.client.bench.core import core_figures
from gpulease.client.bench.figures import Figures, LogLine
from gpulease.client.bench.gateway_load import request_figures
from gpulease.client.bench.region_times import measure_regions
from gpulease.client.bench.suite import REQUEST_CONTEXTS, RunSize, measure_with_direct_calls
from gpulease.client.console.exit_status import MissingPrerequisite
from gpulease.client.console.private_daemon import private_daemon, running_address
from gpulease.client.console.transform import transform_ptx

ROUNDS: Final = {"cuda": 3, "cpu": 1}
LAUNCHES: Final = {"cuda": 10_000, "cpu": 5_000}
LEASES: Final = 10
FLIPS: Final = 100
REGION_SAMPLES: Final = {"cuda": 100, "cpu": 20}
CORE_LEASES: Final = {"cuda": 10_000, "cpu": 2_000}
REQUEST_S: Final = 2.0
REBIND_TOKENS: Final = 512
SHAPES: Final = {"cuda": "llama-1b", "cpu": "two-layers"}
BATCHES: Final = {"cuda": (1, 8, 64, 256), "cpu": (1, 8)}
DECODER_BATCHES: Final = {"cuda": (8, 64), "cpu": (8,)}
DECODER_S: Final = 2.0
CONTEXT: Final = 128
"""Sizes of a run: five minutes on a card, one on the embedded driver."""

PYTHON_STEPS: Final = 1000
PYTHON_SAMPLES: Final = 50

MAX_FILE_BYTES: Final = 1 << 20
"""Largest earlier file that is read, in bytes; a run's file has 20 KiB. Stops a wrong path from filling memory."""


def measure_promises(driver: str, log: LogLine, warn: LogLine) -> dict[str, Any]:
    """Measure everything that has a bound, on the running daemon or on private ones; returns the report.

    Args:
        driver: The driver of private daemons, which a running one must have; "auto" for any.
        log: Receives the name of each measurement before it starts.
        warn: Receives what could not be measured.

    Raises MissingPrerequisite if the running daemon has another driver, or a prerequisite is missing.
    """
    report: dict[str, Any] = {"host": _host()}
    # Whether "auto" finds a card is known only once a daemon runs: a card's sizes also suit the embedded driver.
    size = "cpu" if driver == "cpu" else "cuda"
    # The whole bench first: its private daemons must be alone on the card.
    bench = measure_with_direct_calls(RunSize(driver, ROUNDS[size], LAUNCHES[size], LEASES, FLIPS, "", ""), log, warn)
    driver_name = bench["driver"]
    report |= {"title": bench["title"], "driver": driver_name, "card": bench["card"], "bench": bench}
    # Regions and the decode engine share one daemon; the core and the gateway have their own.
    with contextlib.ExitStack() as stack:
        address = running_address() or stack.enter_context(private_daemon(driver_name))
        report["regions"] = measure_regions(address, transform_ptx(), REGION_SAMPLES[driver_name], log)
        report |= _decode(address, driver_name, log)
    log("the lease core with its journal, audit log and log")
    # Wait for leases to expire only where a bound says how late they may.
    has_expiry = any("_late_" in bound.figure for bound in load_bounds(driver_name))
    kept = ("journal", "audit", "log")
    report["core"] = core_figures(CORE_LEASES[driver_name], kept, has_expiry=has_expiry)
    log("requests of one lease each, the tenant's own contexts used again")
    # A daemon of its own: its pool holds the contexts that requests use again.
    with private_daemon(driver_name, warm_contexts=REQUEST_CONTEXTS, settings='recycle = "same-tenant"\n') as address:
        report["gateway"] = request_figures(address, REQUEST_S, has_pool=True)
    return report


def _host() -> Figures:
    """Time of PYTHON_STEPS writes to a dictionary, the best of several: the interpreter's speed on this host."""
    best_s = float("inf")
    # The best of many short samples: other processes can only make them slower.
    for _ in range(PYTHON_SAMPLES):
        khz_by_core: dict[int, int] = {}
        # A fixed amount of interpreted work, with nothing but a small dictionary.
        began = time.perf_counter()
        for number in range(PYTHON_STEPS):
            khz_by_core[number & 63] = number
        best_s = min(best_s, time.perf_counter() - began)
    return {"python_us": best_s * 1e6}


def _decode(address: str, driver: str, log: LogLine) -> dict[str, Any]:
    # Imported only here: a decoder needs an extra. Without it nothing would be checked, so it is required.
    try:
        from gpulease.client.bench.checkpoint_load import warm_load_figures
        from gpulease.client.bench.decode_service import measure_throughput
        from gpulease.client.bench.decode_shapes import SHAPES as CONFIGS
        from gpulease.client.bench.decode_speed import DecodePlan, measure_decode
        from gpulease.client.bench.rebind_times import measure_rebinds
        from gpulease.client.decode import RandomCheckpoint
    except ImportError as error:
        raise MissingPrerequisite(f"the decode engine's promises need the extra `decode`: {error}") from None
    shape = SHAPES[driver]
    checkpoint = RandomCheckpoint(CONFIGS[shape], 1)
    steps: dict[str, dict[str, Figures]] = {"step": {}, "direct": {}, "torch": {}}

    def keep(figure: Mapping[str, object]) -> None:
        # Keep only steps, by the way in which they ran: other figures have no bound.
        kind, batch, took_ms = (figure.get(key) for key in ("figure", "batch", "ms"))
        if kind in steps and batch is not None and isinstance(took_ms, float):
            steps[str(kind)][str(batch)] = {"ms": took_ms}

    # The kernels alone are not promised, so their times are left out.
    plan = DecodePlan((shape,), BATCHES[driver], (CONTEXT,), ("decode_torch",), times_kernels=False)
    measure_decode(address, plan, keep, log)
    log(f"{shape}: a decoder compared with its engine")
    served = asyncio.run(measure_throughput(checkpoint, address, DECODER_S, DECODER_BATCHES[driver]))
    log(f"{shape}: a rebind behind {REBIND_TOKENS} tokens")
    (rebind,) = asyncio.run(measure_rebinds(address, checkpoint, (REBIND_TOKENS,)))
    log(f"{shape}: its files loaded from the page cache")
    return {
        "decode": steps,
        "decoder": {str(one["sequences"]): one for one in served},
        "rebind": asdict(rebind),
        "load": warm_load_figures(address, shape),
    }


def check_promises(report: Mapping[str, Any]) -> list[BoundOutcome]:
    """How a report keeps the bounds of its driver."""
    return outcomes(load_bounds(report["driver"]), report)


def read_earlier(path: Path, report: Mapping[str, Any]) -> dict[str, Any]:
    """An earlier run's report. Raises MissingPrerequisite if the file is not one, or is of another kind of card."""
    # One byte more than allowed shows that the file is too large.
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise MissingPrerequisite(f"{path}: {error.strerror}") from None
    try:
        earlier = json.loads(text) if len(text) <= MAX_FILE_BYTES else None
    except (ValueError, RecursionError):
        earlier = None
    if not isinstance(earlier, dict) or not {"driver", "card", "title"} <= set(earlier):
        raise MissingPrerequisite(f"{path} must be a file that `gpulease bench --check` has written")
    # Figures of another card would look like regressions, or hide them.
    for key in ("driver", "card"):
        if earlier[key] != report[key]:
            raise MissingPrerequisite(
                f"{path} is of {earlier['card']} ({earlier['driver']}), this run of {report['card']}"
                f" ({report['driver']}): only runs on the same kind of card are compared"
            )
    return earlier


def fallen(now: list[BoundOutcome], before: Mapping[str, BoundOutcome]) -> list[Bound]:
    """The bounds with a value that is worse than the earlier run's, by `bounds.FALL` or more."""
    return [
        promise.bound
        for promise in now
        if promise.value is not None
        and (earlier := before.get(promise.bound.name)) is not None
        and earlier.value is not None
        and has_fallen(promise.bound, promise.value, earlier.value)
    ]
