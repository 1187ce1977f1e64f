"""Progress lines: rewrites the last line of a terminal, and writes a line into a pipe now and then."""

import os
import time
from collections.abc import Callable
from typing import Final

import click

from gpulease.client.console.tables import is_terminal, output_width, shown

PIPE_LINE_S: Final = 1.0
"""Seconds between two lines of `show` in a pipe, whose reader keeps all of them."""

_ERASE: Final = "\r\x1b[2K"
"""Carriage return, then erase the line (ECMA-48, EL)."""


class LiveLines:
    """Prints on standard output, or nothing at all."""

    def __init__(self, *, is_silent: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        """Find out whether the output is a terminal.

        Args:
            is_silent: Print nothing.
            clock: The monotonic time in seconds.
        """
        self._is_silent, self._clock = is_silent, clock
        # A terminal of the type `dumb` can't erase a line.
        self._is_live = is_terminal() and os.environ.get("TERM") != "dumb"
        self._shown = ""
        self._last_s = clock()

    def say(self, text: str = "") -> None:
        """Print a line that stays, or several lines."""
        if self._is_silent:
            return
        # First erase the line that `show` has left.
        click.echo(f"{_ERASE if self._shown else ''}{text}", color=self._is_live)
        self._shown = ""

    def show(self, text: str) -> None:
        """Print a line about the current state. On a terminal, the next call replaces it."""
        now_s = self._clock()
        if self._is_silent:
            return
        if self._is_live:
            # Cut the line at the width, because a line that wraps could not be erased.
            width = output_width()
            self._shown = shown(text)[: width - 1 if width else None]
            click.echo(f"{_ERASE}{self._shown}", nl=False, color=True)
        # Write a line into a pipe from time to time, to show its reader that the command continues.
        elif now_s - self._last_s >= PIPE_LINE_S:
            self._last_s = now_s
            click.echo(text)

    def settle(self) -> None:
        """Erase the line that `show` left on a terminal, before other output."""
        if self._shown:
            click.echo(_ERASE, nl=False, color=True)
            self._shown = ""
