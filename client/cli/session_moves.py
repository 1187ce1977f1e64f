"""What commands that move several sessions share: the list of outcomes, and refusals of ended leases."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import click

from gpulease.client.console.exit_status import EXIT_FAILED
from gpulease.client.console.reports import Report
from gpulease.client.console.tables import fitted, output_width, shown
from gpulease.client.errors import LeaseExpired, NotFound, Revoked
from gpulease.protocol.json_text import indented_json

ENDED: Final = (LeaseExpired, Revoked, NotFound)
"""Refusals of a lease that has ended meanwhile."""


def print_outcomes(
    outcomes: Sequence[Report],
    columns: Mapping[str, str],
    text_of: Callable[[Report], str],
    *,
    as_json: bool,
    if_none: str,
    if_stays: Callable[[int], str],
) -> None:
    """Print what became of each session, and exit with 1 if any stays.

    Args:
        outcomes: A report for each session, with its `outcome`: "stays" for those that could not be moved.
        columns: The table's headings, and their keys in the reports.
        text_of: Returns an outcome as text, for the last column.
        as_json: Whether the reports are printed instead.
        if_none: What is printed for no session.
        if_stays: Returns the line under the table for a number of sessions that stay.
    """
    stays = sum(outcome["outcome"] == "stays" for outcome in outcomes)
    if as_json:
        click.echo(indented_json(outcomes))
    elif not outcomes:
        click.echo(shown(if_none))
    else:
        rows = [[*(one[key] for key in columns.values()), text_of(one)] for one in outcomes]
        click.echo(fitted([*columns, "outcome"], rows, output_width(), texts=tuple(columns), is_text_last=True))
        if stays:
            click.echo(shown(if_stays(stays)))
    if stays:
        sys.exit(EXIT_FAILED)
