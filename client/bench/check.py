"""Measures every promised figure in one run, for `bounds` to check. `gpulease bench --check` prints the result.

The two figures of a ratio are measured in the same run, at nearly the same time. If a figure misses its bound, it is
measured once more and the better result counts: other work on the host can only make a figure worse.
"""

import json
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from gpulease.client.bench.bounds import (
    AGAIN,
    Bound,
    BoundOutcome,
    floors_of,
    has_fallen,
    load_bounds,
    outcomes,
)
from gpulease.client.bench.check_parts import PARTS, CheckPart, DaemonKind, MeasuredDaemon, daemon_of, require_decode
from gpulease.client.bench.figures import LogLine
from gpulease.client.bench.host_floors import with_floors
from gpulease.client.console.card import card_title
from gpulease.client.console.exit_status import MissingPrerequisite
from gpulease.client.console.private_daemon import running_address

AGAIN_S: Final = 75.0
"""Longest time for measuring parts again, in seconds. Bounds a run's time on a host that misses many bounds."""

MAX_FILE_BYTES: Final = 1 << 20
"""Largest earlier file that is read, in bytes; a run's file has 20 KiB. Stops a wrong path from filling memory."""


def measure_promises(driver: str, log: LogLine, warn: LogLine) -> dict[str, Any]:
    """Measure everything that has a bound, on the running daemon or on private ones; returns the report.

    Args:
        driver: The driver of private daemons, which a running one must have; "auto" for any.
        log: Receives the name of each measurement before it starts.
        warn: Receives the names of the parts that could not be measured.

    Raises MissingPrerequisite if the running daemon has another driver, or a prerequisite is missing.
    """
    require_decode()
    # Without a running daemon, one private daemon serves all parts, including those that need TCP and TLS.
    has_running = running_address() is not None
    run: _Run | None = None

    def kind_of(part: CheckPart) -> DaemonKind:
        return DaemonKind.REACHABLE if part.kind is DaemonKind.ANY and not has_running else part.kind

    for kind, parts in groupby(PARTS, kind_of):
        log(f"a daemon: {kind.value}")
        with daemon_of(kind, driver, log, warn) as daemon:
            # "auto" has become the driver of the first daemon.
            driver = daemon.driver
            run = run or _Run(daemon)
            run.measure(tuple(parts), daemon)
    if run is None:
        raise ValueError("the check has no parts")
    return run.report


class _Run:
    """Measures parts, repeats those that missed a bound while AGAIN_S lasts, and collects the report."""

    def __init__(self, daemon: MeasuredDaemon) -> None:
        card = daemon.card
        self._bounds, self._left_s = load_bounds(daemon.driver), AGAIN_S
        self._again: dict[str, Any] = {}
        self._took_s: dict[str, float] = {}
        self.report: dict[str, Any] = {
            "title": card_title(card["driver"], card["name"], card["uuid"]),
            "driver": daemon.driver,
            "card": card["name"],
            AGAIN: self._again,
            "took_s": self._took_s,
        }

    def measure(self, parts: Sequence[CheckPart], daemon: MeasuredDaemon) -> None:
        """Measure the parts that have bounds, and once more those that missed one, while time is left."""
        bounded = {bound.part for bound in self._bounds}
        measured = [part for part in parts if part.name in bounded]
        for part in measured:
            daemon.log(part.text)
            self.report[part.name] = self._figures(part, daemon)
        promises = outcomes(self._bounds, self.report)
        missed = {promise.bound.part for promise in promises if promise.value is not None and not promise.is_kept}
        for part in measured:
            # A second measurement takes as long as the first. A part for which no time is left keeps its first figures.
            if part.name in missed and self._took_s[part.name] <= self._left_s:
                daemon.log(f"once more, because a bound was missed: {part.text}")
                self._left_s -= self._took_s[part.name]
                self._again[part.name] = self._figures(part, daemon)

    def _figures(self, part: CheckPart, daemon: MeasuredDaemon) -> dict[str, Any]:
        began_s = time.monotonic()
        figures = with_floors(lambda: part.measure(daemon), floors_of(part.name, self._bounds))
        self._took_s[part.name] = round(time.monotonic() - began_s, 1)
        return figures


def check_promises(report: Mapping[str, Any]) -> list[BoundOutcome]:
    """Return the outcomes of a report for its driver's bounds."""
    return outcomes(load_bounds(report["driver"]), report)


def read_earlier(path: Path, report: Mapping[str, Any]) -> dict[str, Any]:
    """An earlier run's report. Raises MissingPrerequisite if the file has none, or one of another kind of card."""
    # Read one byte more than allowed, to notice a file that is too large.
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
        raise MissingPrerequisite(f"{path} must be a file that `gpulease bench --check` wrote")
    # Figures of another card would look like regressions, or hide them.
    for key in ("driver", "card"):
        if earlier[key] != report[key]:
            raise MissingPrerequisite(
                f"{path} was measured on {earlier['card']} ({earlier['driver']}), this run on "
                f"{report['card']} ({report['driver']}): only runs on the same kind of card can be "
                "compared"
            )
    return earlier


def fallen(now: list[BoundOutcome], before: Mapping[str, BoundOutcome]) -> list[Bound]:
    """Return the bounds whose value is worse than in the earlier run, by a factor of `bounds.FALL` or more."""
    return [
        promise.bound
        for promise in now
        if promise.value is not None
        and (earlier := before.get(promise.bound.name)) is not None
        and earlier.value is not None
        and has_fallen(promise.bound, promise.value, earlier.value)
    ]
