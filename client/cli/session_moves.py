"""Code shared by commands that move several sessions: the loop, its retries and outcomes, errors of ended leases."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import click

from gpulease.client.console.exit_status import EXIT_FAILED
from gpulease.client.console.reports import Report
from gpulease.client.console.tables import fitted, output_width, shown
from gpulease.client.errors import GpuLeaseError, LeaseExpired, NotFound, Revoked
from gpulease.protocol.back_off import back_off_s
from gpulease.protocol.json_text import indented_json

ENDED: Final = (LeaseExpired, Revoked, NotFound)
"""Errors of a request about a lease that has ended in the meantime."""

RETRY_S: Final = 0.05
MOST_RETRY_S: Final = 0.5
"""First and longest pause before a session that was busy is tried again, in seconds. Each attempt is a park, and the
node's `parks_per_minute` (240 by default) limits their number."""


class BusyRetries:
    """The pauses between attempts to move one busy session.

    Args:
        patience_s: Seconds from now after which the session is not tried again.
    """

    def __init__(self, patience_s: float) -> None:
        self._until, self._tries = time.monotonic() + patience_s, 0

    def pause(self) -> bool:
        """Sleep before the next attempt, longer each time. Returns False at once if `patience_s` is over."""
        if time.monotonic() >= self._until:
            return False
        time.sleep(back_off_s(self._tries, RETRY_S, MOST_RETRY_S))
        self._tries += 1
        return True


_BEGUN: Final = {
    "outcome": "interrupted",
    "reason": "its move may have begun, and then ends without this command",
}
_NOT_BEGUN: Final = {"outcome": "stays", "reason": "the command ended before its turn"}


@dataclass(frozen=True, slots=True)
class MoveOutcomes:
    """How a command prints the outcomes of its moves: as a table, or as JSON.

    Attributes:
        name: Returns the part of a lease's report that names its session.
        columns: The table's headings, and their keys in the reports.
        text_of: Returns an outcome as text, for the last column.
        if_none: The line that is printed if there is no session.
        if_stays: Returns the line under the table that says how many sessions stay.
        as_json: Whether the reports are printed instead.
    """

    name: Callable[[Report], Report]
    columns: Mapping[str, str]
    text_of: Callable[[Report], str]
    if_none: str
    if_stays: Callable[[int], str]
    as_json: bool

    def print(self, outcomes: Sequence[Report]) -> int:
        """Print the outcomes, and return how many sessions stay."""
        stays: int = sum(outcome["outcome"] == "stays" for outcome in outcomes)
        if self.as_json:
            click.echo(indented_json(outcomes))
        elif not outcomes:
            click.echo(shown(self.if_none))
        else:
            rows = [[*(row[key] for key in self.columns.values()), self.text_of(row)] for row in outcomes]
            headings = tuple(self.columns)
            click.echo(fitted([*headings, "outcome"], rows, output_width(), texts=headings, is_text_last=True))
            if stays:
                click.echo(shown(self.if_stays(stays)))
        return stays


def move_each(leases: Sequence[Report], move: Callable[[Report], Report], printed: MoveOutcomes) -> None:
    """Move sessions one after the other, print the outcome of each, and exit with 1 if any stays.

    If an interrupt or a lost daemon ends the loop, the outcomes are printed as well, and the error is raised again.

    Args:
        leases: The leases' reports.
        move: Moves a session; returns the rest of its report, with its `outcome`: "stays" if it could not be moved.
        printed: How the outcomes are printed.
    """
    outcomes: list[Report] = []
    try:
        for lease in leases:
            outcomes.append(printed.name(lease) | move(lease))
    except (KeyboardInterrupt, GpuLeaseError):
        left = leases[len(outcomes) :]
        outcomes += [printed.name(lease) | (_NOT_BEGUN if place else _BEGUN) for place, lease in enumerate(left)]
        printed.print(outcomes)
        raise
    if printed.print(outcomes):
        sys.exit(EXIT_FAILED)
